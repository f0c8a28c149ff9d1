"""Accelerate: the YAML file of ``accelerate launch`` with FSDP 2 and a ParallelismConfig.

Keys and rules are those of ``accelerate/parallelism_config.py``, ``accelerate/commands/config/config_args.py`` and
``accelerate/commands/launch.py`` of 1.15.0. Batches stand in the training script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import yaml

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.keyed import Document
from planner.exchange.training_config import PLAIN, TrainingConfig

VERSION = "1.15"
AXES: Mapping[str, str] = {
    "dp_replicate": "parallelism_config_dp_replicate_size",
    "dp_shard": "parallelism_config_dp_shard_size",
    "tp": "parallelism_config_tp_size",
    "cp": "parallelism_config_cp_size",
    "sp": "parallelism_config_sp_size",
}
KEYS: Mapping[str, str] = {
    "devices": "num_processes",
    "tp": AXES["tp"],
    "cp": AXES["cp"],
    "optimizer_sharding": AXES["dp_shard"],
    "shard_size": AXES["dp_shard"],
    "recompute": "fsdp_activation_checkpointing",
    "offload_optimizer": "fsdp_offload_params",
    "offload_parameters": "fsdp_offload_params",
    "precision": "mixed_precision",
}
_AXES = "parallelism_config."
_KNOWN = "compute_environment", "num_machines", "fsdp_config.fsdp_auto_wrap_policy", _AXES + "parallelism_config_cp_"
_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}


def document(config: TrainingConfig) -> dict[str, Any]:
    """The YAML document of a configuration that Accelerate can run."""
    sharded = config.optimizer_sharding not in (None, "none")
    ranks = config.dp or 1
    shard = (config.shard_size or ranks) if sharded else 1
    axes = {"dp_replicate": ranks // shard, "dp_shard": shard, "tp": config.tp or 1, "cp": config.cp or 1}
    fully = sharded or axes["tp"] > 1 or axes["cp"] > 1 or config.recompute == "full" or bool(config.offload_parameters)
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fully else "MULTI_GPU" if ranks > 1 else "NO",
        "mixed_precision": "no" if config.precision == "fp32" else config.precision,
        "num_processes": config.devices,
    }
    if not fully:
        return found
    found["fsdp_config"] = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": config.optimizer_sharding != "zero2",
        "fsdp_activation_checkpointing": config.recompute == "full",
        "fsdp_offload_params": bool(config.offload_parameters),
    }
    found["parallelism_config"] = {AXES[name]: size for name, size in axes.items()}
    if axes["cp"] > 1:
        found["parallelism_config"]["parallelism_config_cp_backend"] = "torch"
        found["parallelism_config"]["parallelism_config_cp_comm_strategy"] = "alltoall"
    return found


def write(config: TrainingConfig) -> Written:
    """The file."""
    head = f"# A plan of Meshwright for Accelerate {VERSION}: accelerate launch --config_file THIS train.py\n"
    return Written(text=head + yaml.safe_dump(document(config), sort_keys=False))


def read(text: str, source: str) -> ReadConfig:
    """Read a configuration.

    Raises
    ------
    InputError
        The file is no YAML mapping, or a value is of a wrong type.
    """
    raw = Document.yaml(text, source, "Accelerate")
    sizes = {name: raw.number(_AXES + key) for name, key in AXES.items()}
    devices, shard = raw.number("num_processes"), sizes["dp_shard"]
    fully, parallel = raw.get("distributed_type") == "FSDP", any(key.startswith(_AXES) for key in raw.values)
    if not parallel and fully:
        shard = devices
    gathers, version = _gathers(raw), raw.get("fsdp_config.fsdp_version")
    again, away = (raw.flag(f"fsdp_config.{KEYS[name]}") for name in ("recompute", "offload_parameters"))
    away = away and fully
    level = "none" if not fully or shard == 1 else "zero3" if gathers else "zero2"
    violations = tuple(_broken(sizes, devices, parallel=parallel, fully=fully and version == 2))
    for prefix in _KNOWN:
        raw.pass_over(prefix)
    config = replace(
        PLAIN,
        devices=devices,
        tp=sizes["tp"],
        cp=sizes["cp"] * sizes["sp"],
        ep=1,
        etp=sizes["tp"],
        precision=_precision(raw),
        optimizer_sharding=level,
        shard_size=shard if level != "none" and sizes["dp_replicate"] > 1 else 0,
        sequence_parallel=False,
        context_algorithm="ring" if sizes["cp"] > 1 else "all_to_all" if sizes["sp"] > 1 else "none",
        recompute="full" if again else "none",
        recompute_layers=(),
        recompute_count=0,
        offload_optimizer=away,
        offload_parameters=away,
    )
    return ReadConfig(config=config, not_read=raw.unread(), violations=violations)


def _precision(raw: Document) -> str:
    word = str(raw.get("mixed_precision", "no"))
    return "fp32" if word == "no" else word


def _gathers(raw: Document) -> bool:
    """Whether parameters are gathered again for the backward pass."""
    older = _STRATEGIES.get(str(raw.get("fsdp_config.fsdp_sharding_strategy")), True)
    said = raw.get("fsdp_config.fsdp_reshard_after_forward", older)
    return _STRATEGIES.get(said, True) if isinstance(said, str) else bool(said)


def _broken(sizes: Mapping[str, int], devices: int, *, parallel: bool, fully: bool) -> Iterator[Violation]:
    """Rules that show in the keys alone."""
    product = prod(sizes.values())
    if parallel and product != devices:
        yield Violation(
            key="num_processes",
            value=str(devices),
            rule=f"the sizes of parallelism_config have the product {product}",
            remedy=f"use {product}, or other sizes",
        )
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        yield Violation(
            key=AXES["sp"],
            value=str(sizes["sp"]),
            rule="context and sequence parallelism exclude each other",
            remedy="use one of them",
        )
    if parallel and not fully:
        yield Violation(
            key="parallelism_config",
            value="",
            rule="it needs distributed_type FSDP and fsdp_version 2",
            remedy="set both",
        )


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Accelerate across fields."""
    sharded = config.optimizer_sharding not in (None, "none")
    ranks = config.dp or 1
    shard = (config.shard_size or ranks) if sharded else 1
    if ranks // shard > 1 and shard == 1 and ((config.tp or 1) > 1 or (config.cp or 1) > 1):
        yield Violation(
            key=AXES["dp_replicate"],
            value=str(ranks),
            remedy="shard over data-parallel ranks",
            rule="beside tensor or context parallelism replicas need dp_shard_size above 1",
        )
    if bool(config.offload_optimizer) != bool(config.offload_parameters):
        yield Violation(
            key=KEYS["offload_optimizer"],
            value="",
            rule="parameters and optimizer states go to the host together",
            remedy="offload both or none",
        )
    if config.offload_optimizer and not sharded and ranks > 1:
        yield Violation(
            key=KEYS["offload_optimizer"],
            value="true",
            rule="parameters of replicas do not go to the host",
            remedy="shard over dp_shard_size",
        )


def recognises(name: str, text: str) -> bool:
    """Whether a file is one of ``accelerate launch``."""
    return "distributed_type:" in text and "num_processes:" in text


ACCELERATE = ExchangeFormat(
    name="accelerate",
    version=VERSION,
    suffix=".yaml",
    also_silent=frozenset({"recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=rules,
)
