"""NeMo Automodel: the sections ``distributed`` and ``step_scheduler`` of a recipe's YAML file.

Keys and rules are those of ``nemo_automodel/components/distributed/config.py``, ``mesh.py`` and
``pipelining/config.py``. Plans are written for FSDP2: ZeRO level 3 gathers parameters again for the backward pass,
level 2 keeps them; replicas alone are DDP. With a pipeline the local batch of a step is one run of the schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, divides, unnamed_stages
from planner.exchange.keyed import Document, yaml_file
from planner.exchange.training_config import LOOPED, PLAIN, TrainingConfig, module_parts, stages_of_parts

VERSION = "36044ad3 (2026-08)"
KEYS: Mapping[str, str] = {
    "devices": "distributed.dp_size",
    "tp": "distributed.tp_size",
    "pp": "distributed.pp_size",
    "cp": "distributed.cp_size",
    "ep": "distributed.ep_size",
    "vpp": "distributed.pipeline.module_fqns_per_model_part",
    "layers": "distributed.pipeline.module_fqns_per_model_part",
    "num_layers": "distributed.pipeline.module_fqns_per_model_part",
    "schedule": "distributed.pipeline.pp_schedule",
    "micro_batch": "distributed.pipeline.pp_microbatch_size",
    "global_batch": "step_scheduler.global_batch_size",
    "optimizer_sharding": "distributed.reshard_after_forward",
    "shard_size": "distributed.dp_replicate_size",
    "sequence_parallel": "distributed.sequence_parallel",
    "tensor_overlap": "distributed.enable_async_tensor_parallel",
    "recompute": "distributed.activation_checkpointing",
    "offload_optimizer": "distributed.offload_policy",
    "offload_parameters": "distributed.offload_policy",
}
DEGREES = ("tp", "pp", "cp", "ep")
SCHEDULES: Mapping[str, str] = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe_v",
}
MODES: Mapping[str, str] = {"False": "none", "True": "full", "full": "full", "selective": "selective"}
OFFLOAD = "torch.distributed.fsdp.CPUOffloadPolicy"
LAYER, LOCAL = "model.layers.", "step_scheduler.local_batch_size"
PARTS = KEYS["layers"]


def write(config: TrainingConfig) -> Written:
    """The sections."""
    ranks, micro, pipeline = config.dp or 1, config.micro_batch or 1, config.pp or 1
    plain = not config.sharded and ranks > 1
    found: dict[str, Any] = {
        "distributed.strategy": "ddp" if plain else "fsdp2",
        "distributed.dp_size": ranks,
        **{KEYS[name]: getattr(config, name) or 1 for name in DEGREES},
    }
    if not plain:
        found[KEYS["shard_size"]] = ranks // config.shard
        found[KEYS["sequence_parallel"]] = bool(config.sequence_parallel)
    found[KEYS["recompute"]] = False if config.recompute in (None, "none") else config.recompute
    if config.sharded:
        found[KEYS["optimizer_sharding"]] = config.optimizer_sharding == "zero3"
    if config.tensor_overlap:
        found[KEYS["tensor_overlap"]] = True
    if config.offload_optimizer:
        found[f"{KEYS['offload_optimizer']}._target_"] = OFFLOAD
    local = micro * (config.micro_batches or 1) if pipeline > 1 else micro
    if pipeline > 1:
        words = {name: word for word, name in SCHEDULES.items()}
        found |= {
            KEYS["schedule"]: words[str(config.schedule)],
            KEYS["micro_batch"]: micro,
            "distributed.pipeline.pp_batch_size": local,
            PARTS: module_parts(config, "model.embed_tokens", f"{LAYER}{{}}", ["model.norm", "lm_head"]),
        }
    head = f"A plan of Meshwright for NeMo Automodel {VERSION}: put these sections into your recipe's file."
    return yaml_file(head, {**found, LOCAL: local, KEYS["global_batch"]: config.global_batch})


def read(text: str, source: str) -> ReadConfig:
    """Read a recipe's file."""
    raw = Document.yaml(text, source, "NeMo Automodel")
    found: dict[str, Any] = {name: raw.number(KEYS[name]) for name in DEGREES}
    pipeline, ranks = found["pp"], raw.values.get("distributed.dp_size")
    data = raw.optional("distributed.dp_size") if isinstance(ranks, int) else None
    raw.get("distributed.dp_size")
    level, shard = _sharding(raw, data, pipeline)
    local, batch = raw.number(LOCAL), raw.optional(KEYS["global_batch"])
    away = raw.get(f"{KEYS['offload_optimizer']}._target_") is not None
    config = replace(
        PLAIN,
        **found,
        **_stages(raw, pipeline, source),
        etp=1 if found["ep"] > 1 else found["tp"],
        devices=data and data * found["tp"] * pipeline * found["cp"],
        micro_batch=raw.number(KEYS["micro_batch"]) if pipeline > 1 else local,
        global_batch=batch or (local * data if data else None),
        optimizer_sharding=level,
        shard_size=shard,
        sequence_parallel=found["tp"] > 1 and raw.flag(KEYS["sequence_parallel"]),
        context_algorithm="ring" if found["cp"] > 1 else "none",
        precision="bf16",
        recompute=raw.word(KEYS["recompute"], MODES, "False"),
        offload_optimizer=away,
        offload_parameters=away,
        tensor_overlap=raw.flag(KEYS["tensor_overlap"]),
    )
    raw.flag(KEYS["sequence_parallel"])
    raw.pass_over("distributed.pipeline.pp_")
    return ReadConfig(config=config, not_read=raw.unread())


