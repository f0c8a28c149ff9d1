"""The recurrence of the stage partition: cheapest way to cut a chain so that every chunk is one allowed segment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.stages.segments import Segments


def cut(segments: Segments, costs: FloatArray, which: IntArray) -> list[int] | None:
    """Group of every chunk's segment with the least sum of costs; None where no row of segments fits.

    Parameters
    ----------
    costs : (rows, groups) seconds of each group, infinite where it is not allowed
    which : (chunks,) row of `costs` for each chunk

    Notes
    -----
    With units ``i`` and boundary states ``s``, ``best[c + 1, i + length, exit] = min over groups of
    best[c, i, entry] + cost``. Of equal ways the first group wins.
    """
    chunks, units, width = len(which), segments.task.units, len(segments.states)
    moves, rows = segments.moves, which.tolist()
    # Chunks before and behind hold at least one unit each and at most the longest segment.
    done, left = np.arange(1, chunks + 1), np.arange(chunks)[::-1]
    low = np.maximum(done, units - left * segments.longest)
    high = np.minimum(done * segments.longest, units - left) + 1
    firsts, lasts = (moves.targets.searchsorted(end * width) for end in (low, high))
    begins = moves.begins.tolist()
    priced = list(costs[:, moves.group])
    best = list(np.full((chunks + 1, (units + 1) * width), np.inf))
    best[0][0] = 0.0
    for chunk, (row, first, last) in enumerate(zip(rows, firsts.tolist(), lasts.tolist(), strict=True)):
        if first < last:
            begin, end = begins[first], begins[last]
            sums = best[chunk].take(moves.source[begin:end])
            sums += priced[row][begin:end]
            best[chunk + 1][moves.targets[first:last]] = np.minimum.reduceat(sums, moves.begins[first:last] - begin)
    place = units * width
    if not np.isfinite(best[chunks][place]):
        return None
    ending = dict(zip(moves.targets.tolist(), pairwise(begins), strict=True))
    picks = []
    for chunk in reversed(range(chunks)):
        begin, end = ending[place]
        sums = best[chunk].take(moves.source[begin:end])
        sums += priced[rows[chunk]][begin:end]
        pick = begin + int(sums.argmin())
        picks.append(int(moves.group[pick]))
        place = int(moves.source[pick])
    return picks[::-1]


def reaches(segments: Segments, fits: Sequence[Sequence[int]], which: Sequence[int]) -> bool:
    """Whether some row of segments fits, as `cut` would find one.

    The units behind which a row of so many chunks may end are the bits of one number for each boundary state, so that
    a group of segments moves all of them at once.

    Parameters
    ----------
    fits : (rows,) groups that are allowed in each row
    which : (chunks,) row of `fits` for each chunk
    """
    shifts = segments.shifts
    ends = [0] * len(segments.states)
    ends[0] = 1
    for row in which:
        behind = [0] * len(ends)
        for group in fits[row]:
            starts, length, entry, leave = shifts[group]
            if found := ends[entry] & starts:
                behind[leave] |= found << length
        ends = behind
    return bool(ends[0] >> segments.task.units & 1)
