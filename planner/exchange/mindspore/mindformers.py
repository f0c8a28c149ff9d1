"""A configuration file in MindFormers' style, translated into a context, pins and options of ``plan``."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.exchange.mindspore.context import KEYS, AutoParallelContext
from planner.exchange.mindspore.layers import LayerSettings, layer_settings, said_by_layer
from planner.exchange.mindspore.mindformers_keys import (
    DEGREES,
    LATER_CONFIG,
    LATER_PARALLEL,
    LATER_RECOMPUTE,
    MARKS,
    MODEL_KEYS,
    MODES,
    OPTIONS,
    RECOMPUTE_KEYS,
    SCHEDULERS,
    SECTIONS,
    SPLITTING,
)
from planner.exchange.mindspore.requests import exchange_of, pins_of, searched_mode
from planner.networks.mindformers_config import transformers_config
from planner.plans.exchange import Exchange
from simulator.checks import Check, boolean, choice, integer, unknown
from simulator.errors import ContextError, UnsupportedError

OTHER_CONFIG = (
    *("optimizer_shard", "seq_split_num", "use_seq_parallel", "vocab_emb_dp", "context_parallel_algo"),
    "gradient_aggregation_group",
)
_READ_ALONE = ("use_parallel", "recompute_config", "swap_config")
"""Sections that count without parallelism as well."""
ALGORITHMS: Mapping[str, str] = {"colossalai_cp": "ring", "ulysses_cp": "all_to_all"}


@dataclass(frozen=True, kw_only=True)
class Translated:
    """What a file says.

    ``options`` are options of ``plan`` that stand in the file, ``pins`` what its keys pin; ``configured`` where all
    degrees are (semi-automatic mode); ``vocabulary_cut`` says whether the table of tokens is cut along its vocabulary,
    None for nothing said.
    ``layers`` are settings layer by layer, ``not_read`` are sections that say nothing of the plan, ``notes`` say what
    was not read or has no effect.
    """

    options: Mapping[str, Any]
    context: AutoParallelContext
    pins: Mapping[str, str]
    configured: bool = False
    vocabulary_cut: bool | None = None
    layers: LayerSettings = field(default_factory=LayerSettings)
    not_read: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def parallel_mode(self) -> str:
        """As `PlanRequest` has it: what is configured degree by degree is searched with these pinned."""
        return "auto_parallel" if self.configured else searched_mode(self.context)

    @property
    def search_mode(self) -> str | None:
        """As `PlanRequest` has it, None where the mode does not read it."""
        found: str | None = self.context.counted("search_mode")
        return found

    @property
    def devices(self) -> int | None:
        """Devices that the file names."""
        if self.context.get("parallel_mode") == "stand_alone":
            return 1
        return int(self.context.get("device_num")) if self.context.is_set("device_num") else None

    @property
    def _searched(self) -> AutoParallelContext:
        """The context, in the mode in which it is searched."""
        if not self.configured:
            return self.context
        context = self.context.copy()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            context.set(parallel_mode="auto_parallel")
        return context

    @property
    def exchange(self) -> Exchange:
        """What the keys of ``parallel`` say of messages, gradients and data."""
        return exchange_of(self._searched)

    @property
    def stored(self) -> str:
        """Strategy file that the plan is read from; empty where it is searched."""
        return str(self._searched.counted("strategy_ckpt_load_file", ""))


def is_mindformers(document: Mapping[Any, Any]) -> bool:
    """Whether a file has a section that only MindFormers' files have."""
    return any(name in document for name in MARKS)


