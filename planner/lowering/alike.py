"""Passes of plans that differ in how they store parameters alone: written once, and read again under other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from planner.graph.operator_graph import Role, TensorRef
from planner.lowering.body import Body, Item
from planner.lowering.offload import offload
from planner.lowering.placed import PlacedGraph
from planner.lowering.turns import with_names
from planner.lowering.writer import Draft

KEPT = 8
"""Placed graphs whose passes are kept: those of the plans that are simulated for one request."""
Part = tuple[tuple[int, ...] | None, tuple[TensorRef, ...], str]
"""Nodes, what they are given, and what leaves them."""


def passes_of(
    source: PlacedGraph,
    nodes: Iterable[int] | None = None,
    given: Sequence[TensorRef] = (),
    gradients: Mapping[TensorRef, int] | None = None,
    leaves: str = "",
) -> Sequence[Item]:
    """What `Body` writes of these; its drafts may be those of another plan and are not to be changed.

    ``gradients`` are those of the graph, or where there are nodes, always the same terms of them. ``leaves`` is what
    these nodes hand on to others forward.
    """
    part = (None if nodes is None else tuple(nodes), tuple(given), leaves)
    if _moves_parameters(source):
        return _written(source, part, gradients)
    known, made = _known(_ButParameters(source))
    if part not in made:
        made[part] = _written(known, part, gradients)
    names = _other_names(known, source)
    return _under(names, made[part]) if names else made[part]


def _written(source: PlacedGraph, part: Part, gradients: Mapping[TensorRef, int] | None) -> Sequence[Item]:
    nodes, given, leaves = part
    body = Body(source, nodes, given, gradients)
    offload(body, given, leaves)
    return body.items


def _moves_parameters(source: PlacedGraph) -> bool:
    """Whether parameters come within a pass: unit by unit, from the host, or in a move without a message."""
    return bool(source.by_unit or source.away or source.host.parameters) or source.reads is None


class _ButParameters:
    """A placed graph but for how its parameters are stored; graphs are compared by identity."""

    __slots__ = ("source",)

    def __init__(self, source: PlacedGraph) -> None:
        self.source = source

    def __hash__(self) -> int:
        return hash((id(self.source.graph), self.source.options.mesh.axes))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ButParameters) and _alike(self.source, other.source)


def _alike(one: PlacedGraph, other: PlacedGraph) -> bool:
    if one.graph is not other.graph or _asked(one) != _asked(other):
        return False
    each = zip(one.graph.nodes, one.rules, other.rules, strict=True)
    return all(here == there for node, here, there in each if node.role is not Role.PARAMETER)


def _asked(source: PlacedGraph) -> tuple[object, ...]:
    """What a plan asks of passes beside strategies: where the ranks of an axis lie, messages are timed by later."""
    asked = source.options
    return (asked.mesh.axes, asked.exchange, asked.recompute, asked.keeps_messages, asked.offload)


@lru_cache(maxsize=KEPT)
def _known(asked: _ButParameters) -> tuple[PlacedGraph, dict[Part, Sequence[Item]]]:
    """The first placed graph of those that are alike, and what was written of it."""
    return asked.source, {}


@lru_cache(maxsize=KEPT)
def _other_names(known: PlacedGraph, source: PlacedGraph) -> Mapping[str, str]:
    """Under which names passes of one graph read what those of another one read under others."""
    here, there = known.reads, source.reads
    assert here is not None  # or none was asked for
    assert there is not None
    return {name: there[read] for read, name in here.items() if there[read] != name}


def _under(names: Mapping[str, str], items: Sequence[Item]) -> Sequence[Item]:
    return [_renamed(item, names) if isinstance(item, Draft) else item for item in items]


def _renamed(draft: Draft, names: Mapping[str, str]) -> Draft:
    """A draft that reads under other names; itself where it reads none of them."""
    if names.keys().isdisjoint(draft.reads):
        return draft
    return replace(
        draft,
        instruction=with_names(draft.instruction, lambda name: names.get(name, name)),
        reads=tuple([names.get(name, name) for name in draft.reads]),
        owners={view: names.get(owner, owner) for view, owner in draft.owners.items()},
    )
