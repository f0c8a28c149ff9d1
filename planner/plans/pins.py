"""Pins, the parts of a plan that the user fixes: one model for the command line, YAML, Python and the search."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from simulator.checks import nearest
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.plans.capability import Capability

AXES_BY_PIN: Mapping[str, str] = {"pp": "pipeline", "dp": "data", "cp": "context", "ep": "expert", "tp": "tensor"}
"""Axes of a plan by the pins of their degrees, in the usual order: tensor ranks are neighbours."""
COUNT = range(1, 2**24 + 1)
"""Values of pins that count ranks, samples, chunks or layers."""
PinValues = range | tuple[str, ...] | type[bool] | Callable[[str], object]
"""Values of a pin: whole numbers, words, true and false, or what a function reads."""
Recompute = Literal["none", "selective", "full"]
OptimizerSharding = Literal["none", "zero1", "zero2", "zero3"]
RecomputeModule = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
Schedule = Literal["none", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipe_v"]
ContextAlgorithm = Literal["none", "ring", "all_to_all"]
OffloadTo = Literal["host", "disk"]
ParameterStorage = Literal["free", "replicated", "sharded"]
_STORAGE: Mapping[str | None, ParameterStorage] = {
    None: "free",
    "none": "replicated",
    "zero1": "sharded",
    "zero2": "sharded",
}


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


def read_modules(text: str) -> tuple[str, ...]:
    """Read parts of layers that compute again, ``mla_up_proj-mlp``; InputError where one is unknown.

    >>> read_modules("mlp-layernorm")
    ('layernorm', 'mlp')
    """
    names, known = tuple(sorted(set(text.split("-")))), get_args(RecomputeModule)
    for name in names:
        if name not in known:
            raise InputError(
                f"pin recompute_modules={text}: {name!r} is no part of a layer that can compute again; "
                f"{nearest(name, known)}, several with - between: --pin recompute_modules=layernorm-mlp"
            )
    return names


def _pin(values: PinValues) -> Any:
    return field(default=None, metadata={"values": values})


@dataclass(frozen=True, slots=True, kw_only=True)
class Pins:
    """The pins of a request; None is free.

    ``micro_batch`` are the samples of a micro-batch on one data-parallel rank, ``micro_batches`` their number.
    ``shard_size`` is the number of data-parallel
    ranks that optimizer states are sharded over, ``offload_optimizer`` whether they live beside the host, in its
    memory or where ``offload_to`` says, ``offload_parameters`` whether parameters lie in its memory too,
    ``offload_activations`` whether what layers keep for the backward pass waits there, ``host_embeddings`` whether
    tables of embeddings lie there; ``recompute_messages`` whether messages of units that compute
    again are sent again, which they are if nothing is said. ``recompute_modules`` are the parts of layers that
    ``selective`` computes again (`planner.graph.layer_parts`).
    ``bucket_mb`` is the size of fused messages of gradients in MiB, and parameters of less than
    ``sharding_threshold_kb`` KiB stay whole. ``copies`` are the parts of a micro-batch whose operators are issued in
    turn; without it there is one. With ``expert_messages`` of ``tokens`` ranks of an expert axis keep their own experts
    and send tokens, with ``once_a_node`` each token once to each node for all of its experts there; with ``any`` they
    may gather the weights of the others instead. With ``expert_overlap`` tokens travel beside another micro-batch,
    else they are waited for. ``expert_cut`` says what tensor ranks have of experts: part of the ``width`` of each, or
    ``whole`` ones of their own, as those of an expert axis; ``tensor_cut`` of ``width`` that they have part of the
    matrix of every product, and do not each compute it whole. With ``tensor_overlap`` gathers and scatters of tensor
    ranks travel beside products, else behind them. ``order`` names axes as the pins of their degrees do, from the one
    whose ranks lie farthest apart to the one whose ranks are neighbours; those that it leaves out lie where they like.
    ``stage_layers`` are the layers of every chunk of a pipeline, in the order of the network; ``recompute_layers`` says
    how many layers of a stage compute again, the first ones of each of its chunks.

    The last three are no pins, `planner.plans.request.checked_pins` sets them: ``batch_only`` shards nothing but the
    batch (pure data parallelism); ``by_unit`` says that units are fixed one by one
    (`planner.search.stages.unit_pins`); of what is not pinned only that is searched which a framework ``runs``.
    """

    dp: int | None = _pin(COUNT)
    tp: int | None = _pin(COUNT)
    pp: int | None = _pin(COUNT)
    vpp: int | None = _pin(COUNT)
    cp: int | None = _pin(COUNT)
    ep: int | None = _pin(COUNT)
    micro_batch: int | None = _pin(COUNT)
    micro_batches: int | None = _pin(COUNT)
    shard_size: int | None = _pin(COUNT)
    recompute_layers: int | None = _pin(COUNT)
    recompute: str | None = _pin(get_args(Recompute))
    recompute_modules: tuple[str, ...] | None = _pin(read_modules)
    optimizer_sharding: str | None = _pin(get_args(OptimizerSharding))
    schedule: str | None = _pin(get_args(Schedule))
    context_algorithm: str | None = _pin(get_args(ContextAlgorithm))
    expert_messages: str | None = _pin(("any", "tokens", "once_a_node"))
    expert_cut: str | None = _pin(("any", "width", "whole"))
    tensor_cut: str | None = _pin(("any", "width"))
    offload_to: str | None = _pin(get_args(OffloadTo))
    sequence_parallel: bool | None = _pin(bool)
    tensor_overlap: bool | None = _pin(bool)
    expert_overlap: bool | None = _pin(bool)
    recompute_messages: bool | None = _pin(bool)
    offload_optimizer: bool | None = _pin(bool)
    offload_parameters: bool | None = _pin(bool)
    offload_activations: bool | None = _pin(bool)
    host_embeddings: bool | None = _pin(bool)
    bucket_mb: int | None = _pin(range(1, 2**14 + 1))
    sharding_threshold_kb: int | None = _pin(range(2**24 + 1))
    copies: int | None = _pin(range(1, 3))
    order: tuple[str, ...] | None = _pin(read_order)
    stage_layers: tuple[int, ...] | None = _pin(read_stage_layers)
    batch_only: bool = False
    by_unit: bool = False
    runs: Capability | None = None

    @classmethod
    def read(cls, given: Mapping[str, object]) -> Pins:
        """Read pins by name, their values or what is written for them.

        Raises
        ------
        InputError
            A name or a value is unknown.

        Examples
        --------
        >>> Pins.read({"tp": 2, "recompute": "full", "stage_layers": (3, 5)}).named()
        {'tp': '2', 'recompute': 'full', 'stage_layers': '3-5'}
        """
        return cls(**{name: _value(name, _text(value)) for name, value in given.items()})

    def said(self) -> dict[str, Any]:
        """Return the values of the pins that are set, by name."""
        return {name: value for name in PIN_NAMES if (value := getattr(self, name)) is not None}

    def named(self) -> dict[str, str]:
        """Return the pins that are set as a user would write them, by name."""
        return {name: _text(value) for name, value in self.said().items()}

    def degree(self, name: str) -> int:
        """A degree by the name of its pin, 1 where it is free."""
        return getattr(self, name) or 1

    def over(self, other: Pins) -> Pins:
        """Return these pins, filled up with those of `other` where they are free."""
        return replace(other, **self.said())

    def without(self, names: Iterable[str]) -> Pins:
        """The same with some pins left out."""
        free: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **free)

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


PIN_VALUES: Mapping[str, PinValues] = {
    one.name: one.metadata["values"] for one in fields(Pins) if "values" in one.metadata
}
PIN_NAMES = tuple(PIN_VALUES)

FREE = Pins()
"""Nothing pinned."""


def read_pins(texts: Iterable[str]) -> Pins:
    """Read ``KEY=VALUE`` texts.

    Raises
    ------
    InputError
        A text has another form, a name or a value is unknown, or a name stands twice with different values.

    Examples
    --------
    >>> read_pins(["tp=8", "recompute=none"]).named()
    {'tp': '8', 'recompute': 'none'}
    """
    found = FREE
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise InputError(f"--pin {text!r} is not KEY=VALUE; write for example --pin tp=8")
        pin, before = Pins.read({name: value}), found.named().get(name)
        if before not in (None, pin.named()[name]):
            raise InputError(f"--pin {text!r}: {name} is already pinned to {before}; pin it once")
        found = pin.over(found)
    return found


def _text(value: object) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "-".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(name: str, text: str) -> Any:
    values, said = PIN_VALUES.get(name), f"pin {name}={text}"
    if values is None:
        raise InputError(f"{said}: {name!r} cannot be pinned; {nearest(name, PIN_NAMES)}")
    if isinstance(values, range):
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) in values):
            raise InputError(f"{said}: {text!r} is not a whole number from {values[0]} to {values[-1]}; correct it")
        return int(text)
    if not isinstance(values, tuple) and values is not bool:
        return values(text)
    words, word = (values, text) if isinstance(values, tuple) else (("true", "false"), text.lower())
    if word not in words:
        raise InputError(f"{said}: {text!r} is no value of {name}; {nearest(text, words)}")
    return word == "true" if values is bool else word