def translate(document: Mapping[Any, Any]) -> Translated:
    """Translate a file.

    Raises
    ------
    ContextError
        A key is unknown, a value is wrong, or values contradict each other.
    UnsupportedError
        A key has a value other than its default, and nothing follows it yet.
    """
    for name in document:
        if name not in (*MARKS, *OPTIONS, *SECTIONS):
            raise ContextError(f"there is {unknown(str(name), (*MARKS, *OPTIONS, *SECTIONS))}")
    options = {name: value for name, value in document.items() if name in OPTIONS and not isinstance(value, dict)}
    model, parallel = _model(document.get("model")), boolean("use_parallel", document.get("use_parallel", True))
    sized = parallel and bool(MODEL_KEYS & model.keys() or transformers_config(document))
    read = {*options, *(["model"] if sized else [])}
    not_read = [name for name in document if name in SECTIONS and name not in read]
    notes = [f"not read, for they say nothing of the plan: {', '.join(not_read)}"] if not_read else []
    if not parallel:
        said = [name for name in MARKS if name in document and name not in _READ_ALONE]
        notes += [f"use_parallel is False: {', '.join(said)} are not read"] if said else []
        context = AutoParallelContext(parallel_mode="stand_alone")
        pins = _recompute(document, {}, notes)
        layers = layer_settings({}, _section(document, "recompute_config"), {}, _section(document, "swap_config"))
        return Translated(options=options, context=context, pins=pins, layers=layers, notes=tuple(notes))
    config, recompute = _section(document, "parallel_config"), _section(document, "recompute_config")
    section = _one_spelling(_section(document, "parallel"), config, notes)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        context = _context(section)
    notes += [str(warning.message) for warning in found]
    configured = context.get("parallel_mode") == "semi_auto_parallel"
    pins = _joined(_degrees(config, configured, notes), pins_of(context))
    interleave: Check = integer(1)
    number = model.get("pp_interleave_num")
    chunks = interleave("model.model_config.pp_interleave_num", 1 if number is None else number)
    if chunks > 1 and pins.get("pp") != "1":
        pins["vpp"] = str(chunks)
    pins |= _scheduled(section.get("pipeline_config"), config, pins, notes)
    pins = _recompute(document, pins, notes)
    if configured:
        pins = _with_effect(pins, notes)
    layers = layer_settings(config, recompute, model, _section(document, "swap_config"))
    stated = _stated(document, pins)
    sections = {"runner_config"} if "global_batch" in stated else set()
    sections |= {"model"} if {"seq_len", "precision"} & stated.keys() else set()
    return Translated(
        options={**stated, **options},
        context=context,
        pins={**pins, **_copies(document)},
        configured=configured,
        vocabulary_cut=not config["vocab_emb_dp"] if "vocab_emb_dp" in config else None,
        layers=layers,
        not_read=tuple(name for name in not_read if name not in sections),
        notes=(*notes, *layers.notes),
    )


