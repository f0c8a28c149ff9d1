"""Bytes a unit of a pipeline keeps from its forward to its backward pass, and needs at once during each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.graph.operator_graph import TensorRef
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Draft
from simulator.program import Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitMemory:
    """Bytes of one rank.

    Attributes
    ----------
    kept : from the forward to the backward pass, without the input
    keeps_input, keeps_output : whether the backward pass reads them; the input's size is ``input``
    forward : most that stands at once in the forward pass, made by the unit
    backward : most that stands at once in the backward pass beyond what was kept
    inputs : the same in the part of the backward pass that leads to the input's gradient
    fetched : of that, brought back from the host while the unit behind still goes backward
    deferred : after that part, what the rest still reads, and gradients of parameters that it has made
    defers_input : whether the input of the unit is among that
    weights : most that stands at once in the rest beyond what was deferred
    """

    kept: int
    input: int
    keeps_input: bool
    keeps_output: bool
    forward: int
    backward: int
    inputs: int
    deferred: int
    defers_input: bool
    weights: int
    fetched: int = 0


class _Values:
    """Sizes of values, and whose memory a view stands in."""

    def __init__(self, drafts: Iterable[Draft]) -> None:
        self.size: dict[str, int] = {}
        self.owner: dict[str, str] = {}
        for draft in drafts:
            self.size.update((b.name, b.size_bytes) for b in draft.writes)
            self.owner.update(draft.owners)

    def base(self, name: str) -> str:
        while name in self.owner:
            name = self.owner[name]
        return name

    def last_uses(self, drafts: Sequence[Draft]) -> dict[str, int]:
        found: dict[str, int] = {}
        for index, draft in enumerate(drafts):
            for name in (*(b.name for b in draft.writes), *draft.reads):
                found[self.base(name)] = index
        return found


def unit_memory(
    source: PlacedGraph,
    *,
    forward: Sequence[Draft],
    inputs: Sequence[Draft],
    weights: Sequence[Draft],
    backward: Sequence[Draft],
    arrives: TensorRef | None,
    returns: TensorRef | None,
    leaves: tuple[str, str],
    gradients: frozenset[str],
    fresh: frozenset[str] = frozenset(),
    fetched: Sequence[Buffer] = (),
) -> UnitMemory:
    """Follow the values of a unit through its passes.

    Parameters
    ----------
    forward, inputs, weights, backward : sequences of drafts
        ``backward`` in its order; ``inputs`` and ``weights`` are its two parts.
    arrives, returns : TensorRef or None
        What the unit before hands on and the unit behind sends back.
    leaves : tuple of str
        Names of what the unit hands on and sends back: they stand until its passes end.
    gradients : frozenset of str
        Gradients of parameters, which are counted where they are accumulated, and where one waits for the pass that
        does.
    fresh : frozenset of str
        Those of them that stand beside their accumulator until they have been added to it.
    fetched : sequence of Buffer
        What has been brought back from the host when the backward pass begins.
    """
    values = _Values([*forward, *backward])
    sent_on, sent_back = (values.base(name) for name in leaves)
    size = {name: 0 if name in gradients - fresh else values.size[name] for name in values.size}
    made = {b.name for draft in forward for b in draft.writes}
    arrived = _bytes(source, arrives)
    returned = _bytes(source, returns)
    input_name = source.written_name(arrives) if arrives else ""
    returned_name = source.written_name(returns) if returns else ""
    read_back = {values.base(name) for draft in backward for name in draft.reads}
    kept = {name for name in made if name in read_back}
    keeps_input = input_name in read_back
    forward_peak = _peak(
        forward,
        values,
        {**size, input_name: 0 if keeps_input else arrived},
        standing={input_name} - {""},
        stays=kept | {sent_on},
    )
    held = kept | ({input_name} if keeps_input else set()) | ({returned_name} - {""})
    back = {buffer.name: buffer.size_bytes for buffer in fetched}
    held |= back.keys()
    sizes = {**size, input_name: arrived, returned_name: returned, **back}
    kept_bytes = sum(size[name] for name in kept)
    start = kept_bytes + (arrived if keeps_input else 0)
    backward_peak = _peak(backward, values, sizes, standing=held, stays={sent_back}) - start
    early = {b.name for draft in inputs for b in draft.writes}
    late = early & gradients
    sizes |= {name: values.size[name] for name in late}
    rest = {values.base(name) for draft in weights for name in draft.reads}
    waiting = (rest & (held | early)) | late
    deferred = sum(sizes.get(name, 0) for name in waiting if name)
    inputs_peak = _peak(inputs, values, sizes, standing=held, stays=waiting | {sent_back}) - start
    weights_peak = _peak(weights, values, sizes, standing=waiting, stays=late) - deferred
    return UnitMemory(
        kept=kept_bytes,
        input=arrived,
        keeps_input=keeps_input,
        keeps_output=sent_on in kept,
        forward=forward_peak,
        backward=max(0, backward_peak),
        inputs=max(0, inputs_peak),
        deferred=deferred,
        defers_input=input_name in waiting,
        weights=max(0, weights_peak),
        fetched=sum(back.values()),
    )


def _bytes(source: PlacedGraph, ref: TensorRef | None) -> int:
    return 0 if ref is None else source.local_bytes(source.graph.spec(ref), source.output_placements(ref))


def _peak(
    order: Sequence[Draft],
    values: _Values,
    size: dict[str, int],
    *,
    standing: set[str],
    stays: set[str],
) -> int:
    """Most bytes at once: `standing` are there at the start, `stays` are not released."""
    last = values.last_uses(order)
    ends: dict[int, list[str]] = {}
    for name, index in last.items():
        ends.setdefault(index, []).append(name)
    level = peak = sum(size.get(name, 0) for name in standing)
    there = set(standing)
    for index, draft in enumerate(order):
        for buffer in draft.writes:
            if buffer.name not in there:
                there.add(buffer.name)
                level += size.get(buffer.name, 0)
        peak = max(peak, level)
        for name in ends.get(index, ()):
            if name in there and name not in stays:
                there.discard(name)
                level -= size.get(name, 0)
    return peak
