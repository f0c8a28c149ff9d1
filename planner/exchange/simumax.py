"""SimuMax: the JSON strategy file.

Keys and rules are those of ``StrategyConfig`` in ``simumax/core/config.py``. SimuMax follows ZeRO up to level 1. It
counts the layers that compute again in each chunk, so that `ALL` stands for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written, divides
from planner.exchange.keyed import Document, json_file
from planner.exchange.training_config import PLAIN, TrainingConfig

VERSION = "acdbb667 (2026)"
ALL = 1000
"""More layers than a chunk has."""
KEYS: Mapping[str, str] = {
    "devices": "world_size",
    "tp": "tp_size",
    "pp": "pp_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "etp": "etp_size",
    "vpp": "interleaving_size",
    "sequence_length": "seq_len",
    "micro_batch": "micro_batch_size",
    "global_batch": "micro_batch_num",
    "optimizer_sharding": "zero_state",
    "sequence_parallel": "enable_sequence_parallel",
    "context_algorithm": "cp_comm_type",
    "recompute": "recompute_granularity",
    "recompute_count": "recompute_layer_num",
    "first_layers": "num_layers_in_first_pipeline_stage",
    "last_layers": "num_layers_in_last_pipeline_stage",
    "overlap_gradients": "overlap_grad_reduce",
    "precision": "dtype",
}
DEGREES = ("tp", "pp", "cp", "ep", "etp", "vpp")
MODES: Mapping[str, str] = {"none": "none", "full_block": "full", "selective_recompute": "selective"}
MODULES = "layernorm", "moe_act"
"""Modules of selective recomputation that SimuMax knows; attention computes its scores again anyway."""


def write(config: TrainingConfig) -> Written:
    """The file."""
    found: dict[str, Any] = {KEYS[name]: getattr(config, name) or 1 for name in ("devices", *DEGREES)}
    found |= {
        "seq_len": config.sequence_length,
        "micro_batch_size": config.micro_batch,
        "micro_batch_num": config.micro_batches,
        "dtype": "bf16",
        "fp8": config.precision == "fp8",
        "zero_state": int(config.optimizer_sharding == "zero1"),
        "enable_sequence_parallel": bool(config.sequence_parallel),
        "overlap_grad_reduce": config.overlap_gradients is not False,
        "enable_recompute": config.recompute not in (None, "none"),
    }
    if (config.cp or 1) > 1:
        found["cp_comm_type"] = "a2a"
    if config.recompute == "full":
        found |= {"recompute_granularity": "full_block", "recompute_layer_num": config.recompute_count or ALL}
    if config.recompute == "selective":
        modules = [name for name in MODULES if name in (config.recompute_modules or MODULES[:1])]
        found |= {
            "recompute_granularity": "selective_recompute",
            "recompute_layer_num": ALL,
            "megatron_recompute": True,
            "megatron_recompute_modules": modules,
        }
    return json_file(f"a plan for SimuMax {VERSION}", found)


def read(text: str, source: str) -> ReadConfig:
    """Read a strategy."""
    raw = Document.json(text, source, "SimuMax")
    found: dict[str, Any] = {name: raw.number(KEYS[name]) for name in DEGREES}
    found["devices"] = raw.number("world_size", 8)
    tensor, pipeline = found["tp"], found["pp"]
    if found["ep"] == 1:
        found["etp"] = tensor
    inner = tensor * pipeline * found["cp"]
    micro, count = raw.optional("micro_batch_size"), raw.optional("micro_batch_num")
    ranks = found["devices"] // inner
    mode = raw.word("recompute_granularity", MODES, "none") if raw.flag("enable_recompute", True) else "none"
    layers = raw.number("recompute_layer_num", 0, 0)
    modules = tuple(map(str, raw.get("megatron_recompute_modules", []))) if raw.flag("megatron_recompute") else ()
    zero, shared = raw.number("zero_state", 1, 0), raw.flag("enable_sequence_parallel", True)
    reduces, algorithm = raw.flag("overlap_grad_reduce", True), raw.get("cp_comm_type", "a2a")
    eight, kind = raw.flag("fp8"), str(raw.get("dtype", "bf16"))
    config = replace(
        PLAIN,
        **found,
        first_layers=raw.optional(KEYS["first_layers"]),
        last_layers=raw.optional(KEYS["last_layers"]),
        schedule="none" if pipeline == 1 else "1f1b" if found["vpp"] == 1 else "interleaved_1f1b",
        micro_batch=micro,
        global_batch=micro * count * ranks if micro and count and ranks else None,
        sequence_length=raw.optional("seq_len"),
        precision="fp8" if eight else kind,
        optimizer_sharding=("none", "zero1", "zero2", "zero3")[min(zero, 3)],
        shard_size=0,
        sequence_parallel=tensor > 1 and shared,
        context_algorithm="none" if found["cp"] == 1 else "all_to_all" if algorithm == "a2a" else "ring",
        recompute=mode if layers else "none",
        recompute_modules=modules if mode == "selective" and layers else (),
        recompute_count=layers if mode == "full" and layers < ALL else 0,
        overlap_gradients=reduces and ranks > 1,
    )
    raw.pass_over("meshwright")
    return ReadConfig(config=config, not_read=raw.unread())


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules of SimuMax across fields."""
    if config.dp:
        yield from divides(KEYS["ep"], config.ep or 1, config.dp, "data-parallel ranks")


SIMUMAX = ExchangeFormat(
    name="simumax",
    version=VERSION,
    suffix=".json",
    also_silent=frozenset({"recompute_modules"}),
    keys=KEYS,
    write=write,
    read=read,
    recognises=lambda name, text: text.lstrip().startswith("{") and '"world_size"' in text and '"tp_size"' in text,
    rules=rules,
    timed_as="megatron_core",
)
