"""What training frameworks can run of a plan: one table a framework, read from ``hw_profiles/software``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict

Offload = Literal["offload_optimizer", "offload_parameters", "offload_activations"]
Overlap = Literal["tensor_overlap", "expert_overlap", "tokens_once"]
Algorithm = Literal["ring", "all_to_all"]
Sharding = Literal["none", "zero1", "zero2", "zero3"]


class Capability(BaseModel):
    """What one version of a framework can run; the file of the tables says what each field means."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    framework: str
    version: str
    source: str
    software: tuple[str, ...]
    tensor: bool
    pipeline: bool
    context: tuple[Algorithm, ...]
    expert_cut: tuple[Literal["width", "whole"], ...]
    schedules: tuple[str, ...]
    short_1f1b: bool = True
    interleaving: Literal["multiples", "rounds", "groups"] = "multiples"
    uneven_stages: bool
    optimizer_sharding: tuple[Sharding, ...]
    optimizer_sharding_with_pipeline: tuple[Sharding, ...]
    shard_groups: tuple[Sharding, ...]
    recompute: tuple[Literal["none", "selective", "full"], ...]
    recompute_by_layer: bool
    recompute_count: bool
    precision: tuple[str, ...]
    sequence_parallel: Literal["free", "always", "never"]
    offload: tuple[Offload, ...]
    overlaps: tuple[Overlap, ...]

    def shardings(self, pipeline: int) -> tuple[Sharding, ...]:
        """ZeRO levels beside a pipeline of so many ranks."""
        return self.optimizer_sharding if pipeline == 1 else self.optimizer_sharding_with_pipeline

    def interleaves(self, pipeline: int, micro_batches: int) -> bool:
        """Whether interleaved 1F1B runs so many micro-batches on so many pipeline ranks.

        >>> [capabilities()[name].interleaves(4, 14) for name in ("megatron", "torchtitan", "mindformers")]
        [True, False, False]
        """
        if self.interleaving == "groups":
            return micro_batches >= pipeline
        rounds = max(1, micro_batches // pipeline) if self.interleaving == "rounds" else pipeline
        return micro_batches % rounds == 0

    def runs_1f1b(self, pipeline: int, micro_batches: int) -> bool:
        """Whether 1F1B runs so many micro-batches on so many pipeline ranks; one runs as GPipe runs it.

        >>> [capabilities()[name].runs_1f1b(4, 2) for name in ("megatron", "torchtitan")]
        [True, False]
        """
        return self.short_1f1b or micro_batches == 1 or micro_batches >= pipeline


NAME_ENDS = ":"
"""Separates the name of software from its settings."""


@lru_cache(maxsize=1)
def capabilities() -> Mapping[str, Capability]:
    """The tables by name.

    >>> capabilities()["megatron"].schedules
    ('none', '1f1b', 'interleaved_1f1b')
    """
    text = (resources.files("hw_profiles") / "software" / "capabilities.yaml").read_text(encoding="utf-8")
    return {name: Capability.model_validate(table) for name, table in yaml.safe_load(text).items()}


def capability_of(software: str) -> Capability | None:
    """The table of the framework that a name of ``--software`` stands for; None where there is none.

    >>> capability_of("nemo").framework, capability_of("jax")
    ('Megatron-Bridge', None)
    """
    name = software.partition(NAME_ENDS)[0]
    return next((table for table in capabilities().values() if name in table.software), None)
