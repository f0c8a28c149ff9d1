"""Files of drawn plans for the frameworks to judge: legal ones, and ones that `check` calls illegal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

from planner.exchange.formats import ExchangeFormat, rounded
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError
from tests.planner.exchange.training_configs import training_configs


def drawn(form: ExchangeFormat, count: int) -> list[TrainingConfig]:
    """The first legal configurations that hypothesis draws, each time the same."""
    found: dict[TrainingConfig, None] = {}

    @settings(
        max_examples=20 * count, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck]
    )
    @given(config=training_configs())
    def draw(config: TrainingConfig) -> None:
        if len(found) >= count:
            return
        try:
            nearest = rounded(config, form.table)
        except InputError:
            return
        if form.name == "megatron":  # Transformer Engine, which offloads activations, needs a device
            nearest = replace(nearest, offload_activations=False)
        if not form.violations(nearest):
            found[nearest] = None

    draw()
    return list(found)


def spoiled(form: ExchangeFormat, config: TrainingConfig) -> Iterator[TrainingConfig]:
    """The same with one thing changed, as far as its file shows that it is illegal."""
    changes: list[dict[str, Any]] = [
        {"devices": (config.devices or 1) + 1},
        {"global_batch": (config.global_batch or 1) + 1},
        *([] if form.name == "deepspeed" else [{"ep": (config.ep or 1) * 3}]),  # DeepSpeed looks when it starts
        {"tensor_overlap": True, "sequence_parallel": False},
        {"overlap_parameters": True, "optimizer_sharding": "none", "shard_size": 0},
        {"cp": 3},
    ]
    for change in changes:
        other = replace(config, **change)
        try:
            read = form.read(form.write(other).text, f"file{form.suffix}")
        except InputError:
            yield other
        else:
            if read.violations or form.violations(read.config):
                yield other


def case_of(form: ExchangeFormat, config: TrainingConfig, file: Path) -> dict[str, Any]:
    """Write a file, and say what its judge must know of the job."""
    file.write_text(form.write(config).text)
    return {
        "format": form.name,
        "file": str(file),
        "devices": config.devices,
        "data": (config.devices or 1) // ((config.tp or 1) * (config.cp or 1)),
        "experts": (config.ep or 1) > 1,
    }
