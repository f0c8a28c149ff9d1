"""Stage partition: which consecutive units every pipeline rank holds, and how it runs them.

With x the seconds that a chunk adds to the fill of the pipeline and y those that it keeps its own rank busy, the
partition minimises ::

    sum over chunks x  +  sum over turns max over ranks y

and, with several chunks a rank, what turns of unequal length cost
(`planner.search.configurations.schedule_shapes.uneven_s`), under the memory limit of every rank. A turn is one chunk
of each rank; with one chunk a rank the second term is the busiest rank's time. The least first term for given limits
on y follows by dynamic programming over the cuts (Narayanan et al., PipeDream, SOSP 2019; Zheng et al., Alpa, OSDI
2022); the limits are moved over the values of y.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import compress

import numpy as np

from planner.search.stages.chain_bound import unlike
from planner.search.stages.chunk_terms import memory_bytes, step_s, turns_s
from planner.search.stages.cutting import cut, reaches
from planner.search.stages.exact_turns import SHORT, exact_turns
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
from planner.search.stages.listed_cuts import few_cuts
from planner.search.stages.listed_search import listed_partition
from planner.search.stages.one_rank import CLOSE, choose
from planner.search.stages.outcome import Partition
from planner.search.stages.segments import ROUNDING, BoolArray, PartitionTask, Segments

__all__ = ["Partition", "PartitionTask", "partition"]

Picks = list[int]
"""Row of the table for every chunk."""

SCANS = 64
"""Most limits on the busiest rank that are tried before a partition is only bounded."""
_SLACK = (1.15, 1.6, np.inf)
_TIGHT = (1.06, *_SLACK)
"""With one chunk a rank: what is found is proven to be the best where longer segments take too long."""
_SHARES = (1.0, 0.96, 0.9, 0.8)
_WAYS = 4
"""Most ways of a unit by which ranks share their memory out."""
_LESS = 0.8
"""How much less than the one before each of them keeps."""
_SETS_OF_TURNS = tuple(slice(*ends) for ends in ((0, None), (1, -1), (1, None), (0, -1), (0, 1), (-1, None)))
"""Turns whose limits are lowered together, one set after the other."""


def partition(
    task: PartitionTask, *, width: int = WIDTH, enough_s: float = np.inf, close: float = CLOSE
) -> Partition | None:
    """The best partition; None where none fits. On one rank any will do that takes `enough_s` and more.

    There the relative difference `close` is not worth a search either.

    On one rank it is exact where `width` ways through the first units suffice
    (`planner.search.stages.one_rank`). With one chunk a rank it is exact while no fragment has more than `width` ways
    and the limit settles within `SCANS` trials, and bounded otherwise. Several chunks share the memory of their rank
    in proportion to what an average unit takes in each, and their bound is that without the memory limit's share in it.
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
    best: Partition | None = None
    bound = np.inf
    for slack in _TIGHT if task.chunks == 1 else _SLACK:
        segments = Segments(task, slack, width)
        found = (_search if task.chunks == 1 else _search_turns)(segments) if segments.groups else None
        if found is not None and (best is None or found.objective_s < best.objective_s):
            best = found
        bound = np.inf if found is None else found.lower_bound_s
        if segments.complete:
            break
        # A longer segment than any here keeps its rank busy for so long.
        bound = min(bound, segments.longest_s + segments.least_fill_s)
        if best is not None and (task.chunks > 1 or segments.longest_s + segments.least_fill_s >= best.objective_s):
            break
    return best and replace(best, lower_bound_s=min(bound, best.objective_s))


def lists_cuts(task: PartitionTask) -> bool:
    """Whether every cut of a chain of unlike units is tried, with all of their ways."""
    return task.chunks > 1 and unlike(task.counts, task.pieces) and few_cuts(task.units, task.pieces)


