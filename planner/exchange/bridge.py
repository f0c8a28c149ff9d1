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
from planner.exchange.megatron import Options, Said, write_layout
from planner.exchange.training_config import CHEAP_MODULES, TrainingConfig
from simulator.errors import InputError

VERSION = "0.6"
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
PRECISIONS: Mapping[str, str] = {
    "bf16": "bf16_mixed",
    "fp16": "fp16_mixed",
    "fp8": "bf16_with_fp8_current_scaling_mixed",
    "fp4": "bf16_with_nvfp4_mixed",
}
KEYS: Mapping[str, str] = {
    **megatron.KEYS,
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
    "sequence_parallel": "model.sequence_parallel",
    "tensor_overlap": OVERLAPS["tensor_overlap"],
    "expert_overlap": OVERLAPS["expert_overlap"],
    "overlap_gradients": "ddp.overlap_grad_reduce",
    "overlap_parameters": "ddp.overlap_param_gather",
    "offload_optimizer": "optimizer.optimizer_cpu_offload",
    "offload_activations": "model.fine_grained_activation_offloading",
    "vpp": "model.virtual_pipeline_model_parallel_size",
    "layers": "model.pipeline_model_parallel_layout",
    "recompute": "model.recompute_granularity",
    "recompute_modules": "model.recompute_modules",
    "recompute_count": "model.recompute_num_layers",
    "context_algorithm": "model.cp_comm_type",
    "precision": "mixed_precision",
    "optimizer_sharding": "ddp.use_distributed_optimizer",
    "shard_size": "ddp.num_distributed_optimizer_instances",
}
NAMES: Mapping[str, str] = {
    **KEYS,
    "chunk_layers": "",
    "group": "model.microbatch_group_size_per_vp_stage",
    "dispatcher": "model.moe_token_dispatcher_type",
    "backend": "model.moe_flex_dispatcher_backend",
    "method": "model.recompute_method",
    "fully": "ddp.use_megatron_fsdp",
    "strategy": "ddp.data_parallel_sharding_strategy",
    "checkpoints": "checkpoint.ckpt_format",
    "precise": "optimizer.use_precision_aware_optimizer",
    "modules_on_host": "model.offload_modules",
}
NUMBERS = (
    *("tp", "pp", "cp", "ep", "etp", "first_layers", "last_layers", "mtp_layers"),
    *("micro_batch", "global_batch", "sequence_length"),
)
LENGTH = "model.seq_length"
DISTRIBUTED_TOO, GATHERED_TOO = "optimizer.use_distributed_optimizer", "optimizer.overlap_param_gather"
READ = frozenset((*NAMES.values(), *OVERLAPS.values(), *OVERLAP_CLASS, DISTRIBUTED_TOO, GATHERED_TOO, LENGTH))
BOOLEANS = (*(KEYS[name] for name in megatron.FLAGS), *OVERLAPS.values(), NAMES["fully"], KEYS["optimizer_sharding"])
_OVERRIDE = re.compile(r"(?<![\w.])([\w.]++)=('[^']*'|\"[^\"]*\"|\[[^\]=]*\]|\S+)")


