"""Ways through a chain of mostly equal units by a table over evenly spaced bytes.

What equal units keep differs by whole tensors, so that the bytes of their ways lie near evenly spaced places. With
bytes rounded down to those places, the least seconds for every sum of them follow by dynamic programming (Bellman),
however many ways cost nearly the same: that bounds every choice under a memory limit, and where the choice that the
table names fits without rounding, it is the best. What single units keep beside the places is carried along.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray

LONG = 8
"""Equal units in a row from which on what a way keeps beside a place is left out."""
SLACK = 0.5
"""Most that all units together may keep beside their places, in places."""
CELLS = 4_000_000
"""Most entries of all tables."""
_PARTS = (1.0, 0.5, 1 / 3)
_SAME = 0.01
"""Difference in bytes up to which sums of single units count as the least of them, in places."""
_CLASSES = 8
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class GridKind:
    """Ways of one kind of unit: bytes and boundary states (ways,), how many of it stand in a row, its likely ways."""

    held: FloatArray
    entry: IntArray
    exit: IntArray
    count: int
    likely: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _PlacedWays:
    """Ways of one kind on the grid: the least place's bytes, places above it (ways,), and bytes beside them."""

    anchor: float
    places: IntArray
    beside: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class _CheapestWay:
    """The cheapest way (n,) between two states for so many places and such bytes beside them."""

    entry: IntArray
    exit: IntArray
    places: IntArray
    beside: FloatArray
    way: IntArray


def spacing_of(kinds: Sequence[GridKind]) -> float | None:
    """The widest spacing on which the likely ways of all long rows lie; None where there is none."""
    rows = [kind.held[kind.likely] - kind.held[kind.likely].min() for kind in kinds if kind.count >= LONG]
    counts = [kind.count for kind in kinds if kind.count >= LONG]
    apart = np.unique(np.concatenate(rows)) if rows else np.zeros(0)
    if not len(apart) or apart[-1] <= 0:
        return None
    tried = np.unique(np.concatenate([apart[apart > 0] * part for part in _PARTS]))
    places = [np.rint(row / tried[:, None]) for row in rows]
    each = [np.where(p > 0, row / np.maximum(p, 1.0), np.inf) for p, row in zip(places, rows, strict=True)]
    spacing = np.min([share.min(axis=1) for share in each], axis=0)
    finite = np.isfinite(spacing)
    spacing = np.where(finite, spacing, 1.0)
    beside = sum(
        count * (row - p * spacing[:, None]).max(axis=1) for p, row, count in zip(places, rows, counts, strict=True)
    )
    good = np.flatnonzero(finite & (beside <= SLACK * spacing))
    return float(spacing[good].max()) if len(good) else None


