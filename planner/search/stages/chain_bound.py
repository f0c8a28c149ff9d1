"""Bound on every partition of a short chain of unlike units: cuts lie between units, and what is cut is sent.

Each row of consecutive units takes at least its cheapest way between the boundary states at its ends, memory aside.
With one chunk a rank the least time of a busiest rank and of the messages over the cuts then follow by dynamic
programming over cuts and their states; with several chunks, which one rank holds turn by turn, every cut is listed
(`listed_cuts`) where there are not too many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.ma  # which numpy else loads in the midst of a search, for `np.unique`

from planner.search.stages.fragments import BACKLOG, FILL, QUEUE, STEADY, FloatArray, IntArray, least_of
from planner.search.stages.task import PartitionTask

LONG = 48
"""Most units of a chain that is bounded so."""
WIDE = 128
"""Most units times boundary states that are followed; else the cheapest of all states counts for each row."""
_BEGIN = -1
_GRIDS = (np.geomspace(1.0, 2.0, 24), np.geomspace(2.0, 64.0, 32))
"""Limits on a chunk that are tried, as parts of the least one, as long as more may be better; between two of them the
lower one counts."""
_ROUNDING = 1e-9
_LEFT, _BEHIND, _FILL = range(3)
"""First terms of `_steps`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRows:
    """Least seconds of every row of consecutive units of several tasks, each (tasks, units, states, units, states).

    From a first unit in the boundary state before it to a last unit in the state behind it, the messages over the cut
    before it included; infinite where there is no way. The state at the network's ends has the first place.

    Attributes
    ----------
    busy, fill : both terms of the objective
    both, shared : their sum, and that of the fill and the part of the other which is shared out over all ranks
    """

    busy: FloatArray
    fill: FloatArray
    both: FloatArray
    shared: FloatArray

    @property
    def anywhere(self) -> ChainRows:
        """The same with the cheapest states for each row."""
        terms = (self.busy, self.fill, self.both, self.shared)
        busy, fill, both, shared = (seconds.min(axis=(2, 4))[:, :, None, :, None] for seconds in terms)
        return ChainRows(busy=busy, fill=fill, both=both, shared=shared)


class _Boundaries(NamedTuple):
    """Boundary states of all ways, ascending, and the places among them of both ends of each way, kind behind kind.

    The state at the network's ends is the first; where no way has it but there it needs no place of its own.
    """

    states: IntArray
    entry: IntArray
    exit: IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Paths:
    """Rows after one another, from the network's begin to its end.

    Attributes
    ----------
    first, inner, last : the terms of `ChainRows` of rows that begin the network, stand inside it and end it, each
        (tasks, 1, rows' begins, rows' ends); of a begin or an end there is one where it is that of the network
    units, pieces : how many units, and how many rows on each path
    """

    first: tuple[FloatArray, ...]
    inner: tuple[FloatArray, ...]
    last: tuple[FloatArray, ...]
    units: int
    pieces: int

    @classmethod
    def of(cls, rows: ChainRows, pieces: int) -> _Paths:
        """All paths of so many rows, 2 at least."""
        tasks, units, states = rows.busy.shape[:3]
        size, end = units * states, (units - 1) * states
        terms = [each.reshape(tasks, 1, size, size) for each in (rows.busy, rows.fill, rows.both, rows.shared)]
        return cls(
            first=tuple(term[:, :, :1] for term in terms),
            inner=tuple(terms),
            last=tuple(term[:, :, :, end : end + 1] for term in terms),
            units=units,
            pieces=pieces,
        )

    def least(self, cost: Callable[..., FloatArray], *, longest: bool = False) -> FloatArray:
        """(tasks, limits) least sum of a path's costs, or least largest one.

        ``cost`` makes those of rows out of their terms, (tasks, limits, begins, ends).
        """
        join, reached = np.maximum if longest else np.add, cost(*self.first)
        if self.pieces > 2:
            inner = cost(*self.inner)
            for _ in range(self.pieces - 2):
                reached = join(self._behind(reached), inner).min(axis=2, keepdims=True)
        found: FloatArray = join(self._behind(reached), cost(*self.last)).min(axis=2)[:, :, 0]
        return found

    def _behind(self, reached: FloatArray) -> FloatArray:
        """(tasks, limits, begins, 1) what it takes up to the begin of a row; `reached` is what it takes up to ends."""
        tasks, limits, _, size = reached.shape
        behind = np.full((tasks, limits, size, 1), np.inf)
        states = size // self.units
        behind[:, :, states:, 0] = reached[:, :, 0, :-states]
        return behind