def _sharding(raw: Document, data: int | None, pipeline: int) -> tuple[str, int]:
    """ZeRO level, and ranks that share states where there are several copies."""
    strategies = {name: name for name in ("fsdp2", "ddp", "megatron_fsdp")}
    strategy = raw.word("distributed.strategy", strategies, "fsdp2")
    replicas = raw.number(KEYS["shard_size"], 1, 0) or 1
    if strategy == "megatron_fsdp":
        level = raw.number("distributed.zero_dp_strategy", 3, 0)
        return ("none", "zero1", "zero2", "zero3")[min(level, 3)], 0
    if strategy == "ddp" or data == 1:
        raw.get(KEYS["optimizer_sharding"])
        return "none", 0
    gathers = raw.flag(KEYS["optimizer_sharding"], pipeline == 1)
    return "zero3" if gathers else "zero2", data // replicas if data and replicas > 1 else 0


def _stages(raw: Document, pipeline: int, source: str) -> dict[str, Any]:
    if pipeline == 1:
        return {"schedule": "none", "vpp": 1, "layers": ()}
    named = str(raw.get(KEYS["schedule"], "1f1b")).lower().replace("_", "")
    if named not in SCHEDULES:
        named = raw.word(KEYS["schedule"], SCHEDULES, "1f1b")
    return stages_of_parts(SCHEDULES.get(named, named), raw.get(PARTS), LAYER, PARTS, pipeline, source)


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Automodel across fields."""
    known, ranks, inner = config.dp is not None, config.dp or 1, (config.tp or 1) * (config.cp or 1) * (config.pp or 1)
    sharded, replicated = config.sharded, ranks > 1 and not config.sharded
    if replicated and (inner > 1 or (config.ep or 1) > 1):
        yield Violation(
            KEYS["shard_size"],
            str(ranks),
            "strategy ddp has no other axis, and FSDP2 shards over more than one rank",
            "plan with --pin optimizer_sharding=zero2, or on a data axis alone",
        )
    if sharded and config.shard_size == 1:
        yield Violation(KEYS["shard_size"], str(ranks), "it must be less than dp_size", "shard over two ranks or more")
    if known and sharded and ranks == 1:
        yield Violation(
            KEYS["optimizer_sharding"], "", "one data-parallel rank has nothing to shard over", "leave it out"
        )
    stage = ranks * (config.cp or 1) * (config.tp or 1)
    if known:
        yield from divides(KEYS["ep"], config.ep or 1, stage, "ranks of dp_size × cp_size × tp_size")
    looped, virtual = config.schedule in LOOPED, config.vpp or 1
    if looped == (virtual == 1) or (config.schedule in ("zbv", "dualpipe_v") and virtual != 2):
        yield Violation(
            KEYS["vpp"],
            str(virtual),
            f"the schedule {config.schedule} does not go with so many parts a rank",
            "give every rank two parts with a looped schedule, and one with another",
        )
    yield from unnamed_stages(config, PARTS)
    if config.micro_batches is not None and config.micro_batches < (config.pp or 1):
        yield Violation(
            LOCAL,
            str(config.micro_batches * (config.micro_batch or 1)),
            f"it gives {config.micro_batches} micro-batches, and the pipeline has {config.pp} ranks",
            "use at least one micro-batch for each of them",
        )
    if config.tensor_overlap and not config.sequence_parallel and (config.tp or 1) > 1:
        yield Violation(KEYS["tensor_overlap"], "true", "it needs sequence_parallel", "add it, or leave this out")
    if bool(config.offload_optimizer) != bool(config.offload_parameters) or (config.offload_optimizer and replicated):
        rule = "parameters and optimizer states go to the host together, and only under FSDP2"
        yield Violation(KEYS["offload_optimizer"], "", rule, "offload both, or none")


AUTOMODEL = ExchangeFormat(
    name="automodel",
    version=VERSION,
    suffix=".yaml",
    also_silent=frozenset({"num_layers", "recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: "distributed:" in text and "step_scheduler:" in text,
    rules=rules,
    timed_as="torchtitan",
)
