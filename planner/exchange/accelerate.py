"""Accelerate: the YAML file of ``accelerate launch`` with FSDP 2 and a ParallelismConfig.

Keys and rules are those of ``accelerate/parallelism_config.py``, ``accelerate/commands/config/config_args.py`` and
``accelerate/commands/launch.py`` of 1.15.0. Batches stand in the training script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, apart_on_host
from planner.exchange.keyed import Document, yaml_file
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


def write(config: TrainingConfig) -> Written:
    """The file."""
    ranks, shard = config.dp or 1, config.shard
    axes = {"dp_replicate": ranks // shard, "dp_shard": shard, "tp": config.tp or 1, "cp": config.cp or 1}
    fully = (
        config.sharded
        or axes["tp"] > 1
        or axes["cp"] > 1
        or config.recompute == "full"
        or bool(config.offload_parameters)
    )
    found: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fully else "MULTI_GPU" if ranks > 1 else "NO",
        "mixed_precision": "no" if config.precision == "fp32" else config.precision,
        "num_processes": config.devices,
    }
    if fully:
        found |= {
            "fsdp_config.fsdp_version": 2,
            "fsdp_config.fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_config.fsdp_reshard_after_forward": config.optimizer_sharding != "zero2",
            "fsdp_config.fsdp_activation_checkpointing": config.recompute == "full",
            "fsdp_config.fsdp_offload_params": bool(config.offload_parameters),
            **{_AXES + AXES[name]: size for name, size in axes.items()},
        }
        if axes["cp"] > 1:
            found[f"{_AXES}parallelism_config_cp_backend"] = "torch"
            found[f"{_AXES}parallelism_config_cp_comm_strategy"] = "alltoall"
    head = f"A plan of Meshwright for Accelerate {VERSION}: accelerate launch --config_file THIS train.py"
    return yaml_file(head, found)


def read(text: str, source: str) -> ReadConfig:
    """Read a configuration."""
    raw = Document.yaml(text, source, "Accelerate")
    sizes = {name: raw.number(_AXES + key) for name, key in AXES.items()}
    devices, shard = raw.number("num_processes"), sizes["dp_shard"]
    fully, parallel = raw.get("distributed_type") == "FSDP", any(key.startswith(_AXES) for key in raw.values)
    if not parallel and fully:
        shard = devices
    gathers, version = _gathers(raw), raw.get("fsdp_config.fsdp_version")
    again, away = (raw.flag(f"fsdp_config.{KEYS[name]}") for name in ("recompute", "offload_parameters"))
    away, precision = away and fully, str(raw.get("mixed_precision", "no"))
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
        precision="fp32" if precision == "no" else precision,
        optimizer_sharding=level,
        shard_size=shard if level != "none" and sizes["dp_replicate"] > 1 else 0,
        sequence_parallel=False,
        context_algorithm="ring" if sizes["cp"] > 1 else "all_to_all" if sizes["sp"] > 1 else "none",
        recompute="full" if again else "none",
        offload_optimizer=away,
        offload_parameters=away,
    )
    return ReadConfig(config=config, not_read=raw.unread(), violations=violations)


def _gathers(raw: Document) -> bool:
    """Whether parameters are gathered again for the backward pass."""
    older = _STRATEGIES.get(str(raw.get("fsdp_config.fsdp_sharding_strategy")), True)
    said = raw.get("fsdp_config.fsdp_reshard_after_forward", older)
    return _STRATEGIES.get(said, True) if isinstance(said, str) else bool(said)


def _broken(sizes: Mapping[str, int], devices: int, *, parallel: bool, fully: bool) -> Iterator[Violation]:
    """Rules that show in the keys alone."""
    product = prod(sizes.values())
    if parallel and product != devices:
        rule, remedy = f"the sizes of parallelism_config have the product {product}", f"use {product}, or other sizes"
        yield Violation("num_processes", str(devices), rule, remedy)
    if sizes["cp"] > 1 and sizes["sp"] > 1:
        yield Violation(
            AXES["sp"], str(sizes["sp"]), "context and sequence parallelism exclude each other", "use one of them"
        )
    if parallel and not fully:
        yield Violation("parallelism_config", "", "it needs distributed_type FSDP and fsdp_version 2", "set both")


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Accelerate across fields."""
    ranks = config.dp or 1
    if ranks > 1 and config.shard == 1 and ((config.tp or 1) > 1 or (config.cp or 1) > 1):
        rule = "beside tensor or context parallelism replicas need dp_shard_size above 1"
        yield Violation(AXES["dp_replicate"], str(ranks), rule, "shard over data-parallel ranks")
    yield from apart_on_host(config, KEYS["offload_optimizer"])
    if config.offload_optimizer and not config.sharded and ranks > 1:
        rule, remedy = "parameters of replicas do not go to the host", "shard over dp_shard_size"
        yield Violation(KEYS["offload_optimizer"], "true", rule, remedy)


ACCELERATE = ExchangeFormat(
    name="accelerate",
    version=VERSION,
    suffix=".yaml",
    also_silent=frozenset({"recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: "distributed_type:" in text and "num_processes:" in text,
    rules=rules,
)
