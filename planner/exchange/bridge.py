"""Megatron-Bridge: overrides ``KEY=VALUE`` behind a recipe, one a line.

Keys are those of ``src/megatron/bridge/training/config.py`` of megatron-bridge 0.6: fields of Megatron's own
configuration by section. A recipe says some things twice, and what it says of the other place would hold: the length
of a sample, the distributed optimizer, what travels beside kernels. Such values are written to both. A recipe may have
no section ``comm_overlap`` at all, so that this one names its class. Rules are Megatron-LM's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from planner.exchange import megatron
from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, devices_of
from planner.exchange.layout import read_layout, write_layout
from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig
from simulator.errors import InputError
from simulator.schedules.generators import interleaved_group

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
LENGTH, GROUP = "model.seq_length", "model.microbatch_group_size_per_vp_stage"
OVERLAPS: Mapping[str, str] = {
    "tensor_overlap": "comm_overlap.tp_comm_overlap",
    "expert_overlap": "comm_overlap.overlap_moe_expert_parallel_comm",
    "overlap_gradients": "comm_overlap.overlap_grad_reduce",
    "overlap_parameters": "comm_overlap.overlap_param_gather",
}
OVERLAP_CLASS = {
    "comm_overlap._target_": "megatron.bridge.training.comm_overlap.CommOverlapConfig",
    "comm_overlap.tp_comm_overlap_cfg": "null",
}
FLAGS: Mapping[str, str] = {
    "sequence_parallel": "model.sequence_parallel",
    "tensor_overlap": OVERLAPS["tensor_overlap"],
    "expert_overlap": OVERLAPS["expert_overlap"],
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
DISTRIBUTED_TOO, GATHERED_TOO, PRECISE = (
    f"optimizer.{name}"
    for name in ("use_distributed_optimizer", "overlap_param_gather", "use_precision_aware_optimizer")
)
READ = frozenset(
    (
        *(*KEYS.values(), *OVERLAPS.values(), *OVERLAP_CLASS, METHOD, FULLY, STRATEGY, DISPATCHER, BACKEND),
        *(DISTRIBUTED_TOO, GATHERED_TOO, PRECISE, LENGTH, GROUP, "model.offload_modules", "checkpoint.ckpt_format"),
    )
)
_OVERRIDE = re.compile(r"(?<![\w.])([\w.]++)=('[^']*'|\"[^\"]*\"|\[[^\]=]*\]|\S+)")


def overrides(config: TrainingConfig) -> dict[str, str]:
    """Overrides of a configuration that Megatron-Bridge can run."""
    found = {NUMBERS[name]: str(value) for name in NUMBERS if (value := getattr(config, name)) is not None}
    found |= _flags(config)
    if config.sequence_length is not None:
        found[LENGTH] = str(config.sequence_length)
    if config.offload_optimizer:
        found[PRECISE] = "true"  # whose code updates on the host
    if config.offload_activations:
        found["model.offload_modules"] = f"[{','.join(megatron.OFFLOADED)}]"
    if (config.ep or 1) > 1 and config.tokens_once is not None:
        found[DISPATCHER] = "flex" if config.tokens_once else "alltoall"
        if config.tokens_once:
            found[BACKEND] = "deepep"
    if (config.cp or 1) > 1:
        found[CONTEXT] = "a2a" if config.context_algorithm == "all_to_all" else "p2p"
    if config.precision is not None:
        found[PRECISION] = PRECISIONS[config.precision]
    level = config.optimizer_sharding
    if level in ("none", "zero1"):
        found |= {
            FULLY: "false",
            DISTRIBUTED: str(level == "zero1").lower(),
            DISTRIBUTED_TOO: str(level == "zero1").lower(),
        }
    elif level is not None:
        found |= {FULLY: "true", STRATEGY: megatron.STRATEGIES[level], "checkpoint.ckpt_format": "fsdp_dtensor"}
    if config.shard_size and config.dp:
        found[INSTANCES] = str(config.dp // config.shard_size)
    return {**found, **_pipeline(config), **_recompute(config)}


def _pipeline(config: TrainingConfig) -> dict[str, str]:
    """Stages; what a recipe says of them is taken back."""
    if config.pp is None and config.vpp is None:
        return {}
    found = {LAYOUT: "null", VIRTUAL: str(config.vpp) if (config.vpp or 1) > 1 else "null"}
    if config.layers:
        found[LAYOUT] = f"'{write_layout(config.layers, config.mtp_layers or 0)}'"
    if config.schedule == "interleaved_1f1b" and (config.micro_batches or 0) % (config.pp or 1):
        found[GROUP] = str(interleaved_group(config.pp or 1, config.micro_batches or 1))
    return found


def _flags(config: TrainingConfig) -> dict[str, str]:
    """Flags as overrides, written to every section that reads them."""
    said = {name: str(value).lower() for name in FLAGS if (value := getattr(config, name)) is not None}
    found = {key: said[name] for name, key in FLAGS.items() if name in said and key not in OVERLAPS.values()}
    if "overlap_parameters" in said:
        found[GATHERED_TOO] = said["overlap_parameters"]
    if OVERLAPS.keys() & said.keys():
        overlaps = {key: said.get(name, "null") for name, key in OVERLAPS.items()}
        overlaps[OVERLAPS["tensor_overlap"]] = said.get("tensor_overlap", "false")
        found |= {f"++{key}": value for key, value in {**OVERLAP_CLASS, **overlaps}.items()}
    return found


def _recompute(config: TrainingConfig) -> dict[str, str]:
    mode = config.recompute
    if mode is None:
        return {}
    none = {GRANULARITY: "null", METHOD: "null", COUNT: "null"}
    if mode == "none":
        return none
    if mode == "selective":
        modules = ",".join(config.recompute_modules or CHEAP_MODULES[:1])
        return {**none, GRANULARITY: "selective", MODULES: f"[{modules}]"}
    method, count = ("block", config.recompute_count) if config.recompute_count else ("uniform", 1)
    return {GRANULARITY: "full", METHOD: method, COUNT: str(count)}


def write(config: TrainingConfig) -> Written:
    """The file: its lines go behind ``run_recipe.py --recipe NAME``."""
    variables = megatron.environment(config)
    before = "".join(f"{name}={value} " for name, value in variables.items())
    lines = [
        f"# A plan of Meshwright for Megatron-Bridge {VERSION} on {config.devices} GPUs:",
        f"# {before}run_recipe.py --recipe NAME $(grep -v '^#' THIS)",
        *(f"{key}={value}" for key, value in overrides(config).items()),
    ]
    return Written(text="\n".join(lines) + "\n", environment=variables)


def read(text: str, source: str) -> ReadConfig:
    """Read overrides, on lines of their own or behind one another.

    Raises
    ------
    InputError
        A value is of another kind.
    """
    said: dict[str, str] = {}
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            continue
        for key, value in _OVERRIDE.findall(line):
            said[key] = value.strip("'\"")
    values = {key: value for key, value in said.items() if value.lower() not in ("null", "none")}
    found: dict[str, object] = {name: _number(values, key, source) for name, key in NUMBERS.items()}
    for name, key in FLAGS.items():
        place = next((one for one in (OVERLAPS.get(name, key), key) if one in values), None)
        if place is not None:
            found[name] = _flag(values, place, source)
    notes: tuple[str, ...] = ()
    if found.get("tensor_overlap") and not (found.get("sequence_parallel") and int(str(found["tp"] or 1)) > 1):
        found["tensor_overlap"] = False
        notes = (f"{FLAGS['tensor_overlap']}=true has no effect without {FLAGS['sequence_parallel']} on tensor ranks",)
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
    return ReadConfig(
        config=config,
        not_read=tuple(key for key in said if key not in READ),
        violations=(*_two_lengths(values), *megatron.broken_group(config, GROUP, _number(values, GROUP, source))),
        notes=notes,
    )


def _two_lengths(values: Mapping[str, str]) -> Iterator[Violation]:
    """The rule that model and data have samples of one length."""
    model, data = values.get(LENGTH), values.get(NUMBERS["sequence_length"])
    if model is not None and data is not None and model != data:
        rule, remedy = f"it must be {NUMBERS['sequence_length']}, which is {data}", f"use {LENGTH}={data}"
        yield Violation(key=LENGTH, value=model, rule=rule, remedy=remedy)


def _number(values: Mapping[str, str], key: str, source: str) -> int | None:
    value = values.get(key)
    if value is None:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 12 and int(value)):
        raise InputError(f"{source}: {key}={value!r} is no whole number of at least 1; correct it")
    return int(value)


def _flag(values: Mapping[str, str], key: str, source: str) -> bool:
    value = values[key].lower()
    if value not in ("true", "false"):
        raise InputError(f"{source}: {key}={values[key]!r} is neither true nor false; correct it")
    return value == "true"


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
    if FULLY in values and _flag(values, FULLY, source):
        named = values.get(STRATEGY, "optim_grads_params")
        level = next((name for name, word in megatron.STRATEGIES.items() if word == named), None)
        if level is None:
            known = ", ".join(megatron.STRATEGIES.values())
            raise InputError(f"{source}: {STRATEGY}={named!r} is not one of {known}")
        return level
    distributed = [_flag(values, key, source) for key in (DISTRIBUTED, DISTRIBUTED_TOO) if key in values]
    return None if not distributed else "zero1" if any(distributed) else "none"


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