def unlike(counts: Sequence[int], pieces: int) -> bool:
    """Whether a chain is short and most of its units are not alike: others are told by their equal blocks."""
    return 1 < pieces <= sum(counts) <= LONG and 2 * max(counts) <= sum(counts)


def chain_bound(task: PartitionTask) -> float:
    """Seconds that no partition of the task is faster than, the memory limit aside.

    What synchronisation leaves to do is at least what it leaves of the first unit of a chunk, and at least what
    messages take longer than the passes that hide them. Where turns may even out, a rank's chunks count together.
    """
    return float(chain_bounds([task])[0])


def chain_bounds(tasks: Sequence[PartitionTask]) -> FloatArray:
    """(tasks,) bounds of several tasks at once, which differ in the values of their ways alone."""
    return values_bounds(tasks[0], np.stack([_values(task) for task in tasks]))


def values_bounds(task: PartitionTask, values: FloatArray) -> FloatArray:
    """(tasks,) bounds of tasks like `task` whose ways have those ``values``, (tasks, ways of all kinds, columns)."""
    if task.pieces == 1:
        return _one_row(task, values)
    if task.chunks > 1 and few_cuts(task.units, task.pieces):
        rows_of = (_cheapest_rows(task, each) for each in values)
        return np.array([float(listed_s(*rows, task.rank_of, task.uneven_s is None).min()) for rows in rows_of])
    rows = chain_rows(task, values)
    if rows.busy.shape[1] * rows.busy.shape[2] > WIDE:
        rows = rows.anywhere
    return rows_bounds(rows, task.ranks, task.pieces)


def rows_bounds(rows: ChainRows, ranks: int, pieces: int) -> FloatArray:
    """(tasks,) least fill and busiest rank over all cuts into `pieces` chunks, 2 at least.

    Notes
    -----
    The busiest rank takes at least as long as the longest chunk, and at least the mean of all ranks. What is fast may
    have a long fill: in a chunk that takes at most T the fill is at least the least sum of both less T.
    """
    paths = _Paths.of(rows, pieces)
    longest = paths.least(lambda busy, *_: busy, longest=True)
    mean = paths.least(lambda busy, fill, both, shared: np.maximum(shared, fill + busy / ranks))[:, 0]
    least_fill = paths.least(lambda busy, fill, *_: fill)[:, 0]
    # Where there is no path every limit is as good.
    longest = np.where(np.isfinite(longest), np.maximum(longest, _ROUNDING * _ROUNDING), 1.0)
    found = np.full_like(mean, np.inf)
    for grid in _GRIDS:
        limits = longest * grid[1:]
        spent = paths.least(partial(_coupled, limits[:, :, None, None], ranks))
        found = np.minimum(found, (longest * grid[:-1] + spent).min(axis=1))
        beyond = longest[:, 0] * float(grid[-1]) + least_fill
        if np.all(found <= beyond):
            break
    bounds: FloatArray = np.maximum(mean, np.minimum(found, beyond))
    return bounds


def _coupled(
    limits: FloatArray, ranks: int, busy: FloatArray, fill: FloatArray, both: FloatArray, shared: FloatArray
) -> FloatArray:
    """Least fill of rows that take at most so long, infinite where a row takes longer."""
    coupled = np.maximum(fill, np.maximum(both - limits, shared - limits / ranks))
    return np.where(busy <= limits * (1 + _ROUNDING), coupled, np.inf)


def _one_row(task: PartitionTask, values: FloatArray) -> FloatArray:
    """(tasks,) least seconds of the whole network on one rank.

    Synchronisation ends no sooner than any unit's own messages behind what those before it fall behind, so that each
    unit bounds it: those before it by their seconds with what falls behind, those after it by their seconds alone.
    """
    seconds = values[:, :, FILL] + values[:, :, STEADY]
    terms = np.stack([seconds, seconds + values[:, :, BACKLOG], seconds + np.maximum(values[:, :, QUEUE], 0.0)])
    alone, behind, left = _least_steps(task, _boundaries(task), terms)
    kinds = np.repeat(np.arange(len(task.counts)), task.counts)
    before, after = np.full((2, len(values), len(kinds) + 1, alone.shape[-1]), np.inf)
    before[:, 0, 0] = after[:, -1, 0] = 0.0
    for unit, kind in enumerate(kinds[:-1].tolist()):
        before[:, unit + 1] = (before[:, unit, :, None] + behind[:, kind]).min(axis=1)
        after[:, -unit - 2] = (alone[:, kinds[-unit - 1]] + after[:, -unit - 1, None]).min(axis=2)
    whole = before[:, :-1, :, None] + left[:, kinds] + after[:, 1:, None, :]
    found: FloatArray = whole.min(axis=(2, 3)).max(axis=1)
    return found


