"""torchtitan: the TOML file of 0.2, and the Python configuration of 0.3 as assignments to a ``Trainer.Config``.

Keys and rules are those of ``torchtitan/config/job_config.py`` (0.2.2) and ``torchtitan/config/configs.py`` (0.3.0),
and of ``torchtitan/distributed/parallel_dims.py`` of both. A plan's ZeRO level 3 gathers parameters again for the
backward pass (``fsdp_reshard_after_forward = "always"``), level 2 keeps them. With a pipeline the local batch of a step
is one run of the schedule.
"""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from planner.exchange.formats import (
    ExchangeFormat,
    ReadConfig,
    Violation,
    Written,
    apart_on_host,
    divides,
    unnamed_stages,
)
from planner.exchange.keyed import Document
from planner.exchange.shell import read_script
from planner.exchange.training_config import LOOPED, TrainingConfig, module_parts, stages_of_parts
from planner.plans.capability import capabilities
from simulator.errors import InputError

SCHEDULES: Mapping[str, str] = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zbv": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
DEGREES: Mapping[str, str] = {
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "cp": "context_parallel_degree",
    "ep": "expert_parallel_degree",
}
KEYS: Mapping[str, str] = {
    **{name: f"parallelism.{key}" for name, key in DEGREES.items()},
    "devices": "WORLD_SIZE",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "vpp": "parallelism.module_fqns_per_model_part",
    "layers": "parallelism.module_fqns_per_model_part",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "micro_batch": "parallelism.pipeline_parallel_microbatch_size",
    "global_batch": "training.global_batch_size",
    "sequence_length": "training.seq_len",
    "precision": "training.mixed_precision_param",
    "optimizer_sharding": "parallelism.data_parallel_shard_degree",
    "shard_size": "parallelism.data_parallel_shard_degree",
    "sequence_parallel": "parallelism.enable_sequence_parallel",
    "tensor_overlap": "parallelism.enable_async_tensor_parallel",
    "recompute": "activation_checkpoint",
    "offload_optimizer": "training.enable_cpu_offload",
    "offload_parameters": "training.enable_cpu_offload",
}
_KNOWN = (
    *("training.dtype", "training.disable_cuda_graphs", "compile.enable", "activation_checkpoint"),
    *("activation_checkpoint.selective_ac_option", KEYS["micro_batch"], KEYS["devices"]),
)
"""Keys that say nothing more of the plan."""
MODES: Mapping[str, str] = {"FullAC": "full", "SelectiveAC": "selective", "None": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Era:
    """What differs between releases: the name of the last product, and whether there are keys for some things."""

    version: str
    head: str
    sequence_key: bool
    expert_tensor_key: bool


OLD = Era(version="0.2.2", head="output", sequence_key=False, expert_tensor_key=True)
NEW = Era(version="0.3.0", head="lm_head", sequence_key=True, expert_tensor_key=False)


def schedule_word(schedule: str, micro_batches: int) -> str:
    """Torch's name of a schedule.

    1F1B of one micro-batch is called GPipe: the order is the same, and torch runs 1F1B with one for each stage or more.
    """
    return SCHEDULES["gpipe" if schedule == "1f1b" and micro_batches == 1 else schedule]


def values(config: TrainingConfig, era: Era) -> dict[str, Any]:
    """Keys with their values, sections before a dot."""
    pipeline, ranks = config.pp or 1, config.dp or 1
    shard = config.shard
    parallel: dict[str, Any] = {
        "data_parallel_replicate_degree": ranks // shard,
        "data_parallel_shard_degree": shard,
        **{key: getattr(config, name) or 1 for name, key in DEGREES.items()},
    }
    if config.sharded:
        parallel["fsdp_reshard_after_forward"] = "always" if config.optimizer_sharding == "zero3" else "never"
    if era.sequence_key and (config.tp or 1) > 1:
        parallel["enable_sequence_parallel"] = bool(config.sequence_parallel)
    if era.expert_tensor_key and (config.ep or 1) > 1:
        parallel["expert_tensor_parallel_degree"] = config.etp or 1
    micro, count = config.micro_batch or 1, config.micro_batches or 1
    training: dict[str, Any] = {"local_batch_size": micro}
    if pipeline > 1:
        parallel |= {
            "pipeline_parallel_schedule": schedule_word(str(config.schedule), count),
            "pipeline_parallel_microbatch_size": micro,
            "module_fqns_per_model_part": module_parts(config, "tok_embeddings", "layers.{}", ["norm", era.head]),
        }
        training["local_batch_size"] = micro * count
        if era is NEW:
            training["disable_cuda_graphs"] = True
    training["global_batch_size"] = config.global_batch
    if config.sequence_length:
        training["seq_len"] = config.sequence_length
    training["mixed_precision_param"] = "float32" if config.precision == "fp32" else "bfloat16"
    if config.offload_parameters:
        training["enable_cpu_offload"] = True
    found = {f"training.{key}": value for key, value in training.items()}
    found |= {f"parallelism.{key}": value for key, value in parallel.items()}
    if config.tensor_overlap:
        section = "parallelism" if era is OLD else "compile"
        found |= {"compile.enable": True, f"{section}.enable_async_tensor_parallel": True}
    return found


def write_toml(config: TrainingConfig) -> Written:
    """The TOML file of torchtitan 0.2."""
    said = f"# A plan of Meshwright for torchtitan {OLD.version}: put these keys into your job's file."
    return toml(values(config, OLD), config, [said])


def toml(found: Mapping[str, Any], config: TrainingConfig, comments: Sequence[str]) -> Written:
    """A TOML file of values by dotted key, and of what a configuration computes again, behind comments."""
    again = {"activation_checkpoint.mode": config.recompute or "none"}
    if config.recompute == "selective":
        again["activation_checkpoint.selective_ac_option"] = "op"
    sections: dict[str, list[str]] = {}
    for key, value in {**found, **again}.items():
        section, _, name = key.rpartition(".")
        sections.setdefault(section, []).append(f"{name} = {json.dumps(value)}")
    lines = [line for section, keys in sections.items() for line in ("", f"[{section}]", *keys)]
    return Written(text="\n".join([*comments, *lines]) + "\n")


def write_python(config: TrainingConfig) -> Written:
    """A function that sets the plan on a ``Trainer.Config`` of torchtitan 0.3."""
    recompute = {"full": "FullAC.Config()", "selective": "SelectiveAC.Config()"}.get(config.recompute or "", "None")
    lines = [
        f'"""A plan of Meshwright for torchtitan {NEW.version}: call `apply` on the configuration of your model."""',
        "",
        "from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC",
        "",
        "",
        "def apply(config):",
        '    """Set the plan on a Trainer.Config, and return it."""',
        *(f"    config.{key} = {_python(value)}" for key, value in values(config, NEW).items()),
        f"    config.activation_checkpoint = {recompute}",
        "    return config",
    ]
    return Written(text="\n".join(lines) + "\n")


def _python(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _python_values(text: str, source: str) -> dict[str, Any]:
    """Assignments ``config.section.key = literal`` of a Python file, which is not run."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{source} is no Python file: {error}; correct it") from error
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        path = _path(node.targets[0])
        if len(path) < 2:
            continue
        key = ".".join(path[1:])
        named = _path(node.value.func) if isinstance(node.value, ast.Call) else _path(node.value)
        if key == "activation_checkpoint":
            found["activation_checkpoint.mode"] = MODES.get(named[0] if named else "None", "none")
            continue
        try:
            found[key] = ast.literal_eval(node.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            found[key] = ".".join(named)
    return found


def _path(node: ast.AST) -> list[str]:
    """Names of an attribute from the outermost, ``config.training.seq_len``; empty where it is something else."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [*reversed([*names, node.id])] if isinstance(node, ast.Name) else []


def raw_values(text: str, source: str) -> dict[str, Any]:
    """Keys of a TOML file, a resolved configuration in JSON, a Python file, or ``--section.key`` of a script."""
    if source.endswith(".py") or "config.parallelism." in text:
        return _python_values(text, source)
    if text.lstrip().startswith("{"):
        return Document.json(text, source, "torchtitan").values
    if "--parallelism." in text or "--training." in text:
        options = read_script(text).options
        dotted = {name[2:].replace("-", "_"): value for name, value in options.items() if "." in name}
        return {key: _literal(value[0]) if value else True for key, value in dotted.items()}
    try:
        return Document(tomllib.loads(text), source, "torchtitan").values
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is no TOML file: {error}; correct it") from error


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read(text: str, source: str) -> ReadConfig:
    """Read a configuration."""
    raw = Document(raw_values(text, source), source, "torchtitan")
    for key in _KNOWN:
        raw.get(key)
    found: dict[str, Any] = {name: raw.number(f"parallelism.{key}") for name, key in DEGREES.items()}
    tensor, pipeline, context = found["tp"], found["pp"], found["cp"]
    replicas, shard = raw.number("parallelism.data_parallel_replicate_degree"), _whole_or(raw, KEYS["shard_size"])
    devices = replicas * shard * tensor * pipeline * context if shard > 0 else None
    etp = raw.number(KEYS["etp"])
    found["etp"] = tensor if found["ep"] == 1 else etp
    found["devices"] = devices
    found |= _stages(raw, pipeline, source)
    local, batch = raw.number("training.local_batch_size", 8), _whole_or(raw, KEYS["global_batch"])
    found["micro_batch"] = raw.number(KEYS["micro_batch"]) if pipeline > 1 else local
    found["global_batch"] = batch if batch > 0 else local * replicas * shard if shard > 0 else None
    if found["schedule"] == "gpipe" and local == found["micro_batch"]:
        found["schedule"] = "1f1b"  # the same, of one micro-batch
    found["sequence_length"] = raw.number(KEYS["sequence_length"], 2048)
    found["precision"] = "fp32" if raw.get(KEYS["precision"]) == "float32" else "bf16"
    policy = raw.get("parallelism.fsdp_reshard_after_forward", "default")
    keeps = policy == "never" or (policy == "default" and pipeline > 1)
    # FSDP shards over the ranks of both axes, data_parallel_shard and context parallelism.
    found["optimizer_sharding"] = "none" if shard * context == 1 else "zero2" if keeps else "zero3"
    found["shard_size"] = shard if shard > 1 and replicas > 1 else 0
    found["sequence_parallel"] = bool(raw.get(KEYS["sequence_parallel"], True)) and tensor > 1
    found["context_algorithm"] = "ring" if context > 1 else "none"
    found |= {"recompute": _mode(raw, source), "recompute_layers": (), "recompute_count": 0}
    away = bool(raw.get(KEYS["offload_optimizer"], False))
    found |= {"offload_optimizer": away, "offload_parameters": away, "offload_activations": False}
    overlap = [raw.get(f"{section}.enable_async_tensor_parallel") for section in ("parallelism", "compile")]
    found["tensor_overlap"] = any(overlap)
    violations = tuple(_broken(raw, pipeline))
    return ReadConfig(config=TrainingConfig(**found), not_read=raw.unread(), violations=violations)


def _whole_or(raw: Document, key: str) -> int:
    """A whole number; -1 where it is left out, or written so."""
    return raw.number(key, -1, -1 if raw.get(key) == -1 else 1)


def _stages(raw: Document, pipeline: int, source: str) -> dict[str, Any]:
    named = raw.get("parallelism.pipeline_parallel_schedule", "1F1B")
    known = {word.lower(): name for name, word in SCHEDULES.items()}
    schedule = known.get(str(named).lower()) if pipeline > 1 else "none"
    if schedule is None:
        words = ", ".join(SCHEDULES.values())
        raise InputError(f"{source}: parallelism.pipeline_parallel_schedule = {named!r} is not one of {words}")
    return stages_of_parts(schedule, raw.get(KEYS["layers"]), "layers.", KEYS["layers"], pipeline, source)


def _mode(raw: Document, source: str) -> str:
    mode = raw.get("activation_checkpoint.mode", "none")
    if mode not in ("none", "selective", "full"):
        raise InputError(f"{source}: activation_checkpoint.mode = {mode!r} is not read; use none, selective or full")
    return str(mode)


def _broken(raw: Document, pipeline: int) -> Iterator[Violation]:
    """Rules that show in the keys alone."""
    local = raw.get("training.local_batch_size", 8)
    micro = raw.get("parallelism.pipeline_parallel_microbatch_size", 1)
    if pipeline > 1 and isinstance(local, int) and isinstance(micro, int) and micro > 0 and local % micro:
        rule = f"pipeline_parallel_microbatch_size = {micro} must divide it"
        yield Violation("training.local_batch_size", str(local), rule, f"use {micro * (local // micro + 1)}")
    parts = raw.get("parallelism.module_fqns_per_model_part")
    if pipeline > 1 and isinstance(parts, list) and len(parts) % pipeline:
        rule, remedy = f"{pipeline} pipeline ranks must divide them", "give every rank as many"
        yield Violation(KEYS["layers"], f"{len(parts)} parts", rule, remedy)


def rules(config: TrainingConfig, *, era: Era) -> Iterator[Violation]:
    """Rules of torchtitan across fields."""
    tensor, context = config.tp or 1, config.cp or 1
    stage = config.shard * context * tensor // ((config.etp or 1) if (config.ep or 1) > 1 else 1)
    yield from divides(KEYS["ep"], config.ep or 1, stage, "ranks of data_parallel_shard × context × tensor parallelism")
    if context > 1 and config.optimizer_sharding == "none":
        rule, remedy = "FSDP shards parameters over context ranks", "plan with --pin optimizer_sharding=zero2 or zero3"
        yield Violation(KEYS["cp"], str(context), rule, remedy)
    divisor = (tensor if config.sequence_parallel or era is OLD else 1) * (2 * context if context > 1 else 1)
    if config.sequence_length and config.sequence_length % divisor:
        rule = f"{divisor} must divide it: tensor ranks with a shared sequence, and 2 × context ranks"
        yield Violation(KEYS["sequence_length"], str(config.sequence_length), rule, "use a multiple of it")
    looped, virtual = config.schedule in LOOPED, config.vpp or 1
    if (looped and virtual < 2) or (config.schedule in ("zbv", "dualpipe_v") and virtual != 2):
        rule, remedy = f"{SCHEDULES[str(config.schedule)]} needs two chunks a rank", "give every rank two parts"
        yield Violation(KEYS["vpp"], str(virtual), rule, remedy)
    yield from unnamed_stages(config, KEYS["layers"])
    pipeline, count = config.pp or 1, config.micro_batches or 1
    if config.schedule == "1f1b" and not capabilities()["torchtitan"].runs_1f1b(pipeline, count):
        yield Violation(
            "training.local_batch_size",
            str(count * (config.micro_batch or 1)),
            f"it gives {count} micro-batches, and torch runs 1F1B of {pipeline} stages with {pipeline} or more",
            "use a larger one, or pipeline_parallel_schedule = GPipe",
        )
    yield from apart_on_host(config, KEYS["offload_optimizer"])
    if era is OLD and config.offload_optimizer and config.optimizer_sharding == "none" and context == 1:
        remedy = "use data_parallel_shard_degree or context_parallel_degree above 1"
        yield Violation(KEYS["offload_optimizer"], "true", "only parameters that FSDP shards go to the host", remedy)


def _form(name: str, era: Era, suffix: str, write: Any) -> ExchangeFormat:
    marks = ("data_parallel_shard_degree", "tensor_parallel_degree", "[parallelism]")
    return ExchangeFormat(
        name=name,
        version=era.version,
        suffix=suffix,
        also_silent=frozenset({"expert_overlap", "recompute_modules", "tokens_once"}),
        keys=KEYS,
        write=write,
        read=read,
        recognises=lambda name, text: (era is NEW or name.endswith(suffix)) and any(mark in text for mark in marks),
        rules=partial(rules, era=era),
        timed_as="torchtitan",
    )


TORCHTITAN_OLD = _form("torchtitan-0.2", OLD, ".toml", write_toml)
TORCHTITAN = _form("torchtitan", NEW, ".py", write_python)