def overrides(config: TrainingConfig) -> dict[str, str]:
    """Overrides of a configuration that Megatron-Bridge can run; what a recipe says of the same is taken back."""
    found = {KEYS[name]: str(value) for name in NUMBERS if (value := getattr(config, name)) is not None}
    said = {name: str(value).lower() for name in megatron.FLAGS if (value := getattr(config, name)) is not None}
    found |= {KEYS[name]: value for name, value in said.items() if KEYS[name] not in OVERLAPS.values()}
    if "overlap_parameters" in said:
        found[GATHERED_TOO] = said["overlap_parameters"]
    if OVERLAPS.keys() & said.keys():
        overlaps = {key: said.get(name, "null") for name, key in OVERLAPS.items()}
        overlaps[OVERLAPS["tensor_overlap"]] = said.get("tensor_overlap", "false")
        found |= {f"++{key}": value for key, value in {**OVERLAP_CLASS, **overlaps}.items()}
    if config.sequence_length is not None:
        found[LENGTH] = str(config.sequence_length)
    if config.precision is not None:
        found[KEYS["precision"]] = PRECISIONS[config.precision]
    if config.optimizer_sharding in ("none", "zero1"):
        distributed = str(config.optimizer_sharding == "zero1").lower()
        found |= {NAMES["fully"]: "false", KEYS["optimizer_sharding"]: distributed, DISTRIBUTED_TOO: distributed}
    if config.pp is not None or config.vpp is not None:
        found[KEYS["layers"]] = f"'{write_layout(config.layers, config.mtp_layers or 0)}'" if config.layers else "null"
        found[KEYS["vpp"]] = str(config.vpp) if (config.vpp or 1) > 1 else "null"
    if config.recompute is not None:
        found |= dict.fromkeys((NAMES[name] for name in ("recompute", "method", "recompute_count")), "null")
    lists = (NAMES["modules_on_host"], KEYS["recompute_modules"])
    for key, values in megatron.written_fields(config, NAMES).items():
        found[key] = f"[{','.join(values)}]" if key in lists else values[0] if values else "true"
    return found


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
    """Read overrides, on lines of their own or behind one another; a recipe may say what they do not."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    given = {key: value.strip("'\"") for line in lines for key, value in _OVERRIDE.findall(line)}
    values = {key: (value,) for key, value in given.items() if value.lower() not in ("null", "none")}
    named = [name.strip(" '\"") for name in given.get(KEYS["recompute_modules"], "").strip("[]").split(",")]
    flags = {key: _flag(values[key][0], key, source) for key in (*BOOLEANS, DISTRIBUTED_TOO) if key in values}
    distributed = flags.get(KEYS["optimizer_sharding"], False) or flags.get(DISTRIBUTED_TOO, False)
    options: dict[str, tuple[str, ...]] = {key: value for key, value in values.items() if key not in flags}
    options |= {key: () for key, value in {**flags, KEYS["optimizer_sharding"]: distributed}.items() if value}
    options[KEYS["recompute_modules"]] = tuple(filter(None, named)) or CHEAP_MODULES[:1]
    said = Said(values=options, names=NAMES, source=source, equals="=", remedy="correct it", unset=("null",))
    found = megatron.read_fields(said, devices_of(text, "GPUs"), {}, usual={})
    staged = {KEYS["vpp"], KEYS["pp"]} & given.keys()
    states = {NAMES["fully"]} & {key for key, value in flags.items() if value} or {
        KEYS["optimizer_sharding"],
        DISTRIBUTED_TOO,
    } & flags.keys()
    unsaid = {
        "vpp": KEYS["vpp"] not in given and not said.has("layers"),
        "layers": not staged and not said.has("layers"),
        "schedule": not staged and not said.has("layers"),
        **dict.fromkeys(
            ("recompute", "recompute_modules", "recompute_layers", "recompute_count"), KEYS["recompute"] not in given
        ),
        **dict.fromkeys(("optimizer_sharding", "shard_size"), not states),
        "tokens_once": not said.has("dispatcher") and found["ep"] != 1,
        "context_algorithm": not said.has("context_algorithm") and found["cp"] != 1,
    }
    if (found["pp"] or 1) == 1:
        found["schedule"] = "none"
    found |= {name: None for name, is_so in unsaid.items() if is_so}
    for name in megatron.FLAGS:
        place = next((key for key in (OVERLAPS.get(name, KEYS[name]), KEYS[name]) if key in flags), None)
        found[name] = None if place is None else flags[place]
    notes: tuple[str, ...] = ()
    if found["tensor_overlap"] and not (found["sequence_parallel"] and (found["tp"] or 1) > 1):
        found["tensor_overlap"] = False
        notes = (f"{KEYS['tensor_overlap']}=true has no effect without {KEYS['sequence_parallel']} on tensor ranks",)
    word = said.text("precision")
    found["precision"] = next(
        (name for name, one in PRECISIONS.items() if one == word), "fp8" if word and "fp8" in word else None
    )
    config = TrainingConfig(**found, offload_parameters=False)
    return ReadConfig(
        config=config,
        not_read=tuple(key for key in given if key not in READ),
        violations=(*_two_lengths(values), *megatron.broken_group(config, said)),
        notes=notes,
    )


def _two_lengths(values: Options) -> Iterator[Violation]:
    """The rule that model and data have samples of one length."""
    model, data = (" ".join(values.get(key, ())) for key in (LENGTH, KEYS["sequence_length"]))
    if model and data and model != data:
        rule = f"it must be {KEYS['sequence_length']}, which is {data}"
        yield Violation(LENGTH, model, rule, f"use {LENGTH}={data}")


def _flag(value: str, key: str, source: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise InputError(f"{source}: {key}={value!r} is neither true nor false; correct it")
    return value.lower() == "true"


BRIDGE = ExchangeFormat(
    name="bridge",
    version=VERSION,
    suffix=".overrides",
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: bool(re.search(r"(^|\s)(model|train|ddp|dataset)\.\w+=", text)),
    rules=megatron.rules,
)
