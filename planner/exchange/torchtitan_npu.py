"""torchtitan-npu: torchtitan 0.2.2 on Ascend, whose TOML file has keys of its own beside torchtitan's.

They stand in ``torchtitan_npu/config/custom_config.py`` of 0.2.2.post2: attention over context ranks by all-to-all, and
optimizer states on the host without the parameters. Products in 8 bits are torchtitan's keys with kernels of Ascend 950
(``converters/quant_converter.py``). In a pipeline it lets go of parameters after every backward pass
(``patches/torch/pipelining.py``), so that ZeRO level 2 is none there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from planner.exchange import torchtitan
from planner.exchange.formats import ExchangeFormat, ReadConfig, Violation, Written
from planner.exchange.training_config import TrainingConfig
from simulator.errors import InputError

VERSION = "0.2.2.post2"
LINEAR, GROUPED = "quantize.linear.mx", "quantize.grouped_mm.mx"
MODULE, CONVERTERS = "job.custom_config_module", "model.converters"
ALL_TO_ALL, BALANCER = "parallelism.enable_custom_context_parallel", "parallelism.context_parallel_load_balancer"
SWAPPED, VIRTUAL, SIZE = (
    f"optimizer.{name}" for name in ("swap_optimizer", "virtual_optimizer", "virtual_optimizer_size")
)
READ = frozenset(
    (
        *(MODULE, CONVERTERS, ALL_TO_ALL, BALANCER, SWAPPED, VIRTUAL, SIZE),
        *(f"{LINEAR}.recipe_name", f"{GROUPED}.recipe_name", f"{GROUPED}.fqns"),
    )
)
MODEL = "deepseek_v3"
"""The model of torchtitan-npu that has attention by all-to-all."""


def write(config: TrainingConfig) -> Written:
    """The TOML file."""
    found: dict[str, Any] = {MODULE: "torchtitan_npu.config.custom_config"}
    comments = [f"# A plan of Meshwright for torchtitan-npu {VERSION}: put these keys into your job's file."]
    if config.precision == "fp8":
        kinds = [LINEAR, *([GROUPED] if (config.ep or 1) > 1 else [])]
        found |= {CONVERTERS: kinds, **{f"{kind}.recipe_name": "mxfp8" for kind in kinds}}
        if GROUPED in kinds:
            found[f"{GROUPED}.fqns"] = ["experts"]
    if config.offload_optimizer and not config.offload_parameters:
        found[SWAPPED] = True
    if config.context_algorithm == "all_to_all":
        found[ALL_TO_ALL] = True
        comments.append(f"# Attention by all-to-all is that of its {MODEL}; other models pass the key over.")
    elif (config.cp or 1) > 1:
        found[BALANCER] = "headtail"
    if config.tensor_overlap:
        comments.append(f"# {CONVERTERS} needs npu_bypass_triton_codegen as well, unless the model is a DeepSeek.")
    return torchtitan.toml({**found, **torchtitan.values(config, torchtitan.OLD)}, config, comments)


def read(text: str, source: str) -> ReadConfig:
    """Read a TOML file, or what torchtitan's format reads beside it."""
    raw = torchtitan.raw_values(text, source)
    known = torchtitan.read(text, source)
    config, notes = known.config, list(known.notes)
    changes: dict[str, Any] = {}
    if raw.get(ALL_TO_ALL) and (config.cp or 1) > 1:
        model = raw.get("model.name", MODEL)
        if model == MODEL:
            changes["context_algorithm"] = "all_to_all"
        else:
            notes.append(f"{ALL_TO_ALL}: {model} has no attention by all-to-all; counted as a ring")
    if raw.get(SWAPPED) or raw.get(VIRTUAL):
        changes["offload_optimizer"] = True
        if raw.get(SIZE, "all") != "all":
            notes.append(f"{SIZE} = {raw[SIZE]!r}: all optimizer states are counted on the host")
    converters = [str(name) for name in _converters(raw, source)]
    if any(name.startswith("quantize.") for name in converters):
        changes["precision"] = "fp8"
    if (config.pp or 1) > 1 and config.optimizer_sharding == "zero2":
        changes["optimizer_sharding"] = "zero3"
    return replace(
        known,
        config=replace(config, **changes),
        not_read=tuple(key for key in known.not_read if key not in READ),
        violations=(*known.violations, *_broken(raw, changes, converters)),
        notes=tuple(notes),
    )


def _converters(raw: Mapping[str, Any], source: str) -> list[Any]:
    found = raw.get(CONVERTERS, [])
    if not isinstance(found, list):
        raise InputError(f"{source}: {CONVERTERS} = {found!r:.60} is no list of names; correct it")
    return found


def _broken(raw: Mapping[str, Any], said: Mapping[str, Any], converters: Sequence[str]) -> Iterator[Violation]:
    """Rules that show in the keys alone."""
    if raw.get(SWAPPED) and raw.get(VIRTUAL):
        rule, remedy = "states are swapped or virtual, not both", f"leave out {SWAPPED} or {VIRTUAL}"
        yield Violation(VIRTUAL, "true", rule, remedy)
    if raw.get(VIRTUAL) and raw.get(SIZE) is None:
        rule, remedy = f"{VIRTUAL} needs it", 'use "all", or a size'
        yield Violation(SIZE, "", rule, remedy)
    if said.get("context_algorithm") == "all_to_all" and raw.get(BALANCER):
        rule = "it deals the sequence out for a ring, and attention by all-to-all needs its order"
        yield Violation(BALANCER, str(raw[BALANCER]), rule, "leave it out")
    for kind in (LINEAR, GROUPED):
        recipe = raw.get(f"{kind}.recipe_name", "mxfp8")
        if kind in converters and recipe not in ("mxfp8", "hif8"):
            rule = "kernels are those of mxfp8 and hif8"
            yield Violation(f"{kind}.recipe_name", str(recipe), rule, "use one of them")


def rules(config: TrainingConfig) -> Iterator[Violation]:
    """Rules across fields: torchtitan's, of which swapped states are free, and one of products in 8 bits."""
    together = bool(config.offload_optimizer and config.offload_parameters)
    yield from torchtitan.rules(replace(config, offload_optimizer=together), era=torchtitan.OLD)
    if config.precision == "fp8" and config.tensor_overlap and (config.tp or 1) > 1:
        yield Violation(
            torchtitan.KEYS["tensor_overlap"],
            "true",
            "it needs torch.compile, which takes no products in 8 bits on tensor ranks",
            "plan with --pin tensor_overlap=false, or with --precision bf16",
        )


TORCHTITAN_NPU = ExchangeFormat(
    name="torchtitan-npu",
    version=VERSION,
    suffix=".toml",
    also_silent=torchtitan.TORCHTITAN.also_silent,
    keys={**torchtitan.KEYS, "context_algorithm": ALL_TO_ALL, "offload_optimizer": SWAPPED, "precision": CONVERTERS},
    write=write,
    read=read,
    recognises=lambda name, text: torchtitan.TORCHTITAN_OLD.recognises(name, text) and "torchtitan_npu" in text,
    rules=rules,
)
