"""What a user asks for: the request for a plan, checked at the edge."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from planner.graph.experts import check_imbalance
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.pins import AXES_BY_PIN, FREE, Pins
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.networks.marks import Marks
    from planner.networks.network import Network
    from planner.plans.hints import Hint

Precision = Literal["fp64", "fp32", "fp16", "bf16", "fp8", "fp4"]
OptimizerName = Literal["adamw", "adam", "momentum", "sgd", "lamb"]
SearchMode = Literal["dynamic_programming", "recursive_programming", "sharding_propagation"]
ParallelMode = Literal["stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel"]
PRECISIONS: Mapping[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp4": "float4_e2m1fn",
}
SEARCH_MODES: tuple[str, ...] = get_args(SearchMode)
PARALLEL_MODES: tuple[str, ...] = get_args(ParallelMode)
BY_SAMPLES = ("data_parallel", "hybrid_parallel")
"""Modes that cut nothing but the batch."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The fields that requests for a plan and for a sweep have in common; None leaves a choice to the defaults.

    ``pins`` fix dimensions of the search. ``software`` is a name of `planner.cost.software`, ``attention`` one of
    `planner.graph.attention` and ``norms`` one of `planner.graph.norms`: how attention and root-mean-square norms run;
    the usual software, fused attention and norms as the software has them where nothing is said. The
    busiest rank of experts gets ``expert_imbalance`` times an even share of the tokens. ``memory_headroom`` is the part
    of a device's usable memory that a plan leaves free.
    """

    network: str | Network
    global_batch: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    search_mode: str = "dynamic_programming"
    parallel_mode: str = "auto_parallel"
    pins: Pins = FREE
    software: str = ""
    attention: str = ""
    norms: str = ""
    expert_imbalance: float = 1.0
    memory_headroom: float = 0.0

    def __post_init__(self) -> None:
        check_imbalance(self.expert_imbalance)

    def shared(self) -> dict[str, Any]:
        """The fields of this class, by name."""
        return {one.name: getattr(self, one.name) for one in fields(Request)}


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Request):
    """One network, one cluster, and what the user fixed.

    ``hints`` fix placements of operators. Without ``sensitivity`` it is not said what memory, links and pins are worth.
    ``exchange`` is how tensors travel: plans are simulated and ranked with it, the closed form of the search knows the
    type of gradients, whole sums and samples of a rank's own alone. ``marks`` of modules come before those that the
    network's code has. With ``any_plan`` more is searched than the software can run.
    """

    hardware: str
    devices: int
    hints: tuple[Hint, ...] = ()
    top: int = 5
    sensitivity: bool = True
    exchange: Exchange = UNASKED
    marks: Marks | None = None
    any_plan: bool = False


def one_of(value: str, known: Iterable[str], what: str) -> str:
    """Return `value` if it is known, else raise InputError with the known ones and the nearest."""
    names = tuple(known)
    if value not in names:
        near = difflib.get_close_matches(value.lower(), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{what} {value!r} is not one of {', '.join(names)}{hint}")
    return value


def checked_pins(request: PlanRequest) -> Pins:
    """The pins of a request, and those that its modes and software add.

    Raises
    ------
    InputError
        If a mode is unknown, or pins contradict the mode, the devices or each other.
    """
    one_of(request.search_mode, SEARCH_MODES, "search mode")
    one_of(request.parallel_mode, PARALLEL_MODES, "parallel mode")
    if request.parallel_mode == "stand_alone" and request.devices != 1:
        raise InputError(f"parallel mode stand_alone runs on one device, not {request.devices}; use --devices 1")
    pins = request.pins
    if (mode := request.parallel_mode) in BY_SAMPLES:
        for name in ("tp", "pp", "vpp", "cp", "ep"):
            if (getattr(pins, name) or 1) > 1:
                value = getattr(pins, name)
                raise InputError(f"pin {name}={value} contradicts parallel mode {mode}; leave one of them out")
        sharded = pins.optimizer_sharding not in (None, "none")
        if sharded and mode != "hybrid_parallel":
            raise InputError(
                f"pin optimizer_sharding={pins.optimizer_sharding} contradicts parallel mode {mode}, which "
                "replicates parameters; use --parallel-mode auto_parallel --pin tp=1"
            )
        pins = replace(pins, tp=1, pp=1, cp=1, ep=1, batch_only=not sharded)
        pins = pins if sharded else replace(pins, optimizer_sharding="none")
    if pins.recompute == "none" and pins.recompute_messages is False:
        raise InputError(
            "pins recompute=none recompute_messages=false: nothing computes again whose messages could be kept; use "
            "--pin recompute=full or selective, or leave recompute_messages out"
        )
    if pins.recompute_modules is not None:
        if pins.recompute not in (None, "selective"):
            raise InputError(
                f"pins recompute={pins.recompute} recompute_modules={pins.named()['recompute_modules']}: parts of "
                "layers are chosen for selective recomputation alone; use --pin recompute=selective, or leave "
                "recompute_modules out"
            )
        pins = replace(pins, recompute="selective")
    return _layered(_in_copies(_offloaded(_overlapped(_runnable(pins, request)))))


def _layered(pins: Pins) -> Pins:
    """Stages of the layers that are said; InputError where their number or what else is pinned contradicts them."""
    if pins.recompute_layers is not None and pins.recompute is not None:
        raise InputError(
            f"pins recompute={pins.recompute} recompute_layers={pins.recompute_layers}: both say which layers compute "
            "again; leave one of them out"
        )
    if pins.stage_layers is not None:
        chunks, virtual = len(pins.stage_layers), pins.vpp or 1
        if chunks % virtual or chunks // virtual != (pins.pp or chunks // virtual):
            degrees = " ".join(f"{name}={value}" for name, value in (("pp", pins.pp), ("vpp", pins.vpp)) if value)
            raise InputError(
                f"pins {degrees} stage_layers={pins.named()['stage_layers']}: {chunks} numbers of layers are not those "
                f"of {(pins.pp or 1) * virtual} chunks; give one for each of pp x vpp chunks"
            )
        pins = replace(pins, pp=chunks // virtual)
    by_unit = pins.by_unit or pins.recompute_layers is not None or len(pins.stage_layers or ()) > 1
    return replace(pins, by_unit=by_unit)


def _runnable(pins: Pins, request: PlanRequest) -> Pins:
    """Pins that leave what the request's software can run of what is not pinned.

    Where single operators or modules are fixed, what is asked for is not any framework's and nothing is added.
    """
    from planner.plans.capability import capability_of  # loads pydantic, which --help does without

    table = capability_of(request.software) if request.software and not request.any_plan else None
    usual = request.parallel_mode == "auto_parallel" and request.search_mode == "dynamic_programming"
    if table is None or request.hints or not usual:
        return pins
    found = replace(pins, runs=table)
    if found.order is None:
        found = replace(found, order=tuple(AXES_BY_PIN))
    if found.optimizer_sharding != "none" and found.sharding_threshold_kb is None:
        found = replace(found, sharding_threshold_kb=0)
    if found.tensor_cut is None and found.tp != 1:
        found = replace(found, tensor_cut="width")
    if found.sequence_parallel is None and table.sequence_parallel == "never":
        found = replace(found, sequence_parallel=False)
    away = found.offload_to is not None or found.offload_parameters
    if found.offload_optimizer is None and not away and "offload_optimizer" not in table.offload:
        found = replace(found, offload_optimizer=False)
    return found


def _overlapped(pins: Pins) -> Pins:
    """What messages that are to travel beside kernels ask for: of tensor ranks a shared sequence, of experts tokens."""
    if pins.expert_overlap and pins.expert_messages is None:
        pins = replace(pins, expert_messages="tokens")
    return replace(pins, sequence_parallel=True) if pins.tensor_overlap and pins.sequence_parallel is None else pins


def _offloaded(pins: Pins) -> Pins:
    """States away from the device where it is said where to; InputError where they are to stay."""
    given = {"offload_to": pins.offload_to, "offload_parameters": pins.offload_parameters or None}
    name, value = next(((name, value) for name, value in given.items() if value is not None), ("", None))
    if value is None:
        return pins
    if pins.offload_optimizer is False:
        why = "the host updates what it holds" if name == "offload_parameters" else "states that stay go nowhere"
        raise InputError(
            f"pins offload_optimizer=false {name}={str(value).lower()}: {why}; use --pin offload_optimizer=true, or "
            f"leave {name} out"
        )
    return replace(pins, offload_optimizer=True)


def _in_copies(pins: Pins) -> Pins:
    """Plans of the pinned stages, else of one, where micro-batches are run in copies; InputError where none divides."""
    copies = pins.copies or 1
    if copies == 1:
        return pins
    if pins.micro_batch is not None and pins.micro_batch % copies:
        more = pins.micro_batch + copies - pins.micro_batch % copies
        raise InputError(
            f"pins micro_batch={pins.micro_batch} copies={copies}: a micro-batch of {pins.micro_batch} cannot be "
            f"divided into {copies} copies; use --pin micro_batch={more} or copies=1"
        )
    return replace(pins, pp=pins.pp or 1)
