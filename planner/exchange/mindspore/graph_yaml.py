"""MindFormers' training files for graph mode as an exchange format; `mindformers.translate` reads them.

Keys are those of ``configs/*/pretrain_*.yaml``. Chunks are given by the layers that they have more than an even share
(``offset``), what computes again by how many of each chunk's first layers do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import yaml

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, empty_chunks
from planner.exchange.keyed import Document, nested
from planner.exchange.mindspore.layers import LayerSettings
from planner.exchange.mindspore.mindformers import ALGORITHMS, PRECISIONS, Translated, translate
from planner.exchange.mindspore.mindformers_keys import DEGREES, SCHEDULERS
from planner.exchange.mindspore.requests import LEVELS, pins_of
from planner.exchange.training_config import PLAIN, TrainingConfig, even_layers, uneven
from planner.networks.mindformers_config import transformers_config
from simulator.errors import InputError

VERSION = "167a50de (2026-08)"
KEYS: Mapping[str, str] = {
    "devices": "devices",
    **{pin: f"parallel_config.{key}" for key, pin in DEGREES.items()},
    "vpp": "model.model_config.pp_interleave_num",
    "layers": "model.model_config.offset",
    "num_layers": "model.model_config.num_hidden_layers",
    "schedule": "parallel.pipeline_config.pipeline_scheduler",
    "micro_batch": "runner_config.batch_size",
    "global_batch": "parallel_config.micro_batch_num",
    "sequence_length": "model.model_config.seq_length",
    "precision": "model.model_config.compute_dtype",
    "optimizer_sharding": "parallel.parallel_optimizer_config.optimizer_level",
    "shard_size": "parallel.parallel_optimizer_config.optimizer_weight_shard_size",
    "sequence_parallel": "parallel_config.use_seq_parallel",
    "context_algorithm": "parallel_config.context_parallel_algo",
    "recompute": "recompute_config.recompute",
    "recompute_layers": "recompute_config.recompute",
    "offload_activations": "swap_config.swap",
}


def values(config: TrainingConfig) -> dict[str, Any]:
    """Keys with their values."""
    pipeline, count = config.pp or 1, config.micro_batches or 1
    degrees = {"dp": config.dp, "tp": config.tp, "pp": pipeline, "cp": config.cp, "ep": config.ep}
    found: dict[str, Any] = {
        "use_parallel": True,
        "parallel.parallel_mode": 1,
        "parallel.enable_parallel_optimizer": config.sharded,
        **{KEYS[name]: size or 1 for name, size in degrees.items()},
        KEYS["sequence_parallel"]: bool(config.sequence_parallel),
        "micro_batch_interleave_num": 1,
        KEYS["micro_batch"]: config.micro_batch,
        "runner_config.gradient_accumulation_steps": 1 if pipeline > 1 else count,
    }
    if config.sharded:
        words = {name: word for word, name in LEVELS.items()}
        found[KEYS["optimizer_sharding"]] = words[str(config.optimizer_sharding)]
        found["parallel.parallel_optimizer_config.parallel_optimizer_threshold"] = 0
        if config.shard_size:
            found[KEYS["shard_size"]] = config.shard_size
    if (config.cp or 1) > 1:
        words = {name: word for word, name in ALGORITHMS.items()}
        found[KEYS["context_algorithm"]] = words[str(config.context_algorithm)]
    model = {"num_layers": config.num_layers, "sequence_length": config.sequence_length}
    found |= {KEYS[name]: value for name, value in model.items() if value}
    found[KEYS["precision"]] = next(word for word, name in PRECISIONS.items() if name == config.precision)
    return found | _pipeline(config, count) | _recompute(config)


def _pipeline(config: TrainingConfig, count: int) -> dict[str, Any]:
    pipeline, virtual = config.pp or 1, config.vpp or 1
    if pipeline == 1:
        return {}
    scheduler = next((word for word, name in SCHEDULERS.items() if name == config.schedule), "1f1b")
    found: dict[str, Any] = {
        KEYS["global_batch"]: count,
        "parallel.pipeline_config.pipeline_interleave": virtual > 1 or scheduler != "1f1b",
        KEYS["schedule"]: scheduler,
        KEYS["vpp"]: virtual,
    }
    if config.layers:
        share = sum(config.layers) // len(config.layers)
        found[KEYS["layers"]] = _rows([size - share for size in config.layers], pipeline)
    return found


def _rows(numbers: list[int], stages: int) -> list[Any]:
    """Numbers of stages, in one row for each chunk of a stage where there are several."""
    rows = [numbers[start : start + stages] for start in range(0, len(numbers), stages)]
    return rows if len(rows) > 1 else rows[0]


def _recompute(config: TrainingConfig) -> dict[str, Any]:
    modes = config.recompute_layers or ()
    if not modes:
        mode = config.recompute
        return {"recompute_config.recompute": mode == "full", "recompute_config.select_recompute": mode == "selective"}
    sizes, stages = _chunks(config), config.pp or 1
    ends = list(accumulate(sizes, initial=0))
    parts = [modes[start:end] for start, end in pairwise(ends)]
    whole = [part.count("full") for part in parts]
    again = [len(part) - part.count("none") for part in parts]
    found: dict[str, Any] = {"recompute_config.recompute": _rows(whole, stages)}
    if "selective" in modes:
        found["recompute_config.select_recompute"] = _rows(again, stages)
    return found


def _chunks(config: TrainingConfig) -> tuple[int, ...]:
    chunks = (config.pp or 1) * (config.vpp or 1)
    return config.layers or even_layers(config.num_layers or len(config.recompute_layers or ()), chunks)


def write(config: TrainingConfig) -> Written:
    """The sections."""
    head = f"# A plan of Meshwright for MindFormers {VERSION}, graph mode: put these sections into your file.\n"
    return Written(text=head + yaml.safe_dump(nested(values(config)), sort_keys=False, default_flow_style=None))


def read(text: str, source: str) -> ReadConfig:
    """Read a training file."""
    raw = Document.yaml(text, source, "MindFormers")
    said = translate(raw.sections)
    if not said.configured:
        raise InputError(
            f"{source}: parallel_mode {said.parallel_mode} leaves the plan to MindSpore; use plan --config, or 1"
        )
    options = said.options
    pins = {**options.get("pin", {}), **said.pins}
    dp, tp, pp, cp, ep, vpp = (int(pins.get(name, "1")) for name in ("dp", "tp", "pp", "cp", "ep", "vpp"))
    whole = pins.get("expert_cut") == "whole"
    sharding = pins_of(said.context)
    shard = int(sharding.get("shard_size", "0"))
    batch, micro = options.get("global_batch"), pins.get("micro_batch")
    if micro is None and batch is not None:
        micro = batch // (dp * int(pins.get("micro_batches", "1"))) or None
    sizes = transformers_config(raw.sections)
    if sizes:
        layers = Document(sizes, source, "MindFormers").optional("num_hidden_layers")
    else:
        layers = raw.optional(KEYS["num_layers"])
    plain = "none" if pp == 1 else "1f1b" if vpp == 1 else "interleaved_1f1b"
    config = replace(
        PLAIN,
        devices=prod((dp, tp, pp, cp)),
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep * tp if whole else ep,
        etp=1 if whole else tp,
        num_layers=layers,
        schedule=pins.get("schedule", plain),
        micro_batch=None if micro is None else int(micro),
        global_batch=batch,
        sequence_length=options.get("seq_len"),
        precision=options.get("precision"),
        optimizer_sharding=sharding.get("optimizer_sharding", "none"),
        shard_size=shard if shard < dp else 0,
        sequence_parallel=pins.get("sequence_parallel") == "true",
        context_algorithm=pins.get("context_algorithm", "ring") if cp > 1 else "none",
        offload_activations=bool(said.layers.swaps),
        **_of_layers(said, layers, pp, vpp),
    )
    notes = (*(note for note in said.notes if not note.startswith("not read")), *_copies(pins))
    return ReadConfig(config=config, sizes=sizes, not_read=said.not_read, notes=notes)


def _copies(pins: Mapping[str, str]) -> Iterator[str]:
    if pins.get("copies", "1") != "1":
        yield f"micro_batch_interleave_num={pins['copies']} is planned as one copy"


def _of_layers(said: Translated, layers: int | None, stages: int, virtual: int) -> dict[str, Any]:
    """Layers of chunks, and which of them compute again."""
    settings = said.layers
    mode = said.pins.get("recompute", "none")
    found: dict[str, Any] = {"layers": (), "recompute": mode, "recompute_layers": (), "recompute_count": 0}
    if layers is None:  # the file's network stands elsewhere: what chunks hold is not known
        unknown: Iterable[str] = found if settings else ["layers"] if virtual > 1 else []
        return {**found, **dict.fromkeys(unknown)}
    sizes: tuple[int, ...] = even_layers(layers, stages * virtual)
    if settings.offset:
        sizes = tuple(settings.layers_of_chunks(layers, stages, virtual))
        found["layers"] = uneven(sizes)
    if settings.recomputes:
        modes = _modes(settings, list(sizes), stages)
        same = len(set(modes)) == 1
        found |= {"recompute": modes[0] if same else "mixed", "recompute_layers": () if same else modes}
    if found["recompute"] == "selective":
        found["recompute_modules"] = None
    return found


def _modes(settings: LayerSettings, chunks: list[int], stages: int) -> tuple[str, ...]:
    """Mode of each layer; parts that are named count as all that is cheap."""
    whole = settings.recompute.chosen(chunks, stages) if settings.recompute else [False] * sum(chunks)
    parts = [choice.counts.chosen(chunks, stages) for choice in settings.select]
    return tuple(
        "full" if again else "selective" if any(part[number] for part in parts) else "none"
        for number, again in enumerate(whole)
    )


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of MindFormers across fields."""
    pipeline, virtual, modes = config.pp or 1, config.vpp or 1, config.recompute_layers or ()
    whole, ranks = (config.etp or 1) < (config.tp or 1), config.dp or 1
    if (config.ep or 1) > 1 and (config.tp or 1) > 1 and whole == ((config.ep or 1) <= ranks):
        rule = f"up to {ranks} data-parallel ranks cut experts over model-parallel ranks, more hold whole ones"
        yield Violation(KEYS["ep"], str(config.ep), rule, f"plan with --pin expert_cut={'width' if whole else 'whole'}")
    if config.schedule == "zbv" and virtual != 2:
        yield Violation(KEYS["schedule"], "zero_bubble_v", "it needs two chunks", "use pp_interleave_num 2")
    if modes or config.layers or virtual > 1:
        if not config.num_layers:
            if config.layers is None and not modes:
                return
            rule = "stages have so many layers each, and the network is no row of layers"
            yield Violation(KEYS["num_layers"], "", rule, "plan with --pin pp=1 and one mode of recomputation")
            return
        yield from empty_chunks(config, KEYS["layers"])
        sizes = _chunks(config)
        if config.num_layers % (pipeline * virtual) and not config.layers:
            rule, remedy = f"{pipeline} × {virtual} chunks must divide it", "give chunks their layers"
            yield Violation(KEYS["num_layers"], str(config.num_layers), rule, remedy)
        order = {"full": 0, "selective": 1, "none": 2}
        ends = list(accumulate(sizes, initial=0))
        parts = [[order[mode] for mode in modes[start:end]] for start, end in pairwise(ends)]
        if any(part != sorted(part) for part in parts):
            rule = "the first layers of a chunk compute again, whole before in part"
            yield Violation(KEYS["recompute"], "", rule, "plan with --pin recompute=full, selective or none")


MINDFORMERS = ExchangeFormat(
    name="mindformers",
    version=VERSION,
    suffix=".yaml",
    also_silent=frozenset({"recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: any(
        f"{key}:" in text for key in ("parallel_config", "recompute_config", "use_parallel")
    ),
    rules=rules,
)