def chain_rows(task: PartitionTask, values: FloatArray) -> ChainRows:
    """Least seconds of every row of consecutive units of tasks like `task`, whose ways have those ``values``."""
    boundaries = _boundaries(task)
    first, behind, fill, shared, both = _rows(task, values, boundaries, range(5))
    sent = _sends(task, boundaries.states)[:, :, None, None]
    busy = np.maximum(_waited(task, first, sent), _waited(task, behind, sent))
    fill, shared, both = (each + task.fill_sends * sent for each in (fill, shared, _waited(task, both, sent)))
    return ChainRows(busy=busy, fill=fill, both=both, shared=shared)


def cheapest_rows(task: PartitionTask) -> tuple[FloatArray, FloatArray]:
    """Both terms of every row of consecutive units in its cheapest boundary states, (units, units) each."""
    return _cheapest_rows(task, _values(task))


def _cheapest_rows(task: PartitionTask, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """`cheapest_rows` of a task like `task` whose ways have those ``values``."""
    boundaries, late = _boundaries(task), values[:, QUEUE].max() > 0 or values[:, BACKLOG].any()
    picked = (_FILL, _LEFT, _BEHIND) if late else (_FILL, _LEFT)
    fill, *passes = _rows(task, values[None], boundaries, picked)[:, 0]
    sent = _sends(task, boundaries.states)[:, :, None, None]
    busy = np.max([_waited(task, seconds, sent) for seconds in passes], axis=0)
    return busy.min(axis=(1, 3)), (fill + task.fill_sends * sent).min(axis=(1, 3))


def _boundaries(task: PartitionTask) -> _Boundaries:
    kinds, counts = task.kinds, task.counts
    entry, leave = np.concatenate([kind.entry for kind in kinds]), np.concatenate([kind.exit for kind in kinds])
    there = np.bincount(np.concatenate([entry, leave]) - _BEGIN)
    states: IntArray = np.flatnonzero(there[1:])
    apart = kinds[0].entry.max() == kinds[-1].exit.max() == _BEGIN and there[0] == len(kinds[0]) + len(kinds[-1])
    if not (apart and len(states) and counts[0] == counts[-1] == 1):
        states = np.append(_BEGIN, states)
    return _Boundaries(states, states.searchsorted(entry), states.searchsorted(leave))


def _values(task: PartitionTask) -> FloatArray:
    """(ways of all kinds, columns) of `Fragments.values`."""
    return np.concatenate([kind.values for kind in task.kinds])


def _sends(task: PartitionTask, states: IntArray) -> FloatArray:
    """(units, states) seconds of the message over a cut before each unit."""
    sends = np.zeros((task.units, len(states)))
    for number, state in enumerate(states.tolist()):
        if state >= 0 and task.units > 1:
            sends[1:, number] = task.sends_s[:, state] if state < task.sends_s.shape[1] else 0.0
    return sends


def _waited(task: PartitionTask, seconds: FloatArray, sent: FloatArray) -> FloatArray:
    """Seconds of rows with what messages before them are not hidden."""
    hides = np.where(np.isfinite(seconds), seconds, 0.0) if task.hidden_share else 0.0
    return seconds + task.waits_s(sent, hides)


def _rows(task: PartitionTask, values: FloatArray, boundaries: _Boundaries, picked: Sequence[int]) -> FloatArray:
    """(picked, tasks, units, states, units, states) least seconds from one unit to another between boundary states.

    Of tasks like `task` whose ways have those ``values``; ``picked`` are terms of `_steps`.
    """
    width, wanted = len(boundaries.states), list(picked)
    inside, alone = (steps[wanted] for steps in _steps(task, values, boundaries))
    kinds = np.repeat(np.arange(len(task.counts)), task.counts)
    units = np.arange(task.units)
    # First units lie last, so that one sum runs along all of them.
    found = np.full((len(wanted), len(values), task.units, width, width, task.units), np.inf)
    found[:, :, units, :, :, units] = np.moveaxis(alone[:, :, kinds], 2, 0)
    for unit, kind in enumerate(kinds.tolist()[1:], 1):
        behind = found[:, :, unit - 1, :, :, None, :unit] + inside[:, :, kind, None, :, :, None]
        np.minimum.reduce(behind, axis=3, out=found[:, :, unit, :, :, :unit])
    return found.transpose(0, 1, 5, 3, 2, 4)


def _steps(task: PartitionTask, values: FloatArray, boundaries: _Boundaries) -> tuple[FloatArray, FloatArray]:
    """(5, tasks, kinds, states, states) terms of `_rows` of each kind of unit behind others, and where it is first.

    Steady ones with what synchronisation leaves of the first unit, steady ones with what falls behind, what the fill
    pays, that with steady ones shared out evenly, and that with the first.
    """
    steady, fill = values[:, :, STEADY], values[:, :, FILL]
    left = steady + np.maximum(0.0, values[:, :, QUEUE])
    behind = steady + values[:, :, BACKLOG]
    terms = np.stack([steady, behind, fill, fill + steady / task.ranks, fill + steady, left, fill + left])
    steps = _least_steps(task, boundaries, terms)
    return steps[:5], steps[[5, 1, 2, 3, 6]]


def _least_steps(task: PartitionTask, boundaries: _Boundaries, terms: FloatArray) -> FloatArray:
    """(terms, tasks, kinds, states, states) least of each term of each kind of unit between its ends.

    ``terms`` (terms, tasks, ways of all kinds) are those of tasks with the kinds of `task`.
    """
    width = len(boundaries.states)
    number = np.repeat(np.arange(len(task.kinds)), [len(kind) for kind in task.kinds])
    key = (number * width + boundaries.entry) * width + boundaries.exit
    found = least_of(key, len(task.kinds) * width * width)(terms)
    return found.reshape(*terms.shape[:2], len(task.kinds), width, width)


MANY_CUTS = 40_000
"""Most cuts that are listed."""


def few_cuts(units: int, pieces: int) -> bool:
    """Whether all cuts of so many units into so many pieces may be listed."""
    return 1 < pieces <= units and comb(units - 1, pieces - 1) <= MANY_CUTS


@lru_cache(maxsize=32)
def listed_cuts(units: int, pieces: int) -> tuple[IntArray, IntArray]:
    """First and last unit of each chunk, (chunks, cuts) each, of every cut in lexical order."""
    begins = [np.zeros(1, dtype=np.int64)]
    for chunk in range(1, pieces):
        # Each chunk behind this one has a unit at least.
        more = units - pieces + chunk - begins[-1]
        cut = np.repeat(np.arange(len(more)), more)
        nth = np.arange(len(cut)) - (np.cumsum(more) - more).take(cut)
        begins = [*(begun.take(cut) for begun in begins), begins[-1].take(cut) + 1 + nth]
    first = np.array(begins)
    last = np.full_like(first, units - 1)
    np.subtract(first[1:], 1, out=last[:-1])
    return first, last


@lru_cache(maxsize=32)
def _places(units: int, pieces: int) -> IntArray:
    """(chunks, cuts) places of the chunks of every cut in a flat table of first and last units."""
    first, last = listed_cuts(units, pieces)
    return first * units + last


def listed_s(busy: FloatArray, fill: FloatArray, rank_of: IntArray, in_turns: bool) -> FloatArray:
    """(cuts,) seconds of every cut.

    Parameters
    ----------
    busy, fill : (units, units) both terms of the objective for a chunk from one unit to another
    rank_of : (chunks,) rank of each chunk
    in_turns : the longest chunk of each turn counts; else the busiest rank with all of its chunks
    """
    places, of_ranks = _places(len(busy), len(rank_of)), rank_of.tolist()
    ranks, count = max(of_ranks) + 1, places.shape[1]
    busy, fill = busy.ravel(), fill.ravel()
    spent: FloatArray = np.zeros(count)
    rows = np.zeros((len(of_ranks) // ranks if in_turns else ranks, count))
    for chunk, (place, rank) in enumerate(zip(places, of_ranks, strict=True)):
        spent += fill.take(place)
        if in_turns:
            row = rows[chunk // ranks]
            np.maximum(row, busy.take(place), out=row)
        else:
            rows[rank] += busy.take(place)
    seconds: FloatArray = (rows.sum(axis=0) if in_turns else rows.max(axis=0)) + spent
    return seconds
