"""The recurrence of the stage partition: cheapest way to cut a chain so that every chunk is one allowed segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.stages.fragments import FloatArray
from planner.search.stages.segments import Segments


def cut(segments: Segments, costs: FloatArray, which: Sequence[int]) -> list[int] | None:
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
    moves = segments.moves
    priced = list(costs[:, moves.group])
    best = list(np.full((chunks + 1, (units + 1) * width), np.inf))
    best[0][0] = 0.0
    for chunk, (row, window) in enumerate(zip(which, segments.windows, strict=True)):
        if len(window.targets):
            sums = best[chunk].take(window.source)
            sums += priced[row][window.inside]
            best[chunk + 1][window.targets] = np.minimum.reduceat(sums, window.begins)
    place = units * width
    if not np.isfinite(best[chunks][place]):
        return None
    picks = []
    for chunk in reversed(range(chunks)):
        inside = moves.ending[place]
        sums = best[chunk].take(moves.source[inside])
        sums += priced[which[chunk]][inside]
        pick = inside.start + int(sums.argmin())
        picks.append(int(moves.group[pick]))
        place = int(moves.source[pick])
    return picks[::-1]


def cut_turns(segments: Segments, tables: FloatArray, which: Sequence[int], turns: FloatArray) -> list[int] | None:
    """Row of every chunk with the least sum of costs and of what the limits on turns cost; None where no row fits.

    Each turn, one chunk of each rank, has one of several limits.

    Parameters
    ----------
    tables : (kinds, limits, ways) seconds of each way, infinite where it is not allowed
    which : (chunks,) kind of each chunk
    turns : (turns, limits) seconds that a limit costs in each turn

    Notes
    -----
    As `cut`, with ``best[c, i, state, limit]`` inside of a turn; with each turn the best limit is settled.
    """
    units, width, ranks = segments.task.units, len(segments.states), len(which) // len(turns)
    moves, shape = segments.moves, ((segments.task.units + 1) * len(segments.states), tables.shape[1])
    priced = np.minimum.reduceat(tables, segments.offsets, axis=2).transpose(0, 2, 1).take(moves.group, axis=1)
    begin = np.full((shape[0], 1), np.inf)
    begin[0] = 0.0
    best, before, settled = np.broadcast_to(begin, shape), [], []
    for chunk, (row, window) in enumerate(zip(which, segments.windows, strict=True)):
        before.append(best)
        best = np.full(shape, np.inf)
        if len(window.targets):
            sums = before[-1].take(window.source, axis=0)
            sums += priced[row][window.inside]
            best[window.targets] = np.minimum.reduceat(sums, window.begins, axis=0)
        if (chunk + 1) % ranks == 0:
            whole = best + turns[chunk // ranks]
            settled.append(whole.argmin(axis=1))
            best = np.broadcast_to(whole.min(axis=1)[:, None], shape)
    place = units * width
    if not np.isfinite(best[place, 0]):
        return None
    picks, limit = [], 0
    for chunk in reversed(range(len(which))):
        if (chunk + 1) % ranks == 0:
            limit = int(settled[chunk // ranks][place])
        inside = moves.ending[place]
        sums = before[chunk][:, limit].take(moves.source[inside]) + priced[which[chunk]][inside, limit]
        pick = inside.start + int(sums.argmin())
        group = segments.groups[int(moves.group[pick])]
        picks.append(group.first + int(tables[which[chunk], limit, group.first : group.last].argmin()))
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
