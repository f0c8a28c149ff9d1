"""Where a chunk of a pipeline may lie, so that chunks before and behind it can hold all other units."""

from __future__ import annotations

import numpy as np

from planner.search.stages.fragments import ACTIVATION, RESIDENT, STEADY, TRANSIENT, FloatArray, IntArray
from planner.search.stages.task import PartitionTask

_ROUNDING = 1e-12


class ChunkPlaces:
    """Rows of consecutive units that may be a chunk where none is busy for longer than `longest_s`.

    Every unit takes its least seconds and bytes of all of its ways, so that no row which may be one is left out. The
    first chunks reach at most as far as if each were as long as it may, and so do the last ones backwards.
    """

    def __init__(self, task: PartitionTask, longest_s: float) -> None:
        pieces, units = task.pieces, task.units
        least = np.array([kind.values.min(axis=0) for kind in task.kinds]).repeat(task.counts, axis=0)
        seconds, kept, held = (_sums(least[:, column]) for column in (STEADY, ACTIVATION, RESIDENT))
        room = task.limit_bytes * (1 + _ROUNDING) - float(least[:, TRANSIENT].min())
        far, which, places = _far(seconds, longest_s)[None], np.zeros(pieces, dtype=np.int64), np.arange(units + 1)
        if np.isfinite(room):
            flights, which = np.unique(task.in_flight, return_inverse=True)
            far = np.minimum(far, [_far(flight * kept + held, room) for flight in flights.tolist()])
        ahead, back, kinds = far.tolist(), [ends.searchsorted(places).tolist() for ends in far], which.tolist()
        reached, rest = [0], [units]
        for kind in kinds:
            reached.append(ahead[kind][reached[-1]])
        for kind in reversed(kinds):
            rest.append(back[kind][rest[-1]])
        self._first: IntArray = np.searchsorted(reached, places)
        """(units + 1,) the first chunk that may begin at each unit: those before reach no farther."""
        self._last: IntArray = pieces - 1 - np.searchsorted(-np.array(rest), -places)
        """(units + 1,) the last chunk that may end before each unit: those behind reach it from the end."""
        # The chunk before the first one that has less in flight may be longer.
        self._furthest: IntArray = np.maximum.accumulate(far[which], axis=0)
        self._spare = units - pieces + 1

    def __call__(self, starts: range, length: int) -> range:
        """The starts from the first to the last with which a row of this length may be a chunk."""
        if len(starts) == 1:
            return starts if self._allows(starts.start, starts.start + length) else starts[:0]
        begin = np.arange(starts.start, starts.stop)
        end = begin + length
        last = np.minimum(self._last[end], begin)
        first = np.maximum(self._first[begin], end - self._spare)
        found = np.flatnonzero((first <= last) & (end <= self._furthest[np.maximum(last, 0), begin]))
        return range(starts.start + int(found[0]), starts.start + int(found[-1]) + 1) if len(found) else starts[:0]

    def _allows(self, begin: int, end: int) -> bool:
        last = min(int(self._last[end]), begin)
        first = max(int(self._first[begin]), end - self._spare)
        return first <= last and end <= int(self._furthest[last, begin])


def _sums(values: FloatArray) -> FloatArray:
    """(units + 1,) sum of the first units."""
    return np.concatenate([[0.0], np.cumsum(values)])


def _far(sums: FloatArray, limit: float) -> IntArray:
    """(units + 1,) the unit behind the longest row from each unit on that takes at most the limit."""
    within = sums + limit
    ends = sums.searchsorted(within + _ROUNDING * np.abs(within), side="right") - 1
    return np.maximum(ends, np.arange(len(sums)))
