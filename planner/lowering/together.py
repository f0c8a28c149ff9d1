"""Ways of several tensors to other placements, taken so that equal collectives travel in one message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import itemgetter

from planner.sharding.redistribution import Step
from simulator.program import Collective

Moves = list[tuple[int, Step]]
"""Numbers of ways, each with its next step."""


def together(
    ways: Sequence[tuple[Step, ...]],
    dtypes: Sequence[str],
    size_bytes: Callable[[int, Step], float],
    limit_bytes: float,
) -> Iterator[Moves]:
    """Yield what moves at once, each way's steps in their order.

    A collective waits while another way still has to take the same one later; a message is full at `limit_bytes`.

    Parameters
    ----------
    ways : sequence of tuples of Step
    dtypes : sequence of str
        Type of each tensor: one message has numbers of one type.
    size_bytes : callable
        Bytes that a step of a way adds to its message.
    limit_bytes : float
    """
    waiting = _Waiting(ways, dtypes)
    while chosen := waiting.taken():
        moves: Moves = []
        size = 0.0
        for move in chosen:
            moves.append(move)
            size += size_bytes(*move)
            if size >= limit_bytes:
                yield moves
                moves, size = [], 0.0
        if moves:
            yield moves


@dataclass(slots=True)
class _Alike:
    """Ways of the same kinds of steps, which therefore always move at once; ``done`` steps of them are taken."""

    way: tuple[Step, ...]
    kinds: tuple[Hashable, ...]
    numbers: list[int] = field(default_factory=list)
    done: int = 0


class _Waiting:
    """Ways by the kind of their next step: steps of one kind move at once."""

    def __init__(self, ways: Sequence[tuple[Step, ...]], dtypes: Sequence[str]) -> None:
        known: dict[tuple[int, str], tuple[int, str] | None] = {}
        groups: dict[Hashable, _Alike] = {}
        for number, (way, dtype) in enumerate(zip(ways, dtypes, strict=True)):
            if not way:
                continue
            kind_of_way = id(way), dtype
            if kind_of_way not in known:
                messages = all(isinstance(step.operation, Collective) for step in way)
                known[kind_of_way] = kind_of_way if messages else None
            # What one tensor does alone, others do not do with it.
            key = number if known[kind_of_way] is None else known[kind_of_way]
            if key not in groups:
                groups[key] = _Alike(way, tuple([_kind(number, step, dtype) for step in way]))
            groups[key].numbers.append(number)
        self.groups = list(groups.values())
        self.later = Counter(kind for group in self.groups for kind in group.kinds[1:])
        """Steps of each kind behind the next of their ways: as ways go on, there are only ever fewer."""
        self.waiting: dict[Hashable, list[int]] = {}
        # Places (group, step) whose kind nobody takes later, and the others; what has been done since stays in them.
        self.free: list[tuple[int, int]] = []
        self.held: list[tuple[int, int]] = []
        for place in range(len(self.groups)):
            self._wait(place)

    def taken(self) -> Moves:
        """Take all steps of the kind of the first way that need not wait, or of the first way where all must.

        Empty where all ways have ended.
        """
        first = self._first(self.free)
        if first is None:
            first = self._first(self.held)
        if first is None:
            return []
        group = self.groups[first]
        chosen = self.waiting.pop(group.kinds[group.done])
        moves = [(number, g.way[g.done]) for g in map(self.groups.__getitem__, chosen) for number in g.numbers]
        if len(chosen) > 1:
            moves.sort(key=itemgetter(0))
        for place in chosen:
            self._go_on(place)
        return moves

    def _wait(self, place: int) -> None:
        group = self.groups[place]
        kind = group.kinds[group.done]
        self.waiting.setdefault(kind, []).append(place)
        heappush(self.held if self.later[kind] else self.free, (place, group.done))

    def _first(self, places: list[tuple[int, int]]) -> int | None:
        """The first group in a heap that still waits there: groups are in the order of their first ways."""
        while places and self.groups[places[0][0]].done != places[0][1]:
            heappop(places)
        return places[0][0] if places else None

    def _go_on(self, place: int) -> None:
        group = self.groups[place]
        group.done += 1
        if group.done == len(group.kinds):
            return
        kind = group.kinds[group.done]
        self.later[kind] -= 1
        if not self.later[kind]:
            for other in self.waiting.get(kind, ()):
                heappush(self.free, (other, self.groups[other].done))
        self._wait(place)


def _kind(number: int, step: Step, dtype: str) -> Hashable:
    """What tells steps apart that move at once; what needs no message moves alone."""
    if isinstance(step.operation, Collective):
        return step.operation, step.axis, dtype
    return step.operation, step.axis, number
