"""Parameters on their ways to the placements in which they are read, as far as they travel together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph.operator_graph import TensorRef
from planner.lowering.placed import PlacedGraph
from planner.lowering.together import together
from planner.lowering.writer import Moved
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step

Wanted = tuple[TensorRef, Placements, str]
"""A parameter, the placement in which it is read, and the name it then has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """How a parameter gets to a placement: its moves, and its bytes behind each step, by the step's identity."""

    steps: tuple[Step, ...]
    dtype: str
    size_bytes: Mapping[int, int]
    moves: tuple[Moved, ...]


def moves_together(
    source: PlacedGraph, values: Sequence[Wanted], limit_bytes: float
) -> Iterator[tuple[list[Moved], list[int]]]:
    """Yield what of `values` moves at once, with their places there.

    Parameters
    ----------
    values : sequence of Wanted
        In the order in which they are read; copies of layers that are written once give the same objects.
    limit_bytes : float
        Size at which a message is full.
    """
    known: dict[int, _Way] = {}
    found = []
    for value in values:
        if id(value) not in known:
            known[id(value)] = _way(source, value)
        found.append(known[id(value)])
    done = [0] * len(values)

    def size_bytes(number: int, step: Step) -> float:
        return found[number].size_bytes[id(step)]

    for moves in together([way.steps for way in found], [way.dtype for way in found], size_bytes, limit_bytes):
        items: list[Moved] = []
        for number, _ in moves:
            items.append(found[number].moves[done[number]])
            done[number] += 1
        yield items, [number for number, _ in moves]


def _way(source: PlacedGraph, value: Wanted) -> _Way:
    ref, wanted, goal = value
    spec = source.graph.spec(ref)
    steps = source.path(source.stored[ref.node], wanted)
    names = [source.graph.nodes[ref.node].name, *(f"{goal}.step{n}" for n in range(1, len(steps))), goal]
    return _Way(
        steps=steps,
        dtype=spec.dtype,
        size_bytes={id(step): source.local_bytes(spec, step.after) for step in steps},
        moves=tuple((ref, *pair, step) for pair, step in zip(pairwise(names), steps, strict=False)),
    )
