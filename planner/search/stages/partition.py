"""Stage partition: which consecutive units every pipeline rank holds, and how it runs them.

With x the seconds that a chunk adds to the fill of the pipeline and y those that it keeps its own rank busy, the
partition minimises ::

    sum over chunks x  +  sum over turns max over ranks y

and, with several chunks a rank, what turns of unequal length cost
(`planner.search.configurations.schedule_shapes.uneven_s`), under the memory limit of every rank. A turn is one chunk
of each rank; with one chunk a rank the second term is the busiest rank's time. The least first term for given limits
on y follows by dynamic programming over the cuts (Narayanan et al., PipeDream, SOSP 2019; Zheng et al., Alpa, OSDI
2022); the limit on the busiest rank is moved over the values of y, those on turns are chosen with the cuts. Where the
best partition without the memory limit keeps to it, that is the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from planner.search.stages.chain_bound import few_cuts, unlike
from planner.search.stages.cutting import cut
from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    WIDTH,
    FloatArray,
    IntArray,
)
from planner.search.stages.one_rank import CLOSE, choose
from planner.search.stages.segments import ROUNDING, Picks, Segments, made, objective_s, unlimited_s
from planner.search.stages.task import Partition, PartitionTask, turns_s, unlimited
from planner.search.stages.turn_search import SHORT, exact_turns, listed_partition, search_limited, search_turns

__all__ = ["Partition", "PartitionTask", "partition"]

SCANS = 64
"""Most limits on the busiest rank that are tried before a partition is only bounded."""
_SLACK = (1.15, 1.6, np.inf)
_TIGHT = (1.06, *_SLACK)
"""With one chunk a rank: what is found is proven to be the best where longer segments take too long."""


def partition(
    task: PartitionTask, *, width: int = WIDTH, enough_s: float = np.inf, close: float = CLOSE
) -> Partition | None:
    """The best partition; None where none fits. On one rank any will do that takes `enough_s` and more.

    There the relative difference `close` is not worth a search either.

    On one rank it is exact where `width` ways through the first units suffice
    (`planner.search.stages.one_rank`). With one chunk a rank it is exact while no fragment has more than `width` ways
    and the limit settles within `SCANS` trials, and bounded otherwise. So it is of several chunks a rank on a short
    chain; on a long one what turns of unequal length cost, and how chunks share the memory of their rank, is settled by
    rule of thumb (`planner.search.stages.turn_search`), and the bound minds neither.
    Where passes of both kinds follow apart, the partition is the one that is best as if they alternated, and its
    objective what it takes then; the bound stays.
    """
    found = _partition(task, width, enough_s, close)
    if found is None or task.apart_s is None:
        return found
    return replace(found, objective_s=max(found.objective_s, task.apart_s(found)))


def _partition(task: PartitionTask, width: int, enough_s: float, close: float) -> Partition | None:
    if task.units < task.pieces:
        return None
    if task.pieces == 1:
        return _whole(task, width, enough_s, close)
    if task.chunks > 1 and task.units <= SHORT:
        settled, found = _settled(task, width)
        if settled:
            return found
    if lists_cuts(task):
        listed = listed_partition(task)
        if listed is not None:
            return listed
    free = _unlimited_partition(task, width)
    if free is not None and np.all(free.memory_bytes <= task.limit_bytes * (1 + ROUNDING)):
        return free
    if task.chunks == 1:
        return _cut(task, width)
    return None if free is None else _within_memory(task, width, free.ends)


def _unlimited_partition(task: PartitionTask, width: int) -> Partition | None:
    """The best partition were there no memory limit: none is better where it keeps to the limit.

    Ways compete by time alone, so that few of them are left. With one chunk a rank it is not looked for where ranks
    would have to hold more than they can if the fastest ways were shared out evenly.
    """
    free = unlimited(task)
    if task.chunks > 1:
        for slack in _SLACK:
            segments = Segments(free, slack, width)
            found = search_turns(segments) if segments.groups else None
            if found is not None or segments.complete:
                return found
    if not task.roomy:
        times = [kind.values[:, [FILL, STEADY]].sum(axis=1) for kind in free.kinds]
        ways = np.array([kind.values[int(np.argmin(time))] for kind, time in zip(free.kinds, times, strict=True)])
        even = np.array(task.counts) @ ways / task.pieces
        standing = np.bincount(task.rank_of, task.in_flight * even[ACTIVATION] + even[RESIDENT])
        if float(standing.max() + ways[:, TRANSIENT].max()) > task.limit_bytes:
            return None
    return _cut(free, width)


def _cut(task: PartitionTask, width: int) -> Partition | None:
    """One chunk a rank, by segments of some times their even share: of longer ones until they prove the best.

    Where no way of a segment was left out, those are passed over that are too short to prove what was found.
    """
    best: Partition | None = None
    segments: Segments | None = None
    bound, exact = np.inf, True
    for slack in _TIGHT:
        if best is not None and segments is not None and exact and segments.longer_s(slack) < best.objective_s:
            continue
        segments = Segments(task, slack, width)
        found = _search(segments) if segments.groups else None
        if found is not None and (best is None or found.objective_s < best.objective_s):
            best = found
        exact = exact and segments.exact
        bound = np.inf if found is None else found.lower_bound_s
        if segments.complete:
            break
        bound = min(bound, segments.longer_s(slack))
        if best is not None and segments.longer_s(slack) >= best.objective_s:
            break
    return best and replace(best, lower_bound_s=min(bound, best.objective_s), exact=exact)


def _within_memory(task: PartitionTask, width: int, ends: Sequence[int]) -> Partition | None:
    """Several chunks a rank that share the memory as ones with these ``ends`` would."""
    for slack in _SLACK[:-1]:
        segments = Segments(task, slack, width)
        found = search_limited(segments, ends) if segments.groups else None
        if found is not None or segments.complete:
            return found
    return None


def lists_cuts(task: PartitionTask) -> bool:
    """Whether every cut of a chain of unlike units is tried, with all of their ways."""
    return task.chunks > 1 and unlike(task.counts, task.pieces) and few_cuts(task.units, task.pieces)


def _whole(task: PartitionTask, width: int, enough_s: float, close: float) -> Partition | None:
    """The whole network on one rank."""
    ways, bound = choose(task, width, enough_s, close)
    if ways is None:
        return None
    picked = list(zip(task.kinds, np.split(ways, np.cumsum(task.counts)[:-1]), strict=True))
    values = np.concatenate([kind.values.take(own, axis=0) for kind, own in picked])
    sums = values.sum(axis=0)
    behind = np.concatenate([[0.0], np.cumsum(values[:-1, BACKLOG])])
    busy = sums[STEADY] + max(0.0, float((behind + values[:, QUEUE]).max()))
    held = task.in_flight[0] * sums[ACTIVATION] + sums[RESIDENT] + values[:, TRANSIENT].max()
    objective = float(sums[FILL] + busy)
    return Partition(
        ends=(task.units,),
        labels=tuple(np.concatenate([kind.labels[own, 0] for kind, own in picked]).tolist()),
        objective_s=objective,
        lower_bound_s=min(bound, objective),
        fill_s=sums[[FILL]],
        busy_s=np.array([busy]),
        memory_bytes=np.array([held]),
    )


def proves_misfit(task: PartitionTask, tried: PartitionTask, width: int) -> bool:
    """Whether that no partition of `tried` was found proves that none of `task` fits.

    Not where ways were left out before, where fragments were thinned, or where ranks share memory by rule of thumb.
    """
    if task.units < task.pieces:
        return True
    if task.pieces == 1:
        return bool(np.isinf(choose(task, width)[1]))
    if tried is not task:
        return False
    if task.chunks == 1:
        return Segments(task, np.inf, width).exact
    return task.units <= SHORT and _settled(task, width)[0]


def _settled(task: PartitionTask, width: int) -> tuple[bool, Partition | None]:
    """Whether a short chain was partitioned exactly, and the partition, None where none fits.

    Where turns may even out, its bound is that of all units shared out evenly.
    """
    segments = Segments(task, np.inf, width)
    picks, sure = exact_turns(segments)
    if not (sure and segments.exact):
        return False, None
    if picks is None:
        return True, None
    return True, made(segments, picks, _turns(segments, picks) if task.uneven_s is None else unlimited_s(segments))


class _Cutter:
    """Cuts of one table of segments under changing limits on the time of every chunk."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self.allowed, self.kinds = segments.allowed_of(np.full(segments.task.pieces, segments.task.limit_bytes))
        self.limits = np.unique(segments.busy[np.any(self.allowed, axis=0)])
        """Values that the limit on a rank's time may take."""
        usable = np.where(self.allowed & np.isfinite(segments.fill), segments.busy, np.inf)
        self.least_busy = np.minimum.reduceat(usable, segments.offsets, axis=1)
        """(kinds, groups) the least such value of each group, for each kind of chunk."""

    def exists(self, limit_s: float) -> bool:
        """Whether there is a cut with each chunk's time under the limit."""
        costs = np.where(self.least_busy <= limit_s * (1 + ROUNDING), 0.0, np.inf)
        return cut(self.segments, costs, self.kinds) is not None

    def picks(self, limit_s: float) -> Picks | None:
        """Rows of the cheapest fill with each chunk's time under the limit."""
        segments = self.segments
        within = segments.busy <= limit_s * (1 + ROUNDING)
        tables = np.where(self.allowed & within, segments.fill, np.inf)
        groups = cut(segments, np.minimum.reduceat(tables, segments.offsets, axis=1), self.kinds)
        if groups is None:
            return None
        pairs = list(zip(groups, self.kinds, strict=True))
        rows = {pair: self._row(pair[0], tables[pair[1]]) for pair in dict.fromkeys(pairs)}
        return [rows[pair] for pair in pairs]

    def _row(self, number: int, costs: FloatArray) -> int:
        """The cheapest way of a group, of equal ones the one that keeps its rank busy for least."""
        group = self.segments.groups[number]
        if group.last == group.first + 1:
            return group.first
        inside = slice(group.first, group.last)
        return group.first + int(np.lexsort((self.segments.busy[inside], costs[inside]))[0])

    @cached_property
    def _longest(self) -> IntArray:
        """(chunks, limits) units that each chunk may hold at most under each of `limits`, far below 0 for none."""
        groups, task = self.segments.groups, self.segments.task
        length = np.array([group.length for group in groups])
        begin, end = (np.array([edge(group.starts) for group in groups]) for edge in (min, max))
        inner = (end > 0) & (begin + length < task.units)
        none, limits = -task.units * task.pieces, self.limits * (1 + ROUNDING)
        there = np.stack([begin == 0, inner, end + length == task.units])
        order = np.argsort(self.least_busy, axis=1, kind="stable")
        most = np.full((3, len(order), len(groups) + 1), none)
        most[:, :, 1:] = np.maximum.accumulate(np.where(there, length, none)[:, order], axis=2)
        ascending = np.take_along_axis(self.least_busy, order, axis=1)
        places = np.stack([busy.searchsorted(limits, side="right") for busy in ascending])
        table = np.take_along_axis(most, places[None], axis=2)
        ends = np.ones(task.pieces, dtype=np.int64)
        ends[0], ends[-1] = 0, 2
        found: IntArray = table[ends, self.kinds]
        return found

    def least(self) -> int:
        """First place in `limits` under which there is a cut, the last one if under no other.

        Chunks that could not hold all units together, if each were as long as it may, need not be tried.
        """
        held = self._longest[:, :-1].sum(axis=0)
        low, high, step = int(np.searchsorted(held, self.segments.task.units)), len(self.limits) - 1, 1
        while low < high:
            # What all units together need is nearly always enough.
            trial = min(low + step - 1, (low + high) // 2)
            if self.exists(float(self.limits[trial])):
                high = trial
            else:
                low, step = trial + 1, 2 * step
        return low


def _search(segments: Segments) -> Partition | None:
    """One chunk a rank: move the limit on the busiest rank from the least feasible one upwards."""
    cutter = _Cutter(segments)
    if not len(cutter.limits):
        return None

    best = cutter.picks(float(cutter.limits[-1]))
    if best is None:
        return None
    best_s, least_fill, bound = objective_s(segments, best), _fill(segments, best), np.inf
    place = cutter.least()
    for trial in range(SCANS + 1):
        if place >= len(cutter.limits) or cutter.limits[place] + least_fill >= best_s * (1 - ROUNDING):
            break
        if trial == SCANS:
            bound = float(cutter.limits[place]) + least_fill
            break
        picks = cutter.picks(float(cutter.limits[place]))
        assert picks is not None  # there is a cut at a lower limit
        found_s = objective_s(segments, picks)
        if found_s < best_s:
            best, best_s = picks, found_s
        if _fill(segments, picks) <= least_fill * (1 + ROUNDING):
            break
        place += 1
    return made(segments, best, min(best_s, bound) if segments.exact else unlimited_s(segments))


def _fill(segments: Segments, picks: Picks) -> float:
    return float(segments.fill[picks].sum())


def _turns(segments: Segments, picks: Picks) -> float:
    return turns_s(segments.task, segments.fill[picks], segments.busy[picks])