class ByteGrid:
    """Least costs of a chain for every sum of places.

    Parameters
    ----------
    kinds
        Kinds of unit in the order of the network.
    costs
        Seconds (ways,) of each unit, the same array for units that are alike.
    room
        Bytes that all units together may keep.
    """

    def __init__(self, kinds: Sequence[GridKind], costs: Sequence[FloatArray], spacing: float, room: float) -> None:
        self.kinds, self.costs, self.spacing = kinds, costs, spacing
        self.placed = [_placed(kind, spacing) for kind in kinds]
        self.units = [number for number, kind in enumerate(kinds) for _ in range(kind.count)]
        anchors = sum(placed.anchor * kind.count for placed, kind in zip(self.placed, kinds, strict=True))
        self.free = (room - anchors) / spacing + _ROUNDING
        most = sum(int(placed.places.max()) * kind.count for placed, kind in zip(self.placed, kinds, strict=True))
        self.cells = int(min(self.free, most + sum(kind.count < LONG for kind in kinds) + 1)) + 1
        self.width = 1 + max(int(side.max(initial=0)) for kind in kinds for side in (kind.entry, kind.exit))
        self.steps: dict[int, _CheapestWay] = {}
        self.tables: list[FloatArray] = []
        self.beside: list[FloatArray] = [np.zeros(1)]

    @property
    def small(self) -> bool:
        """Whether the tables may be made."""
        return self.cells > 0 and self.cells * self.width * (len(self.units) + 1) <= CELLS

    def fill(self) -> None:
        """Make the tables of all units, each (states, classes, cells) with sums of places behind it."""
        table = np.full((self.width, 1, self.cells), np.inf)
        table[0, 0, 0] = 0.0
        self.tables = [table]
        reached = 1
        for unit, kind in enumerate(self.units):
            step = self._step(kind, self.costs[unit])
            before, ahead = self.tables[-1], self._classes(step, kind)
            reached = min(self.cells, reached + int(step.places.max(initial=0)) + 1)
            table = np.full((self.width, len(self.beside[-1]), self.cells), np.inf)
            seconds = self.costs[unit][step.way].tolist()
            ends = (step.entry.tolist(), step.exit.tolist(), step.places.tolist(), ahead)
            for entry, leave, places, targets, cost in zip(*ends, seconds, strict=True):
                for number, (to, more) in enumerate(targets):
                    up = places + more
                    if up < reached:
                        found = table[leave, to, up:reached]
                        np.minimum(found, before[entry, number, : reached - up] + cost, out=found)
            self.tables.append(table)

    def best(self, fewer: int = 0) -> tuple[float, list[int]] | None:
        """The least cost of what fits, perhaps with fewer places than fit, and the way of every unit."""
        last = self.tables[-1][0]
        found: tuple[float, int, int] | None = None
        for number, beside in enumerate(self.beside[-1].tolist()):
            fits = min(self.cells - 1, int(np.floor(self.free - beside))) - fewer
            if fits < 0:
                continue
            cell = int(np.argmin(last[number, : fits + 1]))
            if np.isfinite(last[number, cell]) and (found is None or last[number, cell] < found[0]):
                found = float(last[number, cell]), number, cell
        return None if found is None else (found[0], self._ways(found[1], found[2]))

    def _ways(self, number: int, cell: int) -> list[int]:
        """Follow the tables back from the end."""
        state, ways = 0, []
        for unit in reversed(range(len(self.units))):
            kind, cost = self.units[unit], self.costs[unit]
            step, before = self._step(kind, cost), self.tables[unit]
            goal = self.tables[unit + 1][state, number, cell]
            state, number, cell, way = self._before(step, kind, unit, before, cost, (state, number, cell), goal)
            ways.append(way)
        return ways[::-1]

    def _before(
        self, step: _CheapestWay, kind: int, unit: int, before: FloatArray, cost: FloatArray,
        place: tuple[int, int, int], goal: float,
    ) -> tuple[int, int, int, int]:  # fmt: skip
        state, number, cell = place
        targets = self._targets(step, kind, unit)
        for row in np.flatnonzero(step.exit == state).tolist():
            for source, (to, more) in enumerate(targets[row]):
                left = cell - int(step.places[row]) - more
                if to == number and left >= 0:
                    entry, way = int(step.entry[row]), int(step.way[row])
                    if before[entry, source, left] + cost[way] == goal:
                        return entry, source, left, way
        raise AssertionError("every entry of a table comes from one before")

    def _step(self, kind: int, cost: FloatArray) -> _CheapestWay:
        key = id(cost)
        if key not in self.steps:
            self.steps[key] = _cheapest(self.kinds[kind], self.placed[kind], cost)
        return self.steps[key]

    def _classes(self, step: _CheapestWay, kind: int) -> list[list[tuple[int, int]]]:
        """For each way and each class before it the class behind it and how many places more; notes the classes."""
        old = self.beside[-1]
        sums = step.beside[:, None] + old[None, :]
        over = np.floor(sums + _ROUNDING)
        self.beside.append(old if self.kinds[kind].count >= LONG else _classes_of(np.maximum(sums - over, 0.0)))
        return self._targets(step, kind, len(self.beside) - 2)

    def _targets(self, step: _CheapestWay, kind: int, unit: int) -> list[list[tuple[int, int]]]:
        if self.kinds[kind].count >= LONG:
            return [[(number, 0) for number in range(len(self.beside[unit]))]] * len(step.way)
        sums = step.beside[:, None] + self.beside[unit][None, :]
        over = np.floor(sums + _ROUNDING)
        to = np.searchsorted(self.beside[unit + 1], np.maximum(sums - over, 0.0) + _ROUNDING, side="right") - 1
        rows = zip(to.tolist(), over.astype(np.int64).tolist(), strict=True)
        return [list(zip(*row, strict=True)) for row in rows]


def _placed(kind: GridKind, spacing: float) -> _PlacedWays:
    """Round the bytes of ways down to places."""
    above = (kind.held - kind.held[kind.likely].min()) / spacing
    places = np.floor(above + _ROUNDING).astype(np.int64)
    low = int(places.min())
    anchor = float(kind.held[kind.likely].min()) + low * spacing
    return _PlacedWays(anchor, places - low, np.maximum(above - places, 0.0))


def _cheapest(kind: GridKind, placed: _PlacedWays, cost: FloatArray) -> _CheapestWay:
    """Of ways between the same states with as many places, and in single units as many bytes, the cheapest."""
    beside = np.zeros_like(placed.beside) if kind.count >= LONG else placed.beside
    order = np.lexsort((cost, beside, placed.places, kind.exit, kind.entry))
    keys = np.stack([kind.entry, kind.exit, placed.places, beside], axis=1)[order]
    first = np.concatenate([[True], np.any(keys[1:] != keys[:-1], axis=1)])
    rows = order[first & np.isfinite(cost[order])]
    return _CheapestWay(kind.entry[rows], kind.exit[rows], placed.places[rows], beside[rows], rows)


def _classes_of(beside: FloatArray) -> FloatArray:
    """At most `_CLASSES` values of which each one is the largest below some of the given ones."""
    values, same = np.unique(beside), _SAME
    while True:
        kept = [float(values[0])]
        for value in values.tolist():
            if value > kept[-1] + same:
                kept.append(value)
        if len(kept) <= _CLASSES:
            return np.array(kept)
        same *= 2