def _whole(task: PartitionTask, width: int, enough_s: float, close: float) -> Partition | None:
    """The whole network on one rank."""
    ways, bound = choose(task, width, enough_s, close)
    if ways is None:
        return None
    kinds = [kind for kind, count in zip(task.kinds, task.counts, strict=True) for _ in range(count)]
    values = np.array([kind.values[way] for kind, way in zip(kinds, ways.tolist(), strict=True)])
    sums = values.sum(axis=0)
    behind = np.concatenate([[0.0], np.cumsum(values[:-1, BACKLOG])])
    busy = sums[STEADY] + max(0.0, float((behind + values[:, QUEUE]).max()))
    held = task.in_flight[0] * sums[ACTIVATION] + sums[RESIDENT] + values[:, TRANSIENT].max()
    objective = float(sums[FILL] + busy)
    return Partition(
        ends=(task.units,),
        labels=tuple(int(kind.labels[way, 0]) for kind, way in zip(kinds, ways.tolist(), strict=True)),
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
    return True, _made(segments, picks, _turns(segments, picks) if task.uneven_s is None else _unlimited(segments))


class _Cutter:
    """Cuts of one table of segments under changing limits."""

    def __init__(self, segments: Segments, limits_bytes: FloatArray) -> None:
        task = segments.task
        self.segments = segments
        keys = list(zip(task.in_flight.tolist(), limits_bytes.tolist(), strict=True))
        places = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        self.allowed: BoolArray = np.stack([segments.allowed(*key) for key in places])
        """(kinds, ways) whether a kind of chunk has the memory."""
        self.kinds = [places[key] for key in keys]
        self.limits = np.unique(segments.busy[np.any(self.allowed, axis=0)])
        """Values that the limit on a rank's time may take."""
        usable = np.where(self.allowed & np.isfinite(segments.fill), segments.busy, np.inf)
        self.least_busy = np.minimum.reduceat(usable, segments.offsets, axis=1)
        """(kinds, groups) the least such value of each group, for each kind of chunk."""

    def _rows(self, limits_s: FloatArray) -> tuple[IntArray, FloatArray, list[int]]:
        """Kinds of chunk (rows,) and limits (rows, 1) that occur together, and the row of each chunk."""
        pairs = list(zip(self.kinds, limits_s.tolist(), strict=True))
        places = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        kinds, limits = np.array(list(places)).T
        return kinds.astype(np.int64), limits[:, None] * (1 + ROUNDING), [places[pair] for pair in pairs]

    def _exists(self, limits_s: FloatArray) -> bool:
        """Whether there is a cut with each chunk's time under its limit, (chunks,)."""
        kinds, limits, which = self._rows(limits_s)
        numbers = range(len(self.segments.groups))
        fits = [list(compress(numbers, row)) for row in (self.least_busy[kinds] <= limits).tolist()]
        return reaches(self.segments, fits, which)

    def picks(self, limits_s: FloatArray) -> Picks | None:
        """Rows of the cheapest fill with each chunk's time under its limit, (chunks,)."""
        segments = self.segments
        kinds, limits, which = self._rows(limits_s)
        tables = np.where(self.allowed[kinds] & (segments.busy <= limits), segments.fill, np.inf)
        groups = cut(segments, np.minimum.reduceat(tables, segments.offsets, axis=1), which)
        if groups is None:
            return None
        pairs = list(zip(groups, which, strict=True))
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

    def least(self, high: int, limits_s: FloatArray, lowered: BoolArray) -> tuple[int, Picks | None]:
        """First place in `limits` to which chunks can be `lowered`, (chunks,), given that `high` is one; and that cut.

        Chunks that could not hold all units together, if each were as long as it may, need not be tried.
        """
        places = np.searchsorted(self.limits, limits_s)[:, None]
        trials = np.where(lowered[:, None], np.minimum(places, np.arange(high)), places)
        held = np.take_along_axis(self._longest, trials, axis=1).sum(axis=0)
        low, last, step = int(np.searchsorted(held, self.segments.task.units)), high, 1

        def limits_at(place: int) -> FloatArray:
            return np.where(lowered, np.minimum(limits_s, self.limits[place]), limits_s)

        while low < high:
            # What all units together need is nearly always enough.
            trial = min(low + step - 1, (low + high) // 2)
            if self._exists(limits_at(trial)):
                high = trial
            else:
                low, step = trial + 1, 2 * step
        return low, self.picks(limits_at(low)) if low < last else None


def _search(segments: Segments) -> Partition | None:
    """One chunk a rank: move the limit on the busiest rank from the least feasible one upwards."""
    task = segments.task
    cutter = _Cutter(segments, np.full(task.pieces, task.limit_bytes))
    if not len(cutter.limits):
        return None

    def limits_of(place: int) -> FloatArray:
        return np.full(task.pieces, cutter.limits[place])

    best = cutter.picks(limits_of(-1))
    if best is None:
        return None
    best_s, least_fill, bound = _objective(segments, best), _fill(segments, best), np.inf
    place, _ = cutter.least(len(cutter.limits) - 1, limits_of(-1), np.ones(task.pieces, dtype=np.bool_))
    for trial in range(SCANS + 1):
        if place >= len(cutter.limits) or cutter.limits[place] + least_fill >= best_s * (1 - ROUNDING):
            break
        if trial == SCANS:
            bound = float(cutter.limits[place]) + least_fill
            break
        picks = cutter.picks(limits_of(place))
        assert picks is not None  # there is a cut at a lower limit
        if _objective(segments, picks) < best_s:
            best, best_s = picks, _objective(segments, picks)
        if _fill(segments, picks) <= least_fill * (1 + ROUNDING):
            break
        place += 1
    return _made(segments, best, min(best_s, bound) if segments.exact else _unlimited(segments))


def _unlimited(segments: Segments) -> float:
    """A bound on every partition, its memory aside: the even share of the least time, and the least fill."""
    return segments.share_s + segments.least_fill_s


def _fill(segments: Segments, picks: Picks) -> float:
    return float(segments.fill[picks].sum())


def _turns(segments: Segments, picks: Picks) -> float:
    return turns_s(segments.task, segments.fill[picks], segments.busy[picks])


def _objective(segments: Segments, picks: Picks) -> float:
    passes = segments.values[picks][:, [FILL, STEADY]].sum(axis=1)
    return step_s(segments.task, segments.fill[picks], segments.busy[picks], passes)


def _search_turns(segments: Segments) -> Partition | None:
    """Several chunks a rank: limits on each turn, lowered one set of turns after the other while that pays.

    Chunks share the memory of their rank by what some usual way to run the most frequent unit takes in each; the best
    of several usual ways counts.
    """
    task = segments.task
    best: Picks | None = None
    for usual in _usual(task):
        for share in _SHARES:
            cutter = _Cutter(segments, _shares(task, usual, share))
            picks = _lowered(cutter) if len(cutter.limits) else None
            if picks is None:
                break
            if np.all(memory_bytes(task, segments.values[picks]) <= task.limit_bytes * (1 + ROUNDING)):
                if best is None or _objective(segments, picks) < _objective(segments, best):
                    best = picks
                break
    return None if best is None else _made(segments, best, _unlimited(segments))


def _usual(task: PartitionTask) -> list[FloatArray]:
    """Ways (values) of the most frequent unit by which memory is shared out: the fastest, and some that keep less."""
    block = task.kinds[int(np.argmax(task.counts))].values
    order = np.lexsort((block[:, ACTIVATION], block[:, STEADY]))
    lowest = np.minimum.accumulate(block[order, ACTIVATION])
    front = order[np.concatenate(([True], lowest[1:] < _LESS * lowest[:-1]))]
    return [block[way] for way in front[:_WAYS]]


def _shares(task: PartitionTask, usual: FloatArray, share: float) -> FloatArray:
    """(chunks,) bytes of its rank's memory that a chunk may take: single units at both ends come first."""
    most = int(np.argmax(task.counts))
    weight = task.in_flight * usual[ACTIVATION] + usual[RESIDENT]
    reserved = np.zeros(task.pieces)
    reserved[0] = sum(float(kind.values[:, RESIDENT].min()) for kind in task.kinds[:most])
    reserved[-1] = sum(float(kind.values[:, RESIDENT].min()) for kind in task.kinds[most + 1 :])
    taken = np.bincount(task.rank_of, reserved, task.ranks)
    whole = np.bincount(task.rank_of, weight, task.ranks)
    room = np.maximum(share * task.limit_bytes - taken - usual[TRANSIENT], 0.0)
    parts = room[task.rank_of] * weight / np.maximum(whole[task.rank_of], 1e-30)
    shares: FloatArray = reserved + parts + usual[TRANSIENT]
    return shares


def _lowered(cutter: _Cutter) -> Picks | None:
    segments, task = cutter.segments, cutter.segments.task
    limits = np.full(task.chunks, cutter.limits[-1])
    best = cutter.picks(np.repeat(limits, task.ranks))
    if best is None:
        return None
    best_s = _objective(segments, best)
    for chosen in _SETS_OF_TURNS:
        if not len(limits[chosen]):
            continue
        lowered = np.zeros((task.chunks, task.ranks), dtype=np.bool_)
        lowered[chosen] = True
        high = int(np.searchsorted(cutter.limits, limits[chosen].max()))
        place, picks = cutter.least(high, np.repeat(limits, task.ranks), lowered.ravel())
        if picks is not None and (seconds := _objective(segments, picks)) <= best_s:
            best, best_s = picks, seconds
            limits[chosen] = np.minimum(limits[chosen], cutter.limits[place])
    return best


def _made(segments: Segments, picks: Picks, lower_s: float) -> Partition:
    labels: list[int] = []
    ends: list[int] = []
    for row in picks:
        group = segments.groups[int(np.searchsorted(segments.offsets, row, side="right")) - 1]
        labels += group.source.labels[group.rows[row - group.first]].tolist()
        ends.append(len(labels))
    return Partition(
        ends=tuple(ends),
        labels=tuple(labels),
        objective_s=_objective(segments, picks),
        lower_bound_s=lower_s,
        fill_s=segments.values[picks, FILL],
        busy_s=segments.busy[picks],
        memory_bytes=memory_bytes(segments.task, segments.values[picks]),
    )
