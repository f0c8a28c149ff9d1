"""A configuration file in MindFormers' style, translated into a context, pins and options of ``plan``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.exchange.mindspore.context import AutoParallelContext
from planner.exchange.mindspore.exchange import exchange_of
from planner.exchange.mindspore.keys import KEYS
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
    SECTIONS,
)
from planner.exchange.mindspore.requests import pins_of, searched_mode
from planner.plans.exchange import Exchange
from planner.plans.request import COPIES
from simulator.checks import Check, boolean, choice, integer, unknown
from simulator.errors import ContextError, UnsupportedError

OTHER_CONFIG = ("use_seq_parallel", "vocab_emb_dp", "context_parallel_algo", "gradient_aggregation_group")
ALGORITHMS: Mapping[str, str] = {"colossalai_cp": "ring", "ulysses_cp": "all_to_all"}


@dataclass(frozen=True, kw_only=True)
class Translated:
    """What a file says.

    ``options`` are options of ``plan`` that stand in the file, ``pins`` what its keys pin; ``configured`` where all
    degrees are (semi-automatic mode); ``vocabulary_cut`` says whether the table of tokens is cut along its vocabulary,
    None for nothing said.
    ``layers`` are settings layer by layer, ``notes`` say what was not read.
    """

    options: Mapping[str, Any]
    context: AutoParallelContext
    pins: Mapping[str, str]
    configured: bool = False
    vocabulary_cut: bool | None = None
    layers: LayerSettings = field(default_factory=LayerSettings)
    notes: tuple[str, ...] = field(default=())

    @property
    def parallel_mode(self) -> str:
        """As `PlanRequest` has it: what is configured degree by degree is searched with these pinned."""
        return "auto_parallel" if self.configured else searched_mode(self.context)

    @property
    def search_mode(self) -> str | None:
        """As `PlanRequest` has it, None where the mode does not read it."""
        return str(self.context.get("search_mode")) if self.context.counts("search_mode") else None

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
        context = self._searched
        counts = context.counts("strategy_ckpt_load_file")
        return str(context.get("strategy_ckpt_load_file")) if counts else ""


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
    read = {*options, *(["model"] if parallel and MODEL_KEYS & model.keys() else [])}
    not_read = [name for name in document if name in SECTIONS and name not in read]
    notes = [f"not read, for they say nothing of the plan: {', '.join(not_read)}"] if not_read else []
    if not parallel:
        said = [
            name
            for name in MARKS
            if name in document and name not in ("use_parallel", "recompute_config", "swap_config")
        ]
        notes += [f"use_parallel is False: {', '.join(said)} are not read"] if said else []
        context = AutoParallelContext(parallel_mode="stand_alone")
        pins = _recompute(document, {})
        layers = layer_settings({}, _section(document, "recompute_config"), {}, _section(document, "swap_config"))
        return Translated(options=options, context=context, pins=pins, layers=layers, notes=tuple(notes))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        context = _context(_section(document, "parallel"))
    notes += [str(warning.message) for warning in found]
    config = _section(document, "parallel_config")
    configured = context.get("parallel_mode") == "semi_auto_parallel"
    pins, more = _degrees(config, configured)
    pins = _joined(pins, pins_of(context))
    interleave: Check = integer(1)
    number = model.get("pp_interleave_num")
    if (chunks := interleave("model.model_config.pp_interleave_num", 1 if number is None else number)) > 1:
        pins["vpp"] = str(chunks)
    return Translated(
        options=options,
        context=context,
        pins={**_recompute(document, pins), **_copies(document)},
        configured=configured,
        vocabulary_cut=not config["vocab_emb_dp"] if "vocab_emb_dp" in config else None,
        layers=layer_settings(config, _section(document, "recompute_config"), model, _section(document, "swap_config")),
        notes=(*notes, *more),
    )


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


def _degrees(config: Mapping[str, Any], configured: bool) -> tuple[dict[str, str], list[str]]:
    """Pins of ``parallel_config``; where every degree is configured, one that is not said is 1."""
    pins: dict[str, str] = dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep"), "1") if configured else {}
    notes: list[str] = []
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
        elif name == "gradient_aggregation_group":
            pass  # a setting of layers: see `layer_settings`
        elif name in LATER_CONFIG:
            _refuse(key, value, LATER_CONFIG[name])
        else:
            known = (*DEGREES, *OTHER_CONFIG, *LATER_CONFIG)
            raise ContextError(f"parallel_config has {unknown(name, known)}")
    if "micro_batches" in pins and config.get("pipeline_stage", 1) == 1:
        count = pins.pop("micro_batches")
        notes.append(f"parallel_config.micro_batch_num={count} is not read: pipeline_stage is 1")
    return pins, notes


def _recompute(document: Mapping[Any, Any], pins: dict[str, str]) -> dict[str, str]:
    """Pins, with those of ``recompute_config``; what it says of single layers is for `layer_settings`."""
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
    found = {**pins, **_sliced(section, pins, again), **_gathered_again(section, pins)}
    key = "recompute_config.mp_comm_recompute"
    sent = boolean(key, True if section.get("mp_comm_recompute") is None else section["mp_comm_recompute"])
    if said_by_layer(section) or (whole is None and part is None):
        return found
    found["recompute"] = "full" if whole else "selective" if part else "none"
    if again and not (whole and sent) and not section.get("select_comm_recompute"):
        found["recompute_messages"] = "false"
    return found


def _sliced(section: Mapping[str, Any], pins: Mapping[str, str], again: bool) -> dict[str, str]:
    """What layers that compute again keep is cut over model-parallel ranks where sequences are."""
    key = "recompute_config.recompute_slice_activation"
    if not boolean(key, section.get("recompute_slice_activation") or False):
        return {}
    if not again:
        raise ContextError(f"{key}=True, and nothing computes again; set recompute=True, or leave it out")
    if pins.get("sequence_parallel") == "false":
        raise ContextError(
            f"{key}=True and parallel_config.use_seq_parallel=False contradict each other: what layers keep is cut "
            "over model-parallel ranks along the sequence; set use_seq_parallel=True, or leave one of them out"
        )
    return {"sequence_parallel": "true"} if pins.get("tp") != "1" else {}


def _gathered_again(section: Mapping[str, Any], pins: Mapping[str, str]) -> dict[str, str]:
    """Whether sharded parameters are gathered once more for the backward pass: so they are with zero3, and only so."""
    key = "recompute_config.parallel_optimizer_comm_recompute"
    if not boolean(key, section.get("parallel_optimizer_comm_recompute") or False):
        return {}
    level = pins.get("optimizer_sharding", "zero3")
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
    if str(document[key]) not in COPIES:
        raise UnsupportedError(
            f"{key}={document[key]} is not supported yet: micro-batches are run whole or in {COPIES[-1]} copies; use "
            f"{' or '.join(COPIES)}"
        )
    return {"copies": str(document[key])}


def _model(model: Any) -> Mapping[str, Any]:
    config = model.get("model_config") if isinstance(model, dict) else None
    return {str(key): value for key, value in config.items()} if isinstance(config, dict) else {}
