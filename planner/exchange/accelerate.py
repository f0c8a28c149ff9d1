"""Accelerate: the YAML file of ``accelerate launch`` with FSDP 2 and a ParallelismConfig.

Keys and rules are those of ``accelerate/parallelism_config.py``, ``accelerate/commands/config/config_args.py`` and
``accelerate/commands/launch.py`` of 1.15.0. Batches stand in the training script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from planner.exchange.formats import CONFIGURATION, ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError

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
READ: Mapping[str, tuple[str, ...]] = {
    "compute_environment": (),
    "distributed_type": (),
    "mixed_precision": (),
    "num_processes": (),
    "num_machines": (),
    "fsdp_config": (
        *("fsdp_version", "fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "fsdp_offload_params"),
        *("fsdp_auto_wrap_policy", "fsdp_sharding_strategy"),
    ),
    "parallelism_config": (*AXES.values(), "parallelism_config_cp_comm_strategy", "parallelism_config_cp_backend"),
}
SILENT = frozenset(
    {
        "optimizer",
        "micro_batch",
        "global_batch",
        "sequence_length",
        "recompute_modules",
        "num_layers",
        "first_layers",
        "last_layers",
        "mtp_layers",
        "overlap_gradients",
        "overlap_parameters",
    }
)
_STRATEGIES = {"FULL_SHARD": True, "SHARD_GRAD_OP": False, "HYBRID_SHARD": True, "HYBRID_SHARD_ZERO2": False}


def document(config: TrainingConfig) -> dict[str, Any]:
    """The YAML document of a configuration that Accelerate can run."""
    sharded = config.optimizer_sharding not in (None, "none")
    ranks = config.dp or 1
    shard = (config.shard_size or ranks) if sharded else 1
    axes = {"dp_replicate": ranks // shard, "dp_shard": shard, "tp": config.tp or 1, "cp": config.cp or 1}
    fully = sharded or axes["tp"] > 1 or axes["cp"] > 1 or config.recompute == "full"
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
    raw = CONFIGURATION.yaml(text, source, strict=False)
    if not isinstance(raw, dict):
        raise InputError(f"{source} is no mapping; give a configuration of accelerate launch")
    fsdp, parallel = (_section(raw, name) for name in ("fsdp_config", "parallelism_config"))
    sizes = {name: _number(parallel, key, source) for name, key in AXES.items()}
    devices = _number(raw, "num_processes", source)
    fully = raw.get("distributed_type") == "FSDP"
    shard = sizes["dp_shard"]
    if not parallel and fully:
        shard = devices
    gathers = _gathers(fsdp)
    level = "none" if not fully or shard == 1 else "zero3" if gathers else "zero2"
    away = fully and bool(fsdp.get("fsdp_offload_params"))
    config = TrainingConfig(
        devices=devices,
        tp=sizes["tp"],
        pp=1,
        vpp=1,
        cp=sizes["cp"] * sizes["sp"],
        ep=1,
        etp=sizes["tp"],
        layers=(),
        schedule="none",
        precision=_precision(raw),
        optimizer_sharding=level,
        shard_size=shard if level != "none" and sizes["dp_replicate"] > 1 else 0,
        sequence_parallel=False,
        context_algorithm="ring" if sizes["cp"] > 1 else "all_to_all" if sizes["sp"] > 1 else "none",
        recompute="full" if fsdp.get("fsdp_activation_checkpointing") else "none",
        recompute_layers=(),
        recompute_count=0,
        offload_optimizer=away,
        offload_parameters=away,
        offload_activations=False,
        tensor_overlap=False,
        expert_overlap=False,
    )
    return ReadConfig(
        config=config,
        not_read=tuple(_not_read(raw)),
        violations=tuple(_broken(raw, sizes, devices, parallel=bool(parallel), fully=fully)),
    )


def _precision(raw: Mapping[str, Any]) -> str:
    word = str(raw.get("mixed_precision", "no"))
    return "fp32" if word == "no" else word


def _gathers(fsdp: Mapping[str, Any]) -> bool:
    """Whether parameters are gathered again for the backward pass."""
    said = fsdp.get("fsdp_reshard_after_forward", _STRATEGIES.get(str(fsdp.get("fsdp_sharding_strategy")), True))
    return _STRATEGIES.get(said, True) if isinstance(said, str) else bool(said)


def _section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def _number(raw: Mapping[str, Any], key: str, source: str) -> int:
    value = raw.get(key, 1)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**30:
        raise InputError(f"{source}: {key} = {value!r} is no whole number of at least 1; correct it")
    return value


def _not_read(raw: Mapping[str, Any]) -> Iterator[str]:
    for name, value in raw.items():
        if name not in READ:
            yield str(name)
        elif isinstance(value, dict):
            yield from (f"{name}.{key}" for key in value if key not in READ[name])


def _broken(
    raw: Mapping[str, Any], sizes: Mapping[str, int], devices: int, *, parallel: bool, fully: bool
) -> Iterator[Violation]:
    """Rules that show in the keys alone."""
    product = 1
    for size in sizes.values():
        product *= size
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
    if parallel and not (fully and _section(raw, "fsdp_config").get("fsdp_version") == 2):
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
    if config.offload_optimizer and not sharded:
        yield Violation(
            key=KEYS["offload_optimizer"],
            value="true",
            rule="only sharded parameters go to the host",
            remedy="shard over dp_shard_size",
        )


def recognises(name: str, text: str) -> bool:
    """Whether a file is one of ``accelerate launch``."""
    return "distributed_type:" in text and "num_processes:" in text


ACCELERATE = ExchangeFormat(
    name="accelerate",
    capability="accelerate",
    version=VERSION,
    suffix=".yaml",
    silent=SILENT,
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=rules,
)
