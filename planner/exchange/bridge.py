"""Megatron-Bridge: overrides ``KEY=VALUE`` behind a recipe, one a line.

Keys are those of ``src/megatron/bridge/training/config.py`` of megatron-bridge 0.6: fields of Megatron's own
configuration by section. Rules are Megatron-LM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.exchange import megatron
from planner.exchange.formats import ExchangeFormat, ReadConfig, Written, devices_of
from planner.exchange.layout import read_layout, write_layout
from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig
from simulator.errors import InputError

VERSION = "0.6"
NUMBERS: Mapping[str, str] = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "etp": "model.expert_tensor_parallel_size",
    "first_layers": "model.num_layers_in_first_pipeline_stage",
    "last_layers": "model.num_layers_in_last_pipeline_stage",
    "mtp_layers": "model.mtp_num_layers",
    "micro_batch": "train.micro_batch_size",
    "global_batch": "train.global_batch_size",
    "sequence_length": "dataset.seq_length",
}
FLAGS: Mapping[str, str] = {
    "sequence_parallel": "model.sequence_parallel",
    "tensor_overlap": "comm_overlap.tp_comm_overlap",
    "expert_overlap": "comm_overlap.overlap_moe_expert_parallel_comm",
    "overlap_gradients": "ddp.overlap_grad_reduce",
    "overlap_parameters": "ddp.overlap_param_gather",
    "offload_optimizer": "optimizer.optimizer_cpu_offload",
    "offload_activations": "model.fine_grained_activation_offloading",
}
DISPATCHER, BACKEND = "model.moe_token_dispatcher_type", "model.moe_flex_dispatcher_backend"
VIRTUAL = "model.virtual_pipeline_model_parallel_size"
LAYOUT = "model.pipeline_model_parallel_layout"
GRANULARITY, MODULES = "model.recompute_granularity", "model.recompute_modules"
METHOD, COUNT = "model.recompute_method", "model.recompute_num_layers"
CONTEXT, PRECISION, INSTANCES = "model.cp_comm_type", "mixed_precision", "ddp.num_distributed_optimizer_instances"
DISTRIBUTED, FULLY, STRATEGY = (
    *("ddp.use_distributed_optimizer", "ddp.use_megatron_fsdp"),
    "ddp.data_parallel_sharding_strategy",
)
PRECISIONS: Mapping[str, str] = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}
KEYS: Mapping[str, str] = {
    **megatron.KEYS,
    **NUMBERS,
    **FLAGS,
    "vpp": VIRTUAL,
    "layers": LAYOUT,
    "recompute": GRANULARITY,
    "recompute_modules": MODULES,
    "recompute_count": COUNT,
    "context_algorithm": CONTEXT,
    "precision": PRECISION,
    "optimizer_sharding": DISTRIBUTED,
    "shard_size": INSTANCES,
}
READ = frozenset((*KEYS.values(), METHOD, FULLY, STRATEGY, "model.offload_modules", DISPATCHER, BACKEND))
_OVERRIDE = re.compile(r"(?<![\w.])([\w.]++)=('[^']*'|\"[^\"]*\"|\[[^\]=]*\]|\S+)")


def overrides(config: TrainingConfig) -> dict[str, str]:
    """Overrides of a configuration that Megatron-Bridge can run."""
    found = {NUMBERS[name]: str(value) for name in NUMBERS if (value := getattr(config, name)) is not None}
    found |= {FLAGS[name]: str(value).lower() for name in FLAGS if (value := getattr(config, name)) is not None}
    if (config.ep or 1) > 1 and config.tokens_once is not None:
        found[DISPATCHER] = "flex" if config.tokens_once else "alltoall"
        if config.tokens_once:
            found[BACKEND] = "deepep"
    if config.layers:
        found[LAYOUT] = f"'{write_layout(config.layers, config.mtp_layers or 0)}'"
    if (config.pp or 1) > 1 or config.vpp is not None:
        found[VIRTUAL] = str(config.vpp) if (config.vpp or 1) > 1 else "null"
    if (config.cp or 1) > 1:
        found[CONTEXT] = "a2a" if config.context_algorithm == "all_to_all" else "p2p"
    if config.precision is not None:
        found[PRECISION] = PRECISIONS[config.precision]
    level = config.optimizer_sharding
    if level in ("none", "zero1"):
        found[DISTRIBUTED] = str(level == "zero1").lower()
    elif level is not None:
        found |= {FULLY: "true", STRATEGY: megatron.STRATEGIES[level]}
    if config.shard_size and config.dp:
        found[INSTANCES] = str(config.dp // config.shard_size)
    return {**found, **_recompute(config)}


def _recompute(config: TrainingConfig) -> dict[str, str]:
    mode = config.recompute
    if mode is None:
        return {}
    if mode == "none":
        return {GRANULARITY: "null"}
    if mode == "selective":
        return {GRANULARITY: "selective", MODULES: f"[{','.join(config.recompute_modules or CHEAP_MODULES[:1])}]"}
    method, count = ("block", config.recompute_count) if config.recompute_count else ("uniform", 1)
    return {GRANULARITY: "full", METHOD: method, COUNT: str(count)}


def write(config: TrainingConfig) -> Written:
    """The file: its lines go behind ``run_recipe.py --recipe NAME``."""
    lines = [
        f"# A plan of Meshwright for Megatron-Bridge {VERSION} on {config.devices} GPUs:",
        "# run_recipe.py --recipe NAME $(grep -v '^#' THIS)",
        *(f"{key}={value}" for key, value in overrides(config).items()),
    ]
    return Written(text="\n".join(lines) + "\n", environment=megatron.environment(config))


def read(text: str, source: str) -> ReadConfig:
    """Read overrides, on lines of their own or behind one another.

    Raises
    ------
    InputError
        A value is no number, or no layout.
    """
    said: dict[str, str] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for key, value in _OVERRIDE.findall(line):
            said[key] = value.strip("'\"")
    values = {key: value for key, value in said.items() if value.lower() not in ("null", "none")}
    found: dict[str, object] = {name: _number(values, key, source) for name, key in NUMBERS.items()}
    found |= {name: values[key].lower() == "true" for name, key in FLAGS.items() if key in values}
    if DISPATCHER in values or found["ep"] == 1:
        found["tokens_once"] = found["ep"] != 1 and values.get(DISPATCHER) == "flex"
    pipeline = int(str(found["pp"] or 1))
    devices = found["devices"] = devices_of(text, "GPUs")
    found |= _stages(values, said, pipeline, source)
    found |= _read_recompute(values, said, source)
    found["precision"] = next(
        (name for name, word in PRECISIONS.items() if word == values.get(PRECISION)),
        None if PRECISION not in values else "fp8" if "fp8" in values[PRECISION] else None,
    )
    if CONTEXT in values or found["cp"] == 1:
        found["context_algorithm"] = {None: "none", "a2a": "all_to_all"}.get(values.get(CONTEXT), "ring")
    level = _level(values, source)
    instances = _number(values, INSTANCES, source) or 1
    ranks = devices // (pipeline * int(str(found["tp"] or 1)) * int(str(found["cp"] or 1))) if devices else 0
    config = TrainingConfig(
        **found,  # type: ignore[arg-type]
        optimizer_sharding=level,
        shard_size=None if level is None else ranks // instances if instances > 1 and ranks else 0,
        offload_parameters=False,
    )
    return ReadConfig(config=config, not_read=tuple(key for key in said if key not in READ))


def _number(values: Mapping[str, str], key: str, source: str) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 12 and int(value)):
        raise InputError(f"{source}: {key}={value!r} is no whole number of at least 1; correct it")
    return int(value)


def _stages(values: Mapping[str, str], said: Mapping[str, str], pipeline: int, source: str) -> dict[str, object]:
    virtual: int | None = _number(values, VIRTUAL, source) or (1 if VIRTUAL in said else None)
    layers: tuple[int, ...] | None = () if VIRTUAL in said or NUMBERS["pp"] in said else None
    found: dict[str, object] = {}
    if LAYOUT in values:
        sizes, extra = read_layout(values[LAYOUT])
        virtual, layers = max(1, len(sizes) // pipeline), () if len(set(sizes)) <= 1 else sizes
        if extra:
            found["mtp_layers"] = extra
    schedule = None
    if NUMBERS["pp"] in said or virtual is not None:
        schedule = "none" if pipeline == 1 else "interleaved_1f1b" if (virtual or 1) > 1 else "1f1b"
    return {**found, "vpp": virtual, "layers": layers, "schedule": schedule}


def _read_recompute(values: Mapping[str, str], said: Mapping[str, str], source: str) -> dict[str, object]:
    mode = values.get(GRANULARITY, "none" if GRANULARITY in said else None)
    if mode not in (None, "none", "selective", "full"):
        raise InputError(f"{source}: {GRANULARITY}={mode!r} is not one of selective, full, null")
    if mode is None:
        return {}
    listed = [name.strip(" '\"") for name in values.get(MODULES, "").strip("[]").split(",")]
    modules = tuple(name for name in listed if name) or CHEAP_MODULES[:1]
    block = values.get(METHOD) == "block"
    return {
        "recompute": mode,
        "recompute_modules": modules if mode == "selective" else (),
        "recompute_layers": (),
        "recompute_count": (_number(values, COUNT, source) or 0) if mode == "full" and block else 0,
    }


def _level(values: Mapping[str, str], source: str) -> str | None:
    if values.get(FULLY, "").lower() == "true":
        named = values.get(STRATEGY, "optim_grads_params")
        level = next((name for name, word in megatron.STRATEGIES.items() if word == named), None)
        if level is None:
            known = ", ".join(megatron.STRATEGIES.values())
            raise InputError(f"{source}: {STRATEGY}={named!r} is not one of {known}")
        return level
    return None if DISTRIBUTED not in values else "zero1" if values[DISTRIBUTED].lower() == "true" else "none"


def recognises(name: str, text: str) -> bool:
    """Whether a file holds overrides of Megatron-Bridge."""
    return bool(re.search(r"(^|\s)(model|train|ddp|dataset)\.\w+=", text))


BRIDGE = ExchangeFormat(
    name="bridge",
    version=VERSION,
    suffix=".overrides",
    keys=KEYS,
    write=write,
    read=read,
    recognises=recognises,
    rules=megatron.rules,
)
