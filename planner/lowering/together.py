"""Ways of several tensors to other placements, taken so that equal collectives travel in one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from planner.graph.operator_graph import TensorRef
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Moved
from planner.sharding.placement import Placements
from planner.sharding.redistribution import Step
from simulator.program import Collective
from simulator.task_table import FloatArray, IntArray

_FIRST_LOOK = 64
"""Tensors whose bytes are added up at first to find where a message is full."""


Kind = tuple[Collective, int, str]
_Place = tuple[int, int, tuple[int, int]]
"""The first tensor of a group that waits, the group, and how far it is."""


class Moves(NamedTuple):
    """Moves of tensors, arrays (n,): numbers of tensors, ascending, the way of each, and which step of it.

    They are one message, unless each is ``alone``, one after the other.
    """

    numbers: IntArray
    ways: IntArray
    steps: IntArray
    alone: bool


def together(
    ways: Sequence[tuple[Step, ...]],
    dtypes: Sequence[str],
    sizes: Sequence[Sequence[float]],
    which: IntArray,
    limit_bytes: float,
) -> Iterator[Moves]:
    """Yield what moves at once, each tensor's steps in their order.

    A collective waits while another tensor still has to take the same one later; a message is full at `limit_bytes`.

    Parameters
    ----------
    ways : sequence of tuples of Step
    dtypes : sequence of str
        Type of the tensors that take each way: one message has numbers of one type.
    sizes : sequence of sequences of float
        Bytes that each step of each way adds to its message.
    which : array (tensors,)
        The way that each tensor takes.
    limit_bytes : float
    """
    most = max(map(len, ways), default=0)
    size_bytes = np.array([[*row, *(0.0,) * (most - len(row))] for row in sizes], dtype=np.float64)
    waiting = _Waiting(ways, dtypes, which)
    while (chosen := waiting.taken()) is not None:
        numbers, steps, alone = chosen
        taken = which[numbers]
        if alone:
            yield Moves(numbers, taken, steps, alone)
            continue
        for message in _filled(size_bytes[taken, steps], limit_bytes):
            yield Moves(numbers[message], taken[message], steps[message], alone)


def _filled(sizes: FloatArray, limit: float) -> Iterator[slice]:
    """Ranges of sizes that reach a limit as soon as they can; the last may not."""
    begin, ahead = 0, _FIRST_LOOK
    while begin < len(sizes):
        total = np.cumsum(sizes[begin : begin + ahead])
        count = int(np.searchsorted(total, limit)) + 1
        if count > len(total) and begin + ahead < len(sizes):
            ahead *= 2
            continue
        yield slice(begin, begin + count)
        begin += count


@dataclass(slots=True)
class _Alike:
    """Tensors (n,) that take steps of the same kinds; ``done`` of these are taken.

    A kind of None needs no message: each tensor takes all such steps in a row alone, when it is the first of all that
    need not wait. ``gone`` have taken them; they wait for the others of the group, whose next message they share.
    """

    kinds: tuple[Kind | None, ...]
    numbers: IntArray
    done: int = 0
    gone: int = 0

    @property
    def kind(self) -> Kind | None:
        """That of the next step."""
        return self.kinds[self.done]

    @property
    def state(self) -> tuple[int, int]:
        """How far it is."""
        return self.done, self.gone

    @property
    def first(self) -> int:
        """The first tensor that waits."""
        return int(self.numbers[self.gone])


class _Waiting:
    """Tensors by the kind of their next step: steps of one kind move at once."""

    def __init__(self, ways: Sequence[tuple[Step, ...]], dtypes: Sequence[str], which: IntArray) -> None:
        self.groups = _groups(ways, dtypes, which)
        self.later = Counter(kind for group in self.groups for kind in group.kinds[1:])
        """Steps of each kind behind the next of their ways: as ways go on, there are only ever fewer."""
        self.waiting: dict[Kind, list[int]] = {}
        # Groups whose kind nobody takes later, and the others; what has been done since stays in them.
        self.free: list[_Place] = []
        self.held: list[_Place] = []
        for place in range(len(self.groups)):
            self._wait(place)

    def taken(self) -> tuple[IntArray, IntArray, bool] | None:
        """Take all steps of the kind of the first tensor that need not wait, or of the first tensor where all must.

        Returns the numbers of the tensors, ascending, which step each takes, and whether each moves alone; None where
        all have ended.
        """
        place = self._first(self.free)
        if place is None:
            place = self._first(self.held)
        if place is None:
            return None
        group = self.groups[place]
        kind = group.kind
        if kind is None:
            return self._alone(place, group)
        chosen = self.waiting.pop(kind)
        members = [self.groups[place] for place in chosen]
        numbers = np.concatenate([group.numbers for group in members])
        steps = np.repeat([group.done for group in members], [len(group.numbers) for group in members])
        if len(members) > 1:
            order = np.argsort(numbers)
            numbers, steps = numbers[order], steps[order]
        for place in chosen:
            self._go_on(place, self.groups[place].done + 1)
        return numbers, steps, False

    def _alone(self, place: int, group: _Alike) -> tuple[IntArray, IntArray, bool]:
        """Let tensors of a group move alone that come before all others that need not wait."""
        heappop(self.free)
        other = self._first(self.free)
        end = len(group.numbers)
        if other is not None:
            end = int(np.searchsorted(group.numbers, self.groups[other].first))
        numbers, begin = group.numbers[group.gone : end], group.done
        behind = next(
            (step for step in range(begin, len(group.kinds)) if group.kinds[step] is not None), len(group.kinds)
        )
        group.gone = end
        if end == len(group.numbers):
            self._go_on(place, behind)
        else:
            heappush(self.free, (group.first, place, group.state))
        return np.repeat(numbers, behind - begin), np.tile(np.arange(begin, behind), len(numbers)), True

    def _wait(self, place: int) -> None:
        group = self.groups[place]
        kind = group.kind
        if kind is not None:
            self.waiting.setdefault(kind, []).append(place)
        heappush(self.held if kind and self.later[kind] else self.free, (group.first, place, group.state))

    def _first(self, places: list[_Place]) -> int | None:
        """The group with the first tensor in a heap that still waits there."""
        while places and self.groups[places[0][1]].state != places[0][2]:
            heappop(places)
        return places[0][1] if places else None

    def _go_on(self, place: int, step: int) -> None:
        group = self.groups[place]
        group.done, group.gone = step, 0
        if group.done == len(group.kinds):
            return
        kind = group.kind
        self.later[kind] -= 1
        if kind is not None and not self.later[kind]:
            for other in self.waiting.get(kind, ()):
                heappush(self.free, (self.groups[other].first, other, self.groups[other].state))
        self._wait(place)


def _groups(ways: Sequence[tuple[Step, ...]], dtypes: Sequence[str], which: IntArray) -> list[_Alike]:
    """Tensors that take the same steps; those that take none are left out."""
    known: dict[tuple[int, str], int] = {}
    places: list[int] = []
    of_way = []
    for place, (way, dtype) in enumerate(zip(ways, dtypes, strict=True)):
        if way and (id(way), dtype) not in known:
            known[id(way), dtype] = len(places)
            places.append(place)
        of_way.append(known[id(way), dtype] if way else -1)
    group = np.array(of_way, dtype=np.int64)[which]
    order = np.argsort(group, kind="stable")
    ends = np.searchsorted(group[order], np.arange(-1, len(places)), side="right").tolist()
    return [
        _Alike(tuple([_kind(step, dtypes[place]) for step in ways[place]]), order[begin:end])
        for place, begin, end in zip(places, ends, ends[1:], strict=False)
        if end > begin
    ]


def _kind(step: Step, dtype: str) -> Kind | None:
    """What tells steps apart that move at once; None for what needs no message."""
    return (step.operation, step.axis, dtype) if isinstance(step.operation, Collective) else None


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
