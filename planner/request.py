"""What a user asks for: the request for a plan, checked at the edge."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from simulator.errors import InputError, UnsupportedError

PRECISIONS: Mapping[str, str] = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
SEARCH_MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
PARALLEL_MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch")
NEUTRAL: Mapping[str, tuple[str, ...]] = {
    "sequence_parallel": ("false",),
    "recompute": ("none",),
    "schedule": ("none",),
}
OPTIMIZER_SHARDINGS = ("none", "zero2")

ParameterStorage = Literal["free", "replicated", "sharded"]


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One network, one cluster, and what the user fixed; None leaves a choice to the defaults.

    ``pins`` fix dimensions of the search by name, as text (``{"tp": "8"}``).
    """

    network: str
    hardware: str
    devices: int
    global_batch: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    search_mode: str = "dynamic_programming"
    parallel_mode: str = "auto_parallel"
    pins: Mapping[str, str] = field(default_factory=dict)
    top: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The pins of a request, read: None is free."""

    dp: int | None = None
    tp: int | None = None
    micro_batch: int | None = None
    storage: ParameterStorage = "free"
    batch_only: bool = False


def _one_of(value: str, known: tuple[str, ...], what: str) -> str:
    if value not in known:
        near = difflib.get_close_matches(value, known, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{what} {value!r} is not one of {', '.join(known)}{hint}")
    return value


def _degree(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"pin {name}={text}: {name} must be a positive integer, for example --pin {name}=2")
    return int(text)


def read_pins(request: PlanRequest) -> Pins:
    """Check modes and pins; UnsupportedError for what no search covers yet."""
    _one_of(request.search_mode, SEARCH_MODES, "search mode")
    _one_of(request.parallel_mode, PARALLEL_MODES, "parallel mode")
    if request.search_mode != "dynamic_programming":
        raise UnsupportedError(f"search mode {request.search_mode!r} is not supported yet; use dynamic_programming")
    if request.parallel_mode in ("hybrid_parallel", "semi_auto_parallel"):
        raise UnsupportedError(
            f"parallel mode {request.parallel_mode!r} is not supported yet; use auto_parallel with --pin, "
            "data_parallel or stand_alone"
        )
    if request.parallel_mode == "stand_alone" and request.devices != 1:
        raise InputError(f"parallel mode stand_alone runs on one device, not {request.devices}; use --devices 1")
    degrees: dict[str, int] = {}
    storage: ParameterStorage = "free"
    for name, text in request.pins.items():
        if name in DEGREES:
            degrees[name] = _degree(name, text)
        elif name == "optimizer_sharding":
            storage = _storage(text)
        elif name in NEUTRAL:
            _neutral(name, text)
        else:
            _one_of(name, (*DEGREES, *NEUTRAL, "optimizer_sharding"), "pin")
    for name in ("pp", "vpp", "cp", "ep"):
        if degrees.get(name, 1) > 1:
            raise UnsupportedError(f"pin {name}={degrees[name]}: only {name}=1 is supported yet; leave the pin out")
    if request.parallel_mode == "data_parallel":
        if degrees.get("tp", 1) > 1:
            raise InputError(f"pin tp={degrees['tp']} contradicts parallel mode data_parallel; leave one of them out")
        return Pins(dp=degrees.get("dp"), tp=1, micro_batch=degrees.get("micro_batch"), storage="replicated",
                    batch_only=True)  # fmt: skip
    return Pins(dp=degrees.get("dp"), tp=degrees.get("tp"), micro_batch=degrees.get("micro_batch"), storage=storage)


def _storage(text: str) -> ParameterStorage:
    if text in ("zero1", "zero3"):
        raise UnsupportedError(f"pin optimizer_sharding={text} is not supported yet; use none or zero2")
    _one_of(text, OPTIMIZER_SHARDINGS, "optimizer_sharding")
    return "replicated" if text == "none" else "sharded"


def _neutral(name: str, text: str) -> None:
    if text.lower() not in NEUTRAL[name]:
        raise UnsupportedError(f"pin {name}={text} is not supported yet; leave the pin out ({name}={NEUTRAL[name][0]})")