def _one_spelling(parallel: dict[str, Any], config: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """The section ``parallel`` with older and newer keys as those that they mean, without what has no effect."""
    if config.get("optimizer_shard") is not None:
        shard = boolean("parallel_config.optimizer_shard", config["optimizer_shard"])
        if parallel.setdefault("enable_parallel_optimizer", shard) != shard:
            notes.append(f"parallel_config.optimizer_shard={shard} is not read: parallel.enable_parallel_optimizer is")
    if parallel.get("enable_parallel_optimizer") is False and parallel.get("parallel_optimizer_config"):
        del parallel["parallel_optimizer_config"]
        notes.append("parallel.parallel_optimizer_config has no effect: enable_parallel_optimizer is False")
    files = parallel.pop("strategy_ckpt_config", None)
    if files is not None:
        known = {"save_file": "strategy_ckpt_save_file", "load_file": "strategy_ckpt_load_file"}
        for name, value in _section({"parallel.strategy_ckpt_config": files}, "parallel.strategy_ckpt_config").items():
            if name in known:
                parallel.setdefault(known[name], value)
            elif name != "only_trainable_params":
                raise ContextError(
                    f"parallel.strategy_ckpt_config has {unknown(name, (*known, 'only_trainable_params'))}"
                )
    rows = parallel.get("dataset_strategy")
    ranks = config.get("data_parallel", 1)
    if isinstance(rows, list) and rows and all(isinstance(row, list) and row for row in rows):
        usual = all(row[0] in (1, ranks) and all(number == 1 for number in row[1:]) for row in rows)
        if usual and len({row[0] for row in rows}) == 1 and len({len(row) for row in rows}) + len(rows) > 3:
            del parallel["dataset_strategy"]
            notes.append(
                f"parallel.dataset_strategy cuts each of {len(rows)} columns along the batch, as the plan does"
            )
    return parallel


def _scheduled(section: Any, config: Mapping[str, Any], pins: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """Pins of the pipeline's schedule; what of it no plan follows is added to `notes`."""
    found: dict[str, str] = {}
    split = integer(1)("parallel_config.seq_split_num", config.get("seq_split_num", 1))
    if section is not None:
        key = "parallel.pipeline_config"
        said = _section({key: section}, key)
        for name in said:
            if name not in ("pipeline_interleave", "pipeline_scheduler"):
                raise ContextError(f"{key} has {unknown(name, ('pipeline_interleave', 'pipeline_scheduler'))}")
        boolean(f"{key}.pipeline_interleave", said.get("pipeline_interleave", False))
        name = choice(*SCHEDULERS, *SPLITTING)(f"{key}.pipeline_scheduler", said.get("pipeline_scheduler", "1f1b"))
        schedule = SCHEDULERS.get(name, "1f1b")
        if schedule == "1f1b" and pins.get("vpp", "1") != "1":
            schedule = "interleaved_1f1b"
        if pins.get("pp", "1") != "1":
            found["schedule"] = schedule
            notes += [f"{key}.pipeline_scheduler={name} is planned as {schedule}"] if name in SPLITTING else []
    if split > 1:
        notes.append(f"parallel_config.seq_split_num={split} is not followed: stages pass on whole sequences")
    return found


def _with_effect(pins: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Pins of degrees that are all given, without those that have no effect at them, which become notes."""
    degree = {name: int(pins.get(name, "1")) for name in ("dp", "tp", "ep")}
    if degree["tp"] == 1 and pins.get("sequence_parallel") == "true":
        pins = {name: text for name, text in pins.items() if name != "sequence_parallel"}
        notes.append("parallel_config.use_seq_parallel has no effect: model_parallel is 1")
    if degree["ep"] > degree["dp"] and degree["tp"] > 1 and degree["ep"] % degree["tp"] == 0:
        # Experts are dealt out over data-parallel and model-parallel ranks together.
        degree["ep"] //= degree["tp"]
        pins = {**pins, "ep": str(degree["ep"]), "expert_cut": "whole"}
    replicas = degree["dp"] // degree["ep"] if degree["dp"] % degree["ep"] == 0 else degree["dp"]
    of_states = ("optimizer_sharding", "sharding_threshold_kb", "shard_size")
    if replicas == 1 and pins.get("optimizer_sharding", "none") != "none":
        pins = {name: text for name, text in pins.items() if name not in of_states}
        notes.append("parallel.enable_parallel_optimizer has no effect: parameters have one replica")
    elif int(pins.get("shard_size", "0")) > replicas:
        notes.append(f"optimizer_weight_shard_size={pins['shard_size']} is read as the {replicas} replicas there are")
        pins = {name: text for name, text in pins.items() if name != "shard_size"}
    return pins


_NATURAL = re.compile(r"[1-9][0-9]{0,11}")
PRECISIONS: Mapping[str, str] = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def _stated(document: Mapping[Any, Any], pins: Mapping[str, str]) -> dict[str, Any]:
    """Options of ``plan`` that a whole training file states: length of samples, precision and samples of a step."""
    model, found = _model(document.get("model")), {}
    if isinstance(model.get("seq_length"), int):
        found["seq_len"] = model["seq_length"]
    computed = str(model.get("compute_dtype"))
    if computed in PRECISIONS:
        found["precision"] = PRECISIONS[computed]
    said = document.get("runner_config")
    runner: dict[str, Any] = said if isinstance(said, dict) else {}
    size = runner.get("batch_size")
    if isinstance(size, int) and "dp" in pins:
        copies = document.get("micro_batch_interleave_num", 1)
        again = runner.get("gradient_accumulation_steps", 1) if pins.get("pp") == "1" else pins.get("micro_batches", 1)
        if all(_NATURAL.fullmatch(str(number)) for number in (size, copies, again)):
            found["global_batch"] = size * int(pins["dp"]) * int(copies) * int(again)
            found["pin"] = {"micro_batch": size * int(copies)} if pins.get("pp") == "1" else {}
    return found


def _section(document: Mapping[Any, Any], name: str) -> dict[str, Any]:
    value = document.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ContextError(
            f"{name}={value!r} is of type {type(value).__name__}; it must be a mapping of keys to values"
        )
    return {str(key): item for key, item in value.items()}


def _context(section: Mapping[str, Any]) -> AutoParallelContext:
    keys: dict[str, Any] = {"parallel_mode": "semi_auto_parallel"}
    for name, value in section.items():
        if name == "parallel_mode":
            keys[name] = _mode(value)
        elif name in KEYS:
            keys[name] = _tuples(value) if name == "dataset_strategy" else value
        elif name == "pipeline_config":
            pass  # a schedule: see `_scheduled`
        elif name in LATER_PARALLEL:
            _refuse(f"parallel.{name}", value, LATER_PARALLEL[name])
        else:
            raise ContextError(f"parallel has {unknown(name, (*KEYS, *LATER_PARALLEL))}")
    return AutoParallelContext(**keys)


def _mode(value: Any) -> str:
    names = tuple(MODES.values())
    if isinstance(value, int) and not isinstance(value, bool):
        if value not in MODES:
            said = ", ".join(f"{number} {name}" for number, name in MODES.items())
            raise ContextError(f"parallel.parallel_mode={value} is none of {said}; use one of them")
        return MODES[value]
    lowered = value.lower() if isinstance(value, str) else value
    return str(choice("stand_alone", *names)("parallel.parallel_mode", lowered))


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _degrees(config: Mapping[str, Any], configured: bool, notes: list[str]) -> dict[str, str]:
    """Pins of ``parallel_config``; where every degree is configured, one that is not said is 1."""
    pins: dict[str, str] = dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep"), "1") if configured else {}
    for name, value in config.items():
        key = f"parallel_config.{name}"
        if name in DEGREES:
            pins[DEGREES[name]] = str(integer(1)(key, value))
        elif name == "use_seq_parallel":
            pins["sequence_parallel"] = str(boolean(key, value)).lower()
        elif name == "vocab_emb_dp":
            boolean(key, value)
        elif name == "context_parallel_algo":
            algorithm = choice(*ALGORITHMS, "hybrid_cp")(key, value)
            if algorithm not in ALGORITHMS:
                raise UnsupportedError(f"{key}={value!r} is not supported yet; use {' or '.join(ALGORITHMS)}")
            if config.get("context_parallel", 1) != 1:
                pins["context_algorithm"] = ALGORITHMS[algorithm]
        elif name in ("gradient_aggregation_group", "optimizer_shard", "seq_split_num"):
            pass  # see `layer_settings`, `_one_spelling` and `_scheduled`
        elif name in LATER_CONFIG:
            _refuse(key, value, LATER_CONFIG[name])
        else:
            known = (*DEGREES, *OTHER_CONFIG, *LATER_CONFIG)
            raise ContextError(f"parallel_config has {unknown(name, known)}")
    if "micro_batches" in pins and config.get("pipeline_stage", 1) == 1:
        count = pins.pop("micro_batches")
        notes.append(f"parallel_config.micro_batch_num={count} is not read: pipeline_stage is 1")
    return pins


def _recompute(document: Mapping[Any, Any], pins: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Pins, with those of ``recompute_config``; what it says of single layers is for `layer_settings`.

    What has no effect is added to `notes`.
    """
    section = _section(document, "recompute_config")
    for name, value in section.items():
        if name in LATER_RECOMPUTE:
            _refuse(f"recompute_config.{name}", value, LATER_RECOMPUTE[name])
        elif name not in RECOMPUTE_KEYS:
            raise ContextError(f"recompute_config has {unknown(name, (*RECOMPUTE_KEYS, *LATER_RECOMPUTE))}")
    whole, part = section.get("recompute"), section.get("select_recompute")
    if whole is True and part:
        raise ContextError(
            f"recompute_config.recompute=True and select_recompute={part!r} contradict each other: layers are "
            "recomputed whole or in part; set one of them to False"
        )
    again = bool(whole or part)
    if section.get("select_comm_recompute") and not again:
        raise UnsupportedError(
            f"recompute_config.select_comm_recompute={section['select_comm_recompute']!r} is not supported yet where "
            "nothing else computes again: messages are sent again where a layer computes again; set recompute or "
            "select_recompute as well, or leave it out"
        )
    found = {**pins, **_sliced(section, pins, again, notes), **_gathered_again(section, pins, notes)}
    key = "recompute_config.mp_comm_recompute"
    sent = boolean(key, True if section.get("mp_comm_recompute") is None else section["mp_comm_recompute"])
    if said_by_layer(section) or (whole is None and part is None):
        return found
    found["recompute"] = "full" if whole else "selective" if part else "none"
    if again and not (whole and sent) and not section.get("select_comm_recompute"):
        found["recompute_messages"] = "false"
    return found


def _sliced(section: Mapping[str, Any], pins: Mapping[str, str], again: bool, notes: list[str]) -> dict[str, str]:
    """What layers that compute again keep is cut over model-parallel ranks where sequences are."""
    key = "recompute_config.recompute_slice_activation"
    if not boolean(key, section.get("recompute_slice_activation") or False):
        return {}
    if not again:
        notes.append(f"{key} has no effect: nothing computes again")
    elif pins.get("tp") == "1":
        notes.append(f"{key} has no effect: model_parallel is 1")
    elif pins.get("sequence_parallel") == "false":
        notes.append(f"{key} is not followed: use_seq_parallel is False, and ranks of the plan keep the whole of it")
    else:
        return {"sequence_parallel": "true"}
    return {}


def _gathered_again(section: Mapping[str, Any], pins: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """Whether sharded parameters are gathered once more for the backward pass: so they are with zero3, and only so."""
    key = "recompute_config.parallel_optimizer_comm_recompute"
    if not boolean(key, section.get("parallel_optimizer_comm_recompute") or False):
        return {}
    level = pins.get("optimizer_sharding", "zero3")
    if level == "none":
        notes.append(f"{key} has no effect: the parallel optimizer is off")
        return {}
    if level != "zero3":
        raise UnsupportedError(
            f"{key}=True is not supported yet with optimizer_sharding={level}: parameters are gathered again for the "
            "backward pass at optimizer_level level3, which stores them in shards; set parallel_optimizer_config: "
            "{optimizer_level: level3}, or leave it out"
        )
    return {"optimizer_sharding": "zero3"}


def _joined(first: dict[str, str], second: Mapping[str, str]) -> dict[str, str]:
    for name, text in second.items():
        if first.get(name, text) != text:
            raise ContextError(
                f"parallel says {name}={text}, parallel_config {name}={first[name]}; leave one of them out"
            )
    return {**first, **second}


def _refuse(key: str, value: Any, default: Any) -> None:
    if value is not None and (value != default or isinstance(value, bool) != isinstance(default, bool)):
        raise UnsupportedError(f"{key}={value!r} is not supported yet; leave it out, its default is {default!r}")


def _copies(document: Mapping[Any, Any]) -> dict[str, str]:
    key: str = "micro_batch_interleave_num"
    whole: Check = integer(1)
    if key not in document or whole(key, document[key]) == 1:
        return {}
    if document[key] > 2:
        raise UnsupportedError(
            f"{key}={document[key]} is not supported yet: micro-batches are run whole or in 2 copies; use 1 or 2"
        )
    return {"copies": str(document[key])}


def _model(model: Any) -> Mapping[str, Any]:
    config = model.get("model_config") if isinstance(model, dict) else None
    return {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}
