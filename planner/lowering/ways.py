"""Parameters on their ways to the placements in which they are read, as far as they travel together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.graph.operator_graph import TensorRef
from planner.lowering.placed import PlacedGraph
from planner.lowering.together import together
from planner.lowering.writer import Moved
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step
from simulator.task_table import IntArray

Wanted = tuple[TensorRef, Placements, str]
"""A parameter, the placement in which it is read, and the name it then has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How a parameter gets to a placement: its moves, and its bytes behind each."""

    steps: tuple[Step, ...]
    dtype: str
    size_bytes: tuple[int, ...]
    moves: tuple[Moved, ...]


class Travelling(NamedTuple):
    """Parameters that move, all in the memory of the host or none, in one message or each of them ``alone``.

    Places ``numbers`` (n,) of what is wanted; ``kinds`` (n,) are the same for equal moves.
    """

    numbers: IntArray
    kinds: IntArray
    on_host: bool
    alone: bool
    distinct: Sequence[Moved]

    def moved(self) -> list[Moved]:
        """The moves."""
        return [self.distinct[kind] for kind in self.kinds.tolist()]

    def messages(self) -> list[list[Moved]]:
        """The moves of each message, or of what takes its place."""
        return [[move] for move in self.moved()] if self.alone else [self.moved()]


def moves_together(
    source: PlacedGraph, wanted: Sequence[Wanted], which: IntArray, limit_bytes: float, known: dict[int, Way]
) -> Iterator[Travelling]:
    """Yield what moves at once.

    Parameters
    ----------
    wanted : sequence of Wanted
    which : array (n,)
        Places in `wanted` in the order in which they are read: those of layers that are written once come again.
    limit_bytes : float
        Size at which a message is full.
    known : dict of int to Way
        Ways of what is wanted, by its identity; those that are missing are added.
    """
    if not len(which):
        return
    for one in wanted:
        if id(one) not in known:
            known[id(one)] = _way(source, one)
    ways = [known[id(one)] for one in wanted]
    steps, dtypes, sizes = [way.steps for way in ways], [way.dtype for way in ways], [way.size_bytes for way in ways]
    first = np.cumsum([0, *map(len, steps)])
    moved = [move for way in ways for move in way.moves]
    hosted = np.array([source.host.holds(ref) for ref, *_ in wanted])
    for on_host in sorted(set(hosted.tolist())):
        places = np.flatnonzero(hosted[which] == on_host)
        for moves in together(steps, dtypes, sizes, which[places], limit_bytes):
            yield Travelling(places[moves.numbers], first[moves.ways] + moves.steps, on_host, moves.alone, moved)


def _way(source: PlacedGraph, value: Wanted) -> Way:
    ref, wanted, goal = value
    spec = source.graph.spec(ref)
    steps = source.path(source.stored[ref.node], wanted)
    names = [source.graph.nodes[ref.node].name, *(f"{goal}.step{n}" for n in range(1, len(steps))), goal]
    return Way(
        steps=steps,
        dtype=spec.dtype,
        size_bytes=tuple([source.local_bytes(spec, step.after) for step in steps]),
        moves=tuple((ref, *pair, step) for pair, step in zip(pairwise(names), steps, strict=False)),
    )
