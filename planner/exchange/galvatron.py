"""Galvatron: the JSON strategy file, with one entry a layer.

Keys are those of ``galvatron/utils/config_utils.py`` and ``hybrid_parallel_config.py``. A layer's ``tp_sizes_enc`` are
tensor ranks, or with ``use_sp`` ranks that exchange heads for the sequence (Ulysses); ``cp_sizes_enc`` are ranks of
ring attention. ``dp_types_enc`` 1 is ZeRO-3, 0 is ``default_dp_type``. Sequence length, precision and sequence
parallelism stand on the command line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.keyed import Document, json_file
from planner.exchange.training_config import PLAIN, TrainingConfig, even_layers, uneven
from simulator.errors import InputError

VERSION = "1d27a7a (2026)"
KEYS: Mapping[str, str] = {
    "devices": "GPUs",
    "tp": "tp_sizes_enc",
    "pp": "pp_deg",
    "cp": "cp_sizes_enc",
    "layers": "pp_division",
    "num_layers": "tp_sizes_enc",
    "schedule": "pipeline_type",
    "global_batch": "global_bsz",
    "micro_batch": "chunks",
    "optimizer_sharding": "default_dp_type",
    "context_algorithm": "use_sp",
    "recompute": "checkpoint",
    "recompute_layers": "checkpoint",
}
SCHEDULES: Mapping[str, str] = {"gpipe": "gpipe", "pipedream_flush": "1f1b"}
LEVELS: Mapping[str, str] = {"ddp": "none", "zero2": "zero2", "zero3": "zero3"}
_DEVICES = re.compile(r"on ([0-9]{1,9}) GPUs|([0-9]{1,6})nodes_([0-9]{1,6})gpus")


def write(config: TrainingConfig) -> Written:
    """The file."""
    layers, pipeline = config.num_layers or 1, config.pp or 1
    heads = config.context_algorithm == "all_to_all" and (config.cp or 1) > 1
    level = config.optimizer_sharding or "none"
    again = config.recompute_layers or (config.recompute,) * layers

    def each(value: object) -> str:
        return ",".join([str(value)] * layers)

    found = {
        "pp_deg": pipeline,
        "tp_sizes_enc": each(config.cp if heads else config.tp or 1),
        "tp_consecutive_flags": each(1),
        "cp_sizes_enc": each(1 if heads else config.cp or 1),
        "dp_types_enc": each(int(level == "zero3")),
        "use_sp": each(int(heads)),
        "checkpoint": ",".join(str(int(mode == "full")) for mode in again),
        "global_bsz": config.global_batch,
        "chunks": config.micro_batches,
        "pp_division": ",".join(map(str, config.layers or even_layers(layers, pipeline))),
        "pipeline_type": "gpipe" if config.schedule == "gpipe" else "pipedream_flush",
        "default_dp_type": {"none": "ddp", "zero3": "zero2"}.get(level, level),
        "vtp": config.cp if heads else config.tp or 1,
        "vsp": int(heads),
        "embed_sdp": int(level == "zero3"),
    }
    return json_file(f"a plan for Galvatron {VERSION} on {config.devices} GPUs", found)


def read(text: str, source: str) -> ReadConfig:
    """Read a strategy; where layers differ, what most of them have counts, and the key is listed as not read."""
    raw = Document.json(text, source, "Galvatron")
    mixed: list[str] = []

    def usual(key: str, default: int) -> int:
        found = Counter(raw.numbers(key) or (default,))
        mixed.extend([key] if len(found) > 1 else [])
        return max(found, key=lambda value: (found[value], value))

    pipeline, batch, chunks = raw.number("pp_deg"), raw.optional("global_bsz"), raw.optional("chunks")
    width, ring, heads = usual("tp_sizes_enc", 1), usual("cp_sizes_enc", 1), usual("use_sp", 0) == 1
    if min(width, ring) < 1 or (heads and ring > 1):
        raise InputError(f"{source}: tp_sizes_enc {width}, cp_sizes_enc {ring} and use_sp {heads}: correct them")
    named = _DEVICES.search(str(raw.get("meshwright", ""))) or _DEVICES.search(source)
    devices = None if named is None else int(named[1]) if named[1] else int(named[2]) * int(named[3])
    ranks = devices // (pipeline * width * ring) if devices else 0
    again = raw.numbers("checkpoint")
    level = "zero3" if usual("dp_types_enc", 0) else raw.word("default_dp_type", LEVELS, "ddp")
    layers = len(raw.numbers("tp_sizes_enc")) or None
    stages = raw.numbers("pp_division")
    config = replace(
        PLAIN,
        devices=devices,
        tp=1 if heads else width,
        pp=pipeline,
        cp=width if heads else ring,
        ep=1,
        etp=1 if heads else width,
        num_layers=layers,
        layers=() if pipeline == 1 else uneven(stages),
        schedule="none" if pipeline == 1 else raw.word("pipeline_type", SCHEDULES, "gpipe"),
        micro_batch=batch // (chunks * ranks) or None if batch and chunks and ranks else None,
        global_batch=batch,
        optimizer_sharding=level,
        shard_size=0,
        context_algorithm="all_to_all" if heads and width > 1 else "ring" if ring > 1 else "none",
        recompute="mixed" if len(set(again)) > 1 else "full" if any(again) else "none",
        recompute_layers=tuple("full" if one else "none" for one in again) if len(set(again)) > 1 else (),
        recompute_modules=(),
    )
    for key in ("pipeline_type", "tp_consecutive_flags", "vtp", "vsp", "vcp", "embed_sdp", "default_dp_type"):
        raw.get(key)
    return ReadConfig(config=config, not_read=(*mixed, *raw.unread()))


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of Galvatron across fields."""
    if not config.num_layers:
        rule = "strategies stand layer by layer, and the network is no row of layers"
        yield Violation(KEYS["num_layers"], "", rule, "plan a network of equal layers")
    if config.context_algorithm == "all_to_all" and (config.tp or 1) > 1:
        yield Violation(
            KEYS["context_algorithm"],
            "1",
            "a layer has tensor ranks or ranks that exchange heads, not both",
            "plan with --pin tp=1, or with --pin context_algorithm=ring",
        )


GALVATRON = ExchangeFormat(
    name="galvatron",
    version=VERSION,
    suffix=".json",
    also_silent=frozenset({"precision", "sequence_parallel"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: '"tp_sizes_enc"' in text,
    rules=rules,
    timed_as="megatron_core",
)
