"""Segments: every row of consecutive units that a pipeline rank may hold, and the ways to run it, in one table."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import (
    ACTIVATION,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    FloatArray,
    Fragments,
    IntArray,
    joined,
    repeated,
)
from planner.search.stages.task import Partition, PartitionTask, memory_bytes, step_s

BoolArray = NDArray[np.bool_]
Picks = list[int]
"""Row of the table for every chunk."""
ROUNDING = 1e-12
_BEGIN = -1


@dataclass(frozen=True, slots=True)
class Group:
    """Ways of one kind of segment between two boundary states: rows ``first:last`` of the table.

    ``starts`` are the units where such a segment may begin; ``rows`` are the ways' numbers in ``source``.
    """

    starts: range
    length: int
    entry: int
    exit: int
    first: int
    last: int
    source: Fragments
    rows: IntArray


@dataclass(frozen=True, eq=False)
class SegmentEnds:
    """Segments by where they end: a place is a boundary state behind so many units.

    ``targets`` (ends,) are the places where any ends, in ascending order; ``source`` and ``group`` (most, ends) are
    where those that end there begin, and their groups, in the order of groups, with -1 and 0 where there are fewer.
    """

    source: IntArray
    group: IntArray
    targets: IntArray

    @classmethod
    def of(cls, groups: Sequence[Group], width: int) -> SegmentEnds:
        """Of groups in `width` boundary states."""
        shape = [(len(g.starts), g.starts.start, g.length, g.entry, g.exit) for g in groups]
        counts, first, length, entry, leave = np.array(shape, dtype=np.int64).reshape(-1, 5).T
        group = np.repeat(np.arange(len(groups)), counts)
        start = np.arange(len(group)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        target = (start + length[group]) * width + leave[group]
        order = np.argsort(target, kind="stable")
        targets, begins, each = np.unique(target[order], return_index=True, return_counts=True)
        at = np.arange(len(order)) - np.repeat(begins, each), np.repeat(np.arange(len(targets)), each)
        sources = np.full((each.max(initial=1), len(targets)), -1)
        sources[at] = (start * width + entry[group])[order]
        numbers = np.zeros_like(sources)
        numbers[at] = group[order]
        return cls(sources, numbers, targets)

    def windows(self, firsts: IntArray, lasts: IntArray) -> list[Window]:
        """For chunks one after the other, segments that end from place `firsts` on, before that of `lasts`."""
        lows = self.targets.searchsorted(firsts)
        counts = np.maximum(self.targets.searchsorted(lasts) - lows, 0)
        ends = np.cumsum(counts)
        inside = np.arange(counts.sum()) + np.repeat(lows - ends + counts, counts)
        # Before the first chunk there is one place, the begin of the network.
        places = np.append(0, self.targets)
        begin, size = (np.repeat(each[:-1], counts) for each in (np.append(0, lows + 1), np.append(1, counts)))
        source = places.searchsorted(self.source)
        source[places.take(source, mode="clip") != self.source] = -1
        source = source[:, inside] - begin
        source = np.where((source < 0) | (source >= size), size, source)
        edges = zip(lows.tolist(), counts.tolist(), (ends - counts).tolist(), strict=True)
        return [
            Window(source[:, first : first + count], self.group[:, low : low + count]) for low, count, first in edges
        ]


class Window(NamedTuple):
    """Segments (most, places) that one chunk may be, by the place where they end.

    ``source`` is the number of the place where each begins among those where the chunk before may end, how many these
    are where it is none of them; ``group`` its group.
    """

    source: IntArray
    group: IntArray


@dataclass(frozen=True, slots=True)
class _Length:
    starts: range
    length: int
    ways: Fragments
    send_s: FloatArray


class Segments:
    """Segments in which no rank is busy for more than about `slack` times its even share.

    Attributes
    ----------
    groups : kinds of segment
    values : (ways, 7) as in `Fragments.values`, the messages at a segment's begin included
    fill, busy : (ways,) both terms of the objective
    offsets : (groups,) first row of each group
    longest : units of the longest segment
    states : place of each boundary state in arrays over states; that of the network's two ends is 0
    exact : whether all ways are there that may matter
    complete : whether every segment is there
    share_s : what a rank has to do at least where the work is shared out evenly
    longest_s : segments that are left out keep their rank busy for longer
    least_fill_s : what all units together add to the fill at least
    """

    def __init__(self, task: PartitionTask, slack: float, width: int) -> None:
        self.task, self.width, self.criteria = task, width, task.criteria
        self.least = np.array([kind.values[:, STEADY].min() for kind in task.kinds])
        counts = np.array(task.counts)
        self.least_fill_s = float(np.array([kind.values[:, FILL].min() for kind in task.kinds]) @ counts)
        self.share_s = max(float(self.least @ counts) / task.ranks, float(self.least.max()))
        self._ends = _chunk_ends(task)
        whole = task.pieces == 1 or bool(task.cuts)
        self.longest_s = np.inf if whole else self._longest(slack)
        self.complete = True
        self._powers: list[dict[int, Fragments]] = [{} for _ in task.kinds]
        self._begins = np.concatenate(([0], np.cumsum(task.counts))).tolist()
        changes = np.any(task.sends_s[1:] != task.sends_s[:-1], axis=1)
        # Units before which the message is another than before the one before; there is none before the network.
        self._differs = [1, *(2 + np.flatnonzero(changes)).tolist()]
        kinds = [*self._inside(), *self._across()]
        self.exact = all(kind.ways.exact for kind in kinds)
        states = sorted({_BEGIN, *(s for k in task.kinds for side in (k.entry, k.exit) for s in side.tolist())})
        self.states = {state: place for place, state in enumerate(states)}
        self._fill_table(kinds)

    def _longest(self, slack: float) -> float:
        """Seconds that a segment may take; turns even out where one unit more or the longest one is room enough."""
        even, longest = self.share_s / self.task.chunks, float(self.least.max())
        if self.task.chunks == 1:
            return slack * max(even, longest) + longest
        return slack * max(even + float(self.least[int(np.argmax(self.task.counts))]), longest)

    def longer_s(self, slack: float) -> float:
        """Least seconds of a partition with a segment that is too long for a table of this slack."""
        return self._longest(slack) + self.least_fill_s

    def allowed_of(self, limits_bytes: FloatArray, transient: float | None = None) -> tuple[BoolArray, list[int]]:
        """Whether ways have the memory of each kind of chunk, (kinds, ways), and the kind of each chunk.

        Chunks of a kind have room for the same ways: each has its micro-batches in flight and its own of the limits
        (chunks,). What stands while one unit goes backward counts with the rest, or has a limit of its own.
        """
        keys = list(zip(self.task.in_flight.tolist(), limits_bytes.tolist(), strict=True))
        places = {key: number for number, key in enumerate(dict.fromkeys(keys))}
        flights, limits = np.array(list(places)).T[:, :, None]
        needed = flights * self.values[:, ACTIVATION] + self.values[:, RESIDENT]
        once = self.values[:, TRANSIENT]
        if transient is None:
            allowed: BoolArray = needed + once <= limits * (1 + ROUNDING)
        else:
            allowed = (needed <= limits * (1 + ROUNDING)) & (once <= transient * (1 + ROUNDING))
        rows = dict[bytes, int]()
        alike = [rows.setdefault(row.tobytes(), len(rows)) for row in allowed]
        return allowed[[alike.index(row) for row in range(len(rows))]], [alike[places[key]] for key in keys]

    def _fill_table(self, kinds: list[_Length]) -> None:
        self.groups: list[Group] = []
        tables, sends, size = [np.zeros((0, 7))], list[float](), 0
        for kind in kinds:
            ways = kind.ways
            pairs = list(dict.fromkeys(zip(ways.entry.tolist(), ways.exit.tolist(), strict=True)))
            for entry, leave in pairs:
                rows = np.arange(len(ways))
                if len(pairs) > 1:
                    rows = np.flatnonzero((ways.entry == entry) & (ways.exit == leave))
                ends = (self.states[entry], self.states[leave])
                self.groups.append(Group(kind.starts, kind.length, *ends, size, size + len(rows), ways, rows))
                sends += [float(kind.send_s[entry]) if entry >= 0 and len(kind.send_s) else 0.0] * len(rows)
                tables.append(ways.values.take(rows, axis=0))
                size += len(rows)
        self.values, sends_s = np.concatenate(tables), np.array(sends)
        self.fill, steady = self.values[:, FILL], self.values[:, STEADY]
        self.fill += self.task.fill_sends * sends_s
        steady += self.task.waits_s(sends_s, steady)
        self.offsets = np.array([g.first for g in self.groups], dtype=np.int64)
        self.longest = max((g.length for g in self.groups), default=0)
        self.busy = steady + np.maximum(self.values[:, QUEUE], 0.0)

    @cached_property
    def moves(self) -> SegmentEnds:
        """Every segment at every place where it may begin."""
        return SegmentEnds.of(self.groups, len(self.states))

    @cached_property
    def windows(self) -> list[Window]:
        """For each chunk the segments that it may be."""
        low, high = self._reached * len(self.states)
        return self.moves.windows(low, high)

    @cached_property
    def of_turns(self) -> BoolArray:
        """(turns, groups) whether some chunk of each turn may be of each group."""
        begins = np.array([(g.starts.start, g.starts.stop, g.length) for g in self.groups])
        first, last, length = begins.T
        low, high = self._reached
        ranks = self.task.ranks
        ends = low[::ranks, None], high[ranks - 1 :: ranks, None]
        low, high = np.append(0, low[:-1])[::ranks, None], np.append(1, high[:-1])[ranks - 1 :: ranks, None]
        inside: BoolArray = (first < high) & (last > low) & (first + length < ends[1]) & (last + length > ends[0])
        return inside

    @cached_property
    def _reached(self) -> IntArray:
        """(2, chunks) least units up to the end of each chunk, and one more than the most.

        Chunks before and behind hold at least one unit each and at most the longest segment.
        """
        chunks, units = self.task.pieces, self.task.units
        done, left = np.arange(1, chunks + 1), np.arange(chunks)[::-1]
        low = np.maximum(done, units - left * self.longest)
        return np.stack([low, np.minimum(done * self.longest, units - left) + 1])

    def _power(self, kind: int, count: int) -> Fragments:
        return repeated(self.task.kinds[kind], count, self._powers[kind], self.width, self.criteria)

    def _fits(self, units: int, seconds: float) -> bool:
        if units > self.task.units - self.task.pieces + 1:
            return False
        if seconds > self.longest_s:
            self.complete = False
            return False
        return True

    def _inside(self) -> Iterator[_Length]:
        """Segments of one kind of unit."""
        for kind, count in enumerate(self.task.counts):
            for length in range(1, count + 1):
                if not self._fits(length, length * self.least[kind]):
                    break
                starts = range(self._begins[kind], self._begins[kind + 1] - length + 1)
                if rows := self._starts(starts, length):
                    yield from self._placed(rows, length, self._power(kind, length))

    def _across(self) -> Iterator[_Length]:
        """Segments that begin in one kind of unit and end in a later one."""
        counts = self.task.counts
        for first in range(len(counts)):
            inner: Fragments | None = None
            units, seconds = 0, 0.0
            for last in range(first + 1, len(counts)):
                if last > first + 1:
                    units += counts[last - 1]
                    seconds += counts[last - 1] * self.least[last - 1]
                    if not self._fits(units + 2, seconds + self.least[first] + self.least[last]):
                        break
                    whole = self._power(last - 1, counts[last - 1])
                    inner = whole if inner is None else joined(inner, whole, self.width, self.criteria)
                yield from self._between(first, last, inner, units, seconds)

    def _between(self, first: int, last: int, inner: Fragments | None, units: int, seconds: float) -> Iterator[_Length]:
        for left in range(1, self.task.counts[first] + 1):
            spent = seconds + left * self.least[first]
            if not self._fits(units + left + 1, spent + self.least[last]):
                break
            head: Fragments | None = None
            for right in range(1, self.task.counts[last] + 1):
                length = units + left + right
                if not self._fits(length, spent + right * self.least[last]):
                    break
                start = self._begins[first + 1] - left
                starts = range(start, start + 1)
                rows = self._starts(starts, length)
                if not rows:
                    continue
                if head is None:
                    head = self._power(first, left)
                    head = head if inner is None else joined(head, inner, self.width, self.criteria)
                ways = joined(head, self._power(last, right), self.width, self.criteria)
                yield from self._placed(rows, length, ways)

    def _starts(self, starts: range, length: int) -> list[range]:
        """Rows of those starts with which a segment of this length is a chunk that cuts allow."""
        if not self._ends:
            return [starts] if starts else []
        return [range(s, s + 1) for s in starts if s + length in self._ends.get(s, ())]

    def _placed(self, rows: list[range], length: int, ways: Fragments) -> Iterator[_Length]:
        """Split where the message before the segment differs; there is none before the network."""
        if not len(ways):
            return
        for starts in rows:
            low, high = bisect_right(self._differs, starts.start), bisect_left(self._differs, starts.stop)
            for begin, end in pairwise([starts.start, *self._differs[low:high], starts.stop]):
                yield _Length(range(begin, end), length, ways, self.task.sends_s[begin - 1] if begin else np.zeros(0))


def _chunk_ends(task: PartitionTask) -> dict[int, set[int]]:
    """Where a chunk that begins at a unit may end, by first unit; empty where several cuts are free.

    Ranges of different cuts do not overlap, so that every row of such chunks has each cut once.
    """
    cuts = (range(1, task.units),) if task.pieces == 2 and not task.cuts else task.cuts
    if not cuts:
        return {}
    found: dict[int, set[int]] = {}
    places = [range(1), *cuts, range(task.units, task.units + 1)]
    for begins, ends in pairwise(places):
        for begin in begins:
            found.setdefault(begin, set()).update(end for end in ends if end > begin)
    return found


def objective_s(segments: Segments, picks: Picks) -> float:
    """Seconds of the step."""
    passes = segments.values[picks][:, [FILL, STEADY]].sum(axis=1)
    return step_s(segments.task, segments.fill[picks], segments.busy[picks], passes)


def made(segments: Segments, picks: Picks, lower_s: float) -> Partition:
    """The partition of these rows, with a bound on all."""
    places = (np.searchsorted(segments.offsets, picks, side="right") - 1).tolist()
    groups = [segments.groups[place] for place in places]
    labels = [g.source.labels[g.rows[row - g.first]] for g, row in zip(groups, picks, strict=True)]
    return Partition(
        ends=tuple(accumulate(group.length for group in groups)),
        labels=tuple(np.concatenate(labels).tolist()),
        objective_s=objective_s(segments, picks),
        lower_bound_s=lower_s,
        fill_s=segments.values[picks, FILL],
        busy_s=segments.busy[picks],
        memory_bytes=memory_bytes(segments.task, segments.values[picks]),
        exact=segments.exact,
    )


def unlimited_s(segments: Segments) -> float:
    """A bound on every partition, its memory aside: the even share of the least time, and the least fill."""
    return segments.share_s + segments.least_fill_s
