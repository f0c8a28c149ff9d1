"""MindFormers' PyNative trainer: the YAML file with ``training``, ``parallelism`` and ``recompute``.

Keys and rules are those of ``mindformers/pynative/config/config.py``. Data-parallel ranks are the launch command's
devices over the other degrees; the file gives how many of them share states.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count, groupby
from typing import Any

from planner.exchange.formats import (
    ExchangeFormat,
    ReadConfig,
    Violation,
    Written,
    apart_on_host,
    devices_of,
    divides,
    empty_chunks,
    unnamed_stages,
)
from planner.exchange.keyed import Document, yaml_file
from planner.exchange.training_config import MOST_LAYERS, PLAIN, TrainingConfig, even_layers, uneven
from planner.networks.mindformers_config import transformers_config
from simulator.errors import InputError

VERSION = "167a50de (2026-08)"
KEYS: Mapping[str, str] = {
    "devices": "NPUs",
    "tp": "parallelism.tensor_parallel",
    "pp": "parallelism.pipeline_parallel",
    "cp": "parallelism.context_parallel",
    "ep": "parallelism.expert_parallel",
    "vpp": "parallelism.pipeline_parallel_interleave_num",
    "layers": "parallelism.pipeline_parallel_layers_per_stage",
    "num_layers": "parallelism.pipeline_parallel_layers_per_stage",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "micro_batch": "parallelism.pipeline_parallel_microbatch_size",
    "global_batch": "training.global_batch_size",
    "optimizer_sharding": "parallelism.reshard_after_forward_policy",
    "shard_size": "parallelism.data_parallel_shard",
    "sequence_parallel": "parallelism.sequence_parallel",
    "tensor_overlap": "parallelism.enable_mc2",
    "expert_overlap": "parallelism.pipeline_parallel_overlap_b_f",
    "context_algorithm": "parallelism.context_parallel_method",
    "recompute": "recompute.mode",
    "recompute_layers": "recompute.full_recompute_layer",
    "offload_optimizer": "parallelism.cpu_offload",
    "offload_parameters": "parallelism.cpu_offload",
}
DEGREES = ("tp", "pp", "cp", "ep")
SCHEDULES: Mapping[str, str] = {name: name for name in ("gpipe", "1f1b", "interleaved_1f1b")}
METHODS: Mapping[str, str] = {"colossal": "ring", "ulysses": "all_to_all", "hybrid": "ring"}
MODES: Mapping[str, str] = {"None": "none", "full": "full", "select": "selective"}
LOCAL, LAYERS, MODEL = "training.local_batch_size", KEYS["layers"], "model.model_config.num_hidden_layers"


def write(config: TrainingConfig) -> Written:
    """The sections."""
    pipeline, virtual, micro = config.pp or 1, config.vpp or 1, config.micro_batch or 1
    found: dict[str, Any] = {
        LOCAL: micro * (config.micro_batches or 1) if pipeline > 1 else micro,
        KEYS["global_batch"]: config.global_batch,
        KEYS["shard_size"]: config.shard,
        **{KEYS[name]: getattr(config, name) or 1 for name in DEGREES},
        KEYS["sequence_parallel"]: bool(config.sequence_parallel),
    }
    if config.sharded:
        found[KEYS["optimizer_sharding"]] = "always" if config.optimizer_sharding == "zero3" else "never"
    if config.offload_optimizer:
        found[KEYS["offload_optimizer"]] = True
    if (config.cp or 1) > 1:
        found[KEYS["context_algorithm"]] = "ulysses" if config.context_algorithm == "all_to_all" else "colossal"
    if config.tensor_overlap:
        found[KEYS["tensor_overlap"]] = True
    if pipeline > 1:
        sizes = config.layers or even_layers(config.num_layers or 0, pipeline * virtual)
        numbers = count()
        chunks = [_ranges([next(numbers) for _ in range(size)]) for size in sizes]
        found |= {
            KEYS["schedule"]: config.schedule,
            KEYS["micro_batch"]: micro,
            KEYS["vpp"]: virtual,
            LAYERS: [",".join(chunks[rank::pipeline]) for rank in range(pipeline)],
        }
    modes = config.recompute_layers or ()
    found["recompute.mode"] = "None" if config.recompute in (None, "none") else "full"
    if modes:
        again = _ranges([number for number, mode in enumerate(modes) if mode == "full"])
        found |= {KEYS["recompute_layers"]: again.split(","), MODEL: len(modes)}
    return yaml_file(
        f"A plan of Meshwright for MindFormers {VERSION}, PyNative trainer, on {config.devices} NPUs", found
    )


def _ranges(numbers: list[int]) -> str:
    """Ranges of neighbouring numbers, both ends included.

    >>> _ranges([0, 1, 2, 5])
    '0-2,5'
    """
    rows = [[number for _, number in row] for _, row in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ",".join(str(row[0]) if len(row) == 1 else f"{row[0]}-{row[-1]}" for row in rows)


def read(text: str, source: str) -> ReadConfig:
    """Read the YAML file."""
    raw = Document.yaml(text, source, "MindFormers")
    found: dict[str, Any] = {name: raw.number(KEYS[name]) for name in DEGREES}
    pipeline = found["pp"]
    devices = devices_of(text, "NPUs")
    ranks = devices // (found["tp"] * pipeline * found["cp"]) if devices else None
    shard = raw.number(KEYS["shard_size"], -1, -1)
    shard = (ranks or shard) if shard == -1 else shard
    policies = {"default": "zero3" if pipeline == 1 else "zero2", "always": "zero3", "never": "zero2"}
    level = raw.word(KEYS["optimizer_sharding"], policies, "default")
    local, batch = raw.number(LOCAL), raw.number(KEYS["global_batch"])
    away = raw.flag(KEYS["offload_optimizer"])
    method = raw.word(KEYS["context_algorithm"], METHODS, "colossal")
    stages = _stages(raw, pipeline, source)
    layers = raw.optional(MODEL) or stages.get("num_layers")
    config = replace(
        PLAIN,
        **found,
        **stages,
        **_recompute(raw, layers, source),
        etp=1 if found["ep"] > 1 else found["tp"],
        devices=devices,
        micro_batch=raw.number(KEYS["micro_batch"]) if pipeline > 1 else local,
        global_batch=batch,
        optimizer_sharding="none" if shard == 1 else level,
        shard_size=shard if 1 < shard < (ranks or 0) else 0,
        sequence_parallel=found["tp"] > 1 and raw.flag(KEYS["sequence_parallel"]),
        context_algorithm=method if found["cp"] > 1 else "none",
        offload_optimizer=away,
        offload_parameters=away,
        offload_activations=raw.flag("swap.enable"),
        tensor_overlap=raw.flag(KEYS["tensor_overlap"]),
        expert_overlap=raw.flag(KEYS["expert_overlap"]),
    )
    raw.flag(KEYS["sequence_parallel"])
    sizes = transformers_config(raw.sections)
    raw.pass_over("model." if sizes else "model.none")
    return ReadConfig(config=config, sizes=sizes, not_read=raw.unread())


def _stages(raw: Document, pipeline: int, source: str) -> dict[str, Any]:
    virtual = raw.number(KEYS["vpp"])
    given, schedule = raw.get(LAYERS, "auto"), raw.word(KEYS["schedule"], SCHEDULES, "1f1b")
    if pipeline == 1:
        return {"schedule": "none", "vpp": 1, "layers": ()}
    if given == "auto":
        return {"schedule": schedule, "vpp": virtual, "layers": None}
    rows = [_spans(str(row), source) for row in given] if isinstance(given, list) else []
    if len(rows) != pipeline or {len(row) for row in rows} != {virtual}:
        raise InputError(
            f"{source}: {LAYERS} = {given!r:.60} must give each of {pipeline} ranks the layers of {virtual} chunks"
        )
    sizes = tuple(row[chunk][1] - row[chunk][0] + 1 for chunk in range(virtual) for row in rows)
    return {"schedule": schedule, "vpp": virtual, "num_layers": sum(sizes), "layers": uneven(sizes)}


def _spans(row: str, source: str) -> list[tuple[int, int]]:
    """First and last number of each range.

    >>> _spans("0-3,16", "a file")
    [(0, 3), (16, 16)]
    """
    found = [re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip()) for part in row.split(",")]
    spans = [(int(one[1]), int(one[2] or one[1])) for one in found if one is not None]
    if len(spans) != len(found) or any(last < first for first, last in spans):
        raise InputError(f"{source}: {row!r:.60} is no list of ranges of layers such as 0-3,16-19; correct it")
    return spans


def _recompute(raw: Document, layers: int | None, source: str) -> dict[str, Any]:
    mode, said = raw.word("recompute.mode", MODES, "None"), raw.get(KEYS["recompute_layers"])
    modes: tuple[str, ...] = ()
    if layers is not None and layers > MOST_LAYERS:
        raise InputError(f"{source}: {layers} layers are more than the {MOST_LAYERS} that are read; correct the number")
    if mode == "full" and isinstance(said, list) and layers:
        spans = [span for part in said for span in _spans(str(part), source)]
        again = [any(first <= number <= last for first, last in spans) for number in range(layers)]
        if not all(again):
            mode, modes = "mixed", tuple("full" if one else "none" for one in again)
    return {"recompute": mode, "recompute_layers": modes}


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of the PyNative trainer across fields."""
    if config.dp:
        stage = config.shard * (config.cp or 1) * (config.tp or 1)
        what = "ranks of data_parallel_shard × context_parallel × tensor_parallel"
        yield from divides(KEYS["ep"], config.ep or 1, stage, what)
    if config.dp and config.sharded and config.shard == 1:
        yield Violation(
            KEYS["shard_size"], "1", "one rank has nothing to share", "shard over two ranks or more, or leave it out"
        )
    yield from apart_on_host(config, KEYS["offload_optimizer"])
    looped, virtual = config.schedule == "interleaved_1f1b", config.vpp or 1
    if looped == (virtual == 1):
        yield Violation(
            KEYS["vpp"],
            str(virtual),
            f"the schedule {config.schedule} does not go with so many chunks",
            "use interleaved_1f1b with two chunks or more, and another with one",
        )
    yield from unnamed_stages(config, LAYERS)
    yield from empty_chunks(config, LAYERS)


MINDFORMERS_PYNATIVE = ExchangeFormat(
    name="mindformers-pynative",
    version=VERSION,
    suffix=".yaml",
    also_silent=frozenset({"num_layers", "precision", "recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: (
        "parallelism:" in text and any(f"  {key}:" in text for key in ("tensor_parallel", "data_parallel_shard"))
    ),
    rules=rules,
    timed_as="mindformers",
)
