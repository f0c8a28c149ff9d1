"""Bound on every partition of a short chain of unlike units: cuts lie between units, and what is cut is sent.

Each row of consecutive units takes at least its cheapest way between the boundary states at its ends, memory aside.
With one chunk a rank the least time of a busiest rank and of the messages over the cuts then follow by dynamic
programming over cuts and their states; with several chunks, which one rank holds turn by turn, every cut is listed
(`planner.search.stages.listed_cuts`) where there are not too many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.ma  # which numpy else loads in the midst of a search, for `np.unique`

from planner.search.stages.fragments import BACKLOG, FILL, QUEUE, STEADY, FloatArray, IntArray
from planner.search.stages.listed_cuts import few_cuts, least_listed
from planner.search.stages.segments import PartitionTask

LONG = 48
"""Most units of a chain that is bounded so."""
WIDE = 160
"""Most units times boundary states that are followed; else the cheapest of all states counts for each row."""
_BEGIN = -1
_GRIDS = (np.geomspace(1.0, 2.0, 24), np.geomspace(2.0, 64.0, 32))
"""Limits on a chunk that are tried, as parts of the least one, as long as more may be better; between two of them the
lower one counts."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRows:
    """Least seconds of every row of consecutive units, each (units, states, units, states).

    From a first unit in the boundary state before it to a last unit in the state behind it, the messages over the cut
    before it included; infinite where there is no way.

    Attributes
    ----------
    busy, fill : both terms of the objective
    both, shared : their sum, and that of the fill and the part of the other which is shared out over all ranks
    begin : place of the state at the network's ends
    """

    busy: FloatArray
    fill: FloatArray
    both: FloatArray
    shared: FloatArray
    begin: int = 0

    @property
    def anywhere(self) -> ChainRows:
        """The same with the cheapest states for each row."""
        terms = (self.busy, self.fill, self.both, self.shared)
        busy, fill, both, shared = (seconds.min(axis=(1, 3))[:, None, :, None] for seconds in terms)
        return ChainRows(busy=busy, fill=fill, both=both, shared=shared)


def unlike(counts: Sequence[int], pieces: int) -> bool:
    """Whether a chain is short and most of its units are not alike: others are told by their equal blocks."""
    return 1 < pieces <= sum(counts) <= LONG and 2 * max(counts) <= sum(counts)


def chain_bound(task: PartitionTask) -> float:
    """Seconds that no partition of the task is faster than, the memory limit aside.

    What synchronisation leaves to do is at least what it leaves of the first unit of a chunk, and at least what
    messages take longer than the passes that hide them. Where turns may even out, a rank's chunks count together.
    """
    if task.pieces == 1:
        return _one_row(task)
    if task.chunks > 1 and few_cuts(task.units, task.pieces):
        return least_listed(*cheapest_rows(task), task.rank_of, task.uneven_s is None)
    rows = chain_rows(task)
    if rows.busy.shape[0] * rows.busy.shape[1] > WIDE:
        rows = rows.anywhere
    return rows_bound(rows, task.ranks, task.pieces)


def rows_bound(rows: ChainRows, ranks: int, pieces: int) -> float:
    """Least fill and busiest rank over all cuts into `pieces` chunks.

    Notes
    -----
    The busiest rank takes at least as long as the longest chunk, and at least the mean of all ranks. What is fast may
    have a long fill: in a chunk that takes at most T the fill is at least the least sum of both less T.
    """
    units, states = rows.busy.shape[:2]
    size = units * states
    busy, fill, both, shared = (each.reshape(size, size) for each in (rows.busy, rows.fill, rows.both, rows.shared))
    longest = float(_least_path(busy[None], rows, pieces, longest=True)[0])
    mean = float(_least_path(np.maximum(shared, fill + busy / ranks)[None], rows, pieces)[0])
    if not np.isfinite(longest):
        return np.inf
    longest, found = max(longest, _ROUNDING * _ROUNDING), np.inf
    least_fill = float(_least_path(fill[None], rows, pieces)[0])
    for grid in _GRIDS:
        limits = longest * grid[1:, None, None]
        allowed = busy <= limits * (1 + _ROUNDING)
        coupled = np.maximum(fill, np.maximum(both - limits, shared - limits / ranks))
        spent = _least_path(np.where(allowed, coupled, np.inf), rows, pieces)
        found = min(found, float((longest * grid[:-1] + spent).min()))
        beyond = longest * float(grid[-1]) + least_fill
        if found <= beyond:
            return max(mean, found)
    return max(mean, min(found, beyond))


def _one_row(task: PartitionTask) -> float:
    """Least seconds of the whole network on one rank.

    Synchronisation ends no sooner than any unit's own messages behind what those before it fall behind, so that each
    unit bounds it: those before it by their seconds with what falls behind, those after it by their seconds alone.
    """
    states, values = _states(task), np.concatenate([kind.values for kind in task.kinds])
    seconds = values[:, FILL] + values[:, STEADY]
    terms = np.stack([seconds, seconds + values[:, BACKLOG], seconds + np.maximum(values[:, QUEUE], 0.0)])
    alone, behind, left = _least_steps(task, states, terms)
    kinds, end = np.repeat(np.arange(len(task.counts)), task.counts), int(np.searchsorted(states, _BEGIN))
    before, after = np.full((2, len(kinds) + 1, len(states)), np.inf)
    before[0, end] = after[-1, end] = 0.0
    for unit, kind in enumerate(kinds[:-1].tolist()):
        before[unit + 1] = (before[unit, :, None] + behind[kind]).min(axis=0)
        after[-unit - 2] = (alone[kinds[-unit - 1]] + after[-unit - 1]).min(axis=1)
    return float((before[:-1, :, None] + left[kinds] + after[1:, None, :]).min(axis=(1, 2)).max())


