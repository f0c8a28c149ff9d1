"""The recurrence of the stage partition: cheapest way to cut a chain so that every chunk is one allowed segment."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from functools import cache
from typing import Any

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.stages.segments import Segments

WORTH_COMPILING = 20_000_000
"""Steps of the recurrence after which machine code pays for its loading."""
_steps = [0]


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
    chunks, width = len(which), len(segments.states)
    size = (segments.task.units + 1) * width
    best = np.full((chunks + 1) * size, np.inf)
    best[0] = 0.0
    made = np.full(chunks * size, -1, dtype=np.int64)
    shape = segments.shape_arrays
    longest = int(shape[2].max())
    room = min(segments.task.units - chunks, chunks * longest - segments.task.units) + 1
    _steps[0] += chunks * int(np.minimum(shape[1] - shape[0], room).sum())
    if _steps[0] > WORTH_COMPILING:
        _compiled()(costs.ravel(), which, *shape, width, size, best, made)
    else:
        lists = [best.tolist(), made.tolist()]
        starts, stops, lengths, entries, exits = (a.tolist() for a in shape)
        table, rows = costs.ravel().tolist(), which.tolist()
        run_cuts(table, rows, starts, stops, lengths, entries, exits, width, size, lists[0], lists[1])
        best, made = np.array(lists[0]), np.array(lists[1], dtype=np.int64)
    place = (segments.task.units) * width
    if not np.isfinite(best[chunks * size + place]):
        return None
    picks = []
    for chunk in reversed(range(chunks)):
        number = int(made[chunk * size + place])
        group = segments.groups[number]
        picks.append(number)
        place = (place // width - group.length) * width + group.entry
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
    moves = segments.moves
    ends = [0] * len(segments.states)
    ends[0] = 1
    for row in which:
        behind = [0] * len(ends)
        for group in fits[row]:
            starts, length, entry, leave = moves[group]
            if found := ends[entry] & starts:
                behind[leave] |= found << length
        ends = behind
    return bool(ends[0] >> segments.task.units & 1)


def run_cuts(
    costs: Sequence[float],
    which: Sequence[int],
    starts: Sequence[int],
    stops: Sequence[int],
    lengths: Sequence[int],
    entries: Sequence[int],
    exits: Sequence[int],
    width: int,
    size: int,
    best: MutableSequence[float],
    made: MutableSequence[int],
) -> None:
    """Fill ``best`` ((chunks + 1) * size,) and ``made`` (chunks * size,); Python runs it on lists, numba on arrays."""
    groups = len(starts)
    chunks, units, longest = len(which), size // width - 1, 1
    for group in range(groups):
        longest = max(longest, lengths[group])
    for chunk in range(chunks):
        before, after, row = chunk * size, (chunk + 1) * size, which[chunk] * groups
        # Chunks before and behind hold at least one unit each and at most the longest segment.
        low = max(chunk, units - (chunks - chunk) * longest)
        high = min(chunk * longest, units - (chunks - chunk)) + 1
        for group in range(groups):
            cost = costs[row + group]
            if cost == np.inf:
                continue
            for start in range(max(starts[group], low), min(stops[group], high)):
                total = best[before + start * width + entries[group]] + cost
                to = (start + lengths[group]) * width + exits[group]
                if total < best[after + to]:
                    best[after + to] = total
                    made[before + to] = group


@cache
def _compiled() -> Any:
    from numba import njit

    return njit(cache=True, nogil=True)(run_cuts)
