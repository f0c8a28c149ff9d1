"""What a user asks for: the request for a plan, checked at the edge."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from planner.plans.exchange import UNASKED, Exchange
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.networks.marks import Marks
    from planner.networks.network import Network
    from planner.plans.capability import Capability
    from planner.plans.hints import Hint

PRECISIONS: Mapping[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp4": "float4_e2m1fn",
}
SEARCH_MODES = ("dynamic_programming", "recursive_programming", "sharding_propagation")
BY_SAMPLES = ("data_parallel", "hybrid_parallel")
"""Modes that cut nothing but the batch."""
PARALLEL_MODES = ("stand_alone", "data_parallel", "hybrid_parallel", "semi_auto_parallel", "auto_parallel")
DEGREES = ("dp", "tp", "pp", "vpp", "cp", "ep", "micro_batch", "micro_batches", "shard_size", "recompute_layers")
WORDS: Mapping[str, tuple[str, ...]] = {
    "recompute": ("none", "selective", "full"),
    "optimizer_sharding": ("none", "zero1", "zero2", "zero3"),
    "schedule": ("none", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipe_v"),
    "context_algorithm": ("none", "ring", "all_to_all"),
    "expert_messages": ("any", "tokens", "once_a_node"),
    "expert_cut": ("any", "width", "whole"),
    "tensor_cut": ("any", "width"),
    "offload_to": ("host", "disk"),
}
FLAGS = (
    *("sequence_parallel", "tensor_overlap", "expert_overlap", "recompute_messages"),
    *("offload_optimizer", "offload_parameters", "offload_activations", "host_embeddings"),
)
SIZES: Mapping[str, tuple[int, int]] = {"bucket_mb": (1, 2**14), "sharding_threshold_kb": (0, 2**24)}
"""Pins that are sizes in MiB or KiB, with the least and the largest."""
COPIES = ("1", "2")
AXES_BY_PIN: Mapping[str, str] = {"pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}
"""Axes of a plan by the pins of their degrees, in the usual order: tensor ranks are neighbours."""
PIN_NAMES = (*DEGREES, *WORDS, *FLAGS, *SIZES, "copies", "order", "stage_layers")

ParameterStorage = Literal["free", "replicated", "sharded"]
_STORAGE: Mapping[str | None, ParameterStorage] = {
    None: "free",
    "none": "replicated",
    "zero1": "sharded",
    "zero2": "sharded",
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One network, one cluster, and what the user fixed; None leaves a choice to the defaults.

    ``pins`` fix dimensions of the search by name, as text (``{"tp": "8"}``); ``hints`` fix placements of operators.
    Without ``sensitivity`` it is not said what memory, links and pins are worth. ``exchange`` is how tensors travel:
    plans are simulated and ranked with it, the closed form of the search knows the type of gradients, whole sums and
    samples of a rank's own alone. ``marks`` of modules come before those that the network's code has. ``software`` is a
    name of `planner.cost.software`, ``attention`` one of `planner.graph.attention` and ``norms`` one of
    `planner.graph.norms`: how attention and root-mean-square norms run; the usual software, fused attention and norms
    as the software has them where nothing is said. With ``any_plan`` more is searched than the software
    can run. ``memory_headroom`` is the part of a device's usable memory that a
    plan leaves free.
    """

    network: str | Network
    hardware: str
    devices: int
    global_batch: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    search_mode: str = "dynamic_programming"
    parallel_mode: str = "auto_parallel"
    pins: Mapping[str, str] = field(default_factory=dict)
    hints: tuple[Hint, ...] = ()
    top: int = 5
    sensitivity: bool = True
    exchange: Exchange = UNASKED
    marks: Marks | None = None
    software: str = ""
    any_plan: bool = False
    attention: str = ""
    norms: str = ""
    memory_headroom: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The pins of a request, read: None is free.

    ``micro_batch`` are the samples of a micro-batch on one data-parallel rank, ``micro_batches`` their number.
    ``batch_only`` shards nothing but the batch (pure data parallelism). ``shard_size`` is the number of data-parallel
    ranks that optimizer states are sharded over, ``offload_optimizer`` whether they live beside the host, in its
    memory or where ``offload_to`` says, ``offload_parameters`` whether parameters lie in its memory too,
    ``offload_activations`` whether what layers keep for the backward pass waits there, ``host_embeddings`` whether
    tables of embeddings lie there; ``recompute_messages`` whether messages of units that compute
    again are sent again, which they are if nothing is said;
    ``by_unit`` says that units are fixed one by one (`planner.search.stages.unit_pins`).
    ``bucket_mb`` is the size of fused messages of gradients in MiB, and parameters of less than
    ``sharding_threshold_kb`` KiB stay whole. ``copies`` are the parts of a micro-batch whose operators are issued in
    turn; without it there is one. With ``expert_messages`` of ``tokens`` ranks of an expert axis keep their own experts
    and send tokens, with ``once_a_node`` each token once to each node for all of its experts there; else they may
    gather the weights of the others instead. With ``expert_overlap`` tokens travel beside another micro-batch, else
    they are waited for. ``expert_cut`` says what tensor ranks have of experts: part of the ``width`` of each, or
    ``whole`` ones of their own, as those of an expert axis; ``tensor_cut`` of ``width`` that they have part of the
    matrix of every product, and do not each compute it whole. With ``tensor_overlap`` gathers and scatters of tensor
    ranks travel beside products, else behind them. ``order`` names axes as the pins of their degrees do, from the one
    whose ranks lie farthest apart to the one whose ranks are neighbours; those that it leaves out lie where they like.
    ``stage_layers`` are the layers of every chunk of a pipeline, in the order of the network; ``recompute_layers`` says
    how many layers of a stage compute again, the first ones of each of its chunks. Of what is not pinned only that is
    searched which a framework ``runs``.
    """

    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    vpp: int | None = None
    cp: int | None = None
    ep: int | None = None
    micro_batch: int | None = None
    micro_batches: int | None = None
    shard_size: int | None = None
    recompute: str | None = None
    recompute_messages: bool | None = None
    optimizer_sharding: str | None = None
    schedule: str | None = None
    context_algorithm: str | None = None
    expert_messages: str | None = None
    expert_cut: str | None = None
    tensor_cut: str | None = None
    sequence_parallel: bool | None = None
    tensor_overlap: bool | None = None
    expert_overlap: bool | None = None
    offload_optimizer: bool | None = None
    offload_to: str | None = None
    offload_parameters: bool | None = None
    offload_activations: bool | None = None
    host_embeddings: bool | None = None
    bucket_mb: int | None = None
    sharding_threshold_kb: int | None = None
    copies: int | None = None
    order: tuple[str, ...] | None = None
    stage_layers: tuple[int, ...] | None = None
    recompute_layers: int | None = None
    batch_only: bool = False
    by_unit: bool = False
    runs: Capability | None = None

    @property
    def experts_stay(self) -> bool:
        """Whether ranks of an expert axis keep their own experts, so that tokens travel."""
        return self.expert_messages not in (None, "any")

    @property
    def storage(self) -> ParameterStorage:
        """How parameters may lie along the data axis where operators are searched one by one."""
        return _STORAGE.get(self.optimizer_sharding, "free")

    @property
    def one_stage(self) -> bool:
        """Whether plans without pipeline, context and expert axes, recomputation and offload are allowed."""
        if self.runs is not None:
            return False  # a framework has one strategy for all layers
        degrees = all(value in (None, 1) for value in (self.pp, self.vpp, self.cp, self.ep)) and not self.by_unit
        words = self.recompute in (None, "none") and self.schedule in (None, "none")
        stored = self.optimizer_sharding in _STORAGE and self.shard_size is None and not self.offload_optimizer
        stored = stored and not self.sharding_threshold_kb and not self.host_embeddings and not self.offload_activations
        # Tensor ranks are neighbours there.
        words = words and self.expert_cut in (None, "any") and self.tensor_cut in (None, "any")
        words = words and [name for name in self.order or () if name in ("dp", "tp")] != ["tp", "dp"]
        return degrees and words and stored and self.context_algorithm in (None, "none") and not self.sequence_parallel

    def named(self) -> dict[str, str]:
        """What is pinned, by name, as it would be written."""
        values = {name: getattr(self, name) for name in PIN_NAMES}
        return {
            name: "-".join(map(str, value)) if isinstance(value, tuple) else str(value).lower()
            for name, value in values.items()
            if value is not None
        }


def one_of(value: str, known: Iterable[str], what: str) -> str:
    """Return `value` if it is known, else raise InputError with the known ones and the nearest."""
    names = tuple(known)
    if value not in names:
        near = difflib.get_close_matches(value.lower(), names, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"{what} {value!r} is not one of {', '.join(names)}{hint}")
    return value


def _degree(name: str, text: str) -> int:
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or int(text) < 1:
        raise InputError(f"pin {name}={text}: {name} must be a positive integer, for example --pin {name}=2")
    return int(text)


def _size(name: str, text: str) -> int:
    least, most = SIZES[name]
    if not text.isdecimal() or not text.isascii() or len(text) > 9 or not least <= int(text) <= most:
        raise InputError(
            f"pin {name}={text}: {name} must be a whole number from {least} to {most}, for example --pin {name}=64"
        )
    return int(text)


def read_order(text: str) -> tuple[str, ...]:
    """Read an order of axes, ``pp-dp-tp``; InputError where an axis is unknown or named twice."""
    names = tuple(text.split("-"))
    if (unknown := next((name for name in names if name not in AXES_BY_PIN), None)) is not None:
        raise InputError(
            f"pin order={text}: axis {unknown!r} is not one of {', '.join(AXES_BY_PIN)}; name them from the one whose "
            "ranks lie farthest apart, for example --pin order=pp-dp-tp"
        )
    if len(set(names)) < len(names):
        raise InputError(f"pin order={text} names an axis twice; name each once, for example --pin order=pp-dp-tp")
    return names


def read_stage_layers(text: str) -> tuple[int, ...]:
    """Read how many layers every chunk has, ``8-8-7-7``; InputError where a part is no number, or 0 inside.

    The first chunk may have the embedding alone, and the last the head.
    """
    parts = text.split("-")
    numbers = all(part.isdecimal() and part.isascii() and len(part) < 7 for part in parts)
    if not numbers or not all(map(int, parts[1:-1])) or not any(map(int, parts)):
        raise InputError(
            f"pin stage_layers={text}: write how many layers every chunk of the pipeline has, 0 in the first and last "
            "alone, for example --pin stage_layers=8-8-7-7"
        )
    return tuple(int(part) for part in parts)


def _value(name: str, text: str) -> int | str | bool | tuple[str, ...] | tuple[int, ...]:
    one_of(name, PIN_NAMES, "pin")
    if name in DEGREES:
        return _degree(name, text)
    if name in SIZES:
        return _size(name, text)
    if name in FLAGS:
        return one_of(text.lower(), ("true", "false"), name) == "true"
    if name == "copies":
        return int(one_of(text, COPIES, name))
    if name == "order":
        return read_order(text)
    if name == "stage_layers":
        return read_stage_layers(text)
    return one_of(text, WORDS[name], name)


def read_pins(request: PlanRequest) -> Pins:
    """Check modes and pins.

    Raises
    ------
    InputError
        If a name or a value is unknown, or pins contradict the mode, the devices or each other.
    """
    one_of(request.search_mode, SEARCH_MODES, "search mode")
    one_of(request.parallel_mode, PARALLEL_MODES, "parallel mode")
    if request.parallel_mode == "stand_alone" and request.devices != 1:
        raise InputError(f"parallel mode stand_alone runs on one device, not {request.devices}; use --devices 1")
    pins = Pins(**{name: _value(name, text) for name, text in request.pins.items()})  # type: ignore[arg-type]
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