def _least_path(costs: FloatArray, rows: ChainRows, pieces: int, *, longest: bool = False) -> FloatArray:
    """(tables,) least sum, or least largest cost, of so many rows after one another.

    ``costs`` (tables, units * states, units * states) are those of each row between its ends.
    """
    units, states = rows.busy.shape[:2]
    reached = np.full((len(costs), units + 1, states), np.inf)
    reached[:, 0, rows.begin] = 0.0
    for _ in range(pieces):
        before = reached[:, :-1].reshape(len(costs), -1, 1)
        after = np.maximum(before, costs) if longest else before + costs
        reached = np.full_like(reached, np.inf)
        reached[:, 1:] = after.min(axis=1).reshape(len(costs), units, states)
    found: FloatArray = reached[:, -1, rows.begin]
    return found


def chain_rows(task: PartitionTask) -> ChainRows:
    """Least seconds of every row of consecutive units of a task."""
    states = _states(task)
    first, behind, fill, shared, both = _paths(task, states, 5)
    sent = _sends(task, states)[:, :, None, None]
    busy = np.maximum(_waited(task, first, sent), _waited(task, behind, sent))
    fill, shared, both = (each + task.fill_sends * sent for each in (fill, shared, _waited(task, both, sent)))
    return ChainRows(busy=busy, fill=fill, both=both, shared=shared, begin=int(np.searchsorted(states, _BEGIN)))


def cheapest_rows(task: PartitionTask) -> tuple[FloatArray, FloatArray]:
    """Both terms of every row of consecutive units in its cheapest boundary states, (units, units) each."""
    states = _states(task)
    first, behind, fill = _paths(task, states, 3)
    sent = _sends(task, states)[:, :, None, None]
    busy = np.maximum(_waited(task, first, sent), _waited(task, behind, sent))
    return busy.min(axis=(1, 3)), (fill + task.fill_sends * sent).min(axis=(1, 3))


def _states(task: PartitionTask) -> IntArray:
    """Boundary states of all ways, ascending, with that of the network's ends."""
    found: IntArray = np.unique(np.concatenate([[_BEGIN], *(side for k in task.kinds for side in (k.entry, k.exit))]))
    return found


def _sends(task: PartitionTask, states: IntArray) -> FloatArray:
    """(units, states) seconds of the message over a cut before each unit."""
    sends = np.zeros((task.units, len(states)))
    for number, state in enumerate(states.tolist()):
        if state >= 0 and task.units > 1:
            sends[1:, number] = task.sends_s[:, state] if state < task.sends_s.shape[1] else 0.0
    return sends


def _waited(task: PartitionTask, seconds: FloatArray, sent: FloatArray) -> FloatArray:
    """Seconds of rows with what messages before them are not hidden."""
    return seconds + task.waits_s(sent, np.where(np.isfinite(seconds), seconds, 0.0))


def _paths(task: PartitionTask, states: IntArray, count: int) -> FloatArray:
    """(count, units, states, units, states) least seconds from one unit to another between boundary states.

    Of steady ones with what synchronisation leaves of the first unit, steady ones with what falls behind, what the fill
    pays, that with steady ones shared out evenly, and that with the first: the first `count`.
    """
    width, units = len(states), task.units
    inside, alone = _steps(task, states)
    kinds = np.repeat(np.arange(len(task.counts)), task.counts).tolist()
    # First units lie last, so that one sum runs along all of them.
    found = np.full((count, units, width, width, units), np.inf)
    for unit, kind in enumerate(kinds):
        if unit:
            before = found[:, unit - 1, :, :, None, :unit]
            found[:, unit, :, :, :unit] = (before + inside[kind, :count, None, :, :, None]).min(axis=2)
        found[:, unit, :, :, unit] = alone[kind, :count]
    return found.transpose(0, 4, 2, 1, 3)


def _steps(task: PartitionTask, states: IntArray) -> tuple[FloatArray, FloatArray]:
    """Terms of `_paths` for each kind of unit behind others, and where it comes first: (kinds, 5, states, states)."""
    values = np.concatenate([kind.values for kind in task.kinds])
    steady, fill = values[:, STEADY], values[:, FILL]
    left = steady + np.maximum(0.0, values[:, QUEUE])
    behind = steady + values[:, BACKLOG]
    terms = np.stack([steady, behind, fill, fill + steady / task.ranks, fill + steady, left, fill + left])
    steps = _least_steps(task, states, terms).transpose(1, 0, 2, 3)
    return steps[:, :5], steps[:, [5, 1, 2, 3, 6]]


def _least_steps(task: PartitionTask, states: IntArray, terms: FloatArray) -> FloatArray:
    """(terms, kinds, states, states) least of each term (ways of all kinds,) of each kind of unit between its ends."""
    width = len(states)
    sides = [np.concatenate([getattr(kind, side) for kind in task.kinds]) for side in ("entry", "exit")]
    number = np.repeat(np.arange(len(task.kinds)), [len(kind) for kind in task.kinds])
    entry, leave = (np.searchsorted(states, side) for side in sides)
    key = (number * width + entry) * width + leave
    order = np.argsort(key, kind="stable")
    ascending = key[order]
    first = np.append(0, np.flatnonzero(ascending[1:] != ascending[:-1]) + 1)
    found = np.full((len(terms), len(task.kinds) * width * width), np.inf)
    found[:, ascending[first]] = np.minimum.reduceat(terms[:, order], first, axis=1)
    return found.reshape(len(terms), len(task.kinds), width, width)
