"""The recurrence of the stage partition: cheapest way to cut a chain so that every chunk is one allowed segment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray
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


def cut_turns(
    segments: Segments, tables: FloatArray, which: Sequence[int], turns: FloatArray
) -> list[list[int]] | None:
    """Row of every chunk with the least sum of costs and of what the limits on turns cost; None where no row fits.

    Each turn, one chunk of each rank, has one of several limits. Several costs of the same ways are followed together.

    Parameters
    ----------
    tables : (kinds, costs, limits, ways) seconds of each way, infinite where it is not allowed
    which : (chunks,) kind of each chunk
    turns : (turns, costs, limits) seconds that a limit costs in each turn

    Returns
    -------
    (costs, chunks)

    Notes
    -----
    As `cut`, with ``best[c, i, state, limit]`` inside of a turn; with each turn the best limit is settled.
    """
    ranks, moves, shape = len(which) // len(turns), segments.moves, turns.shape[1:]
    least = np.minimum.reduceat(tables, segments.offsets, axis=3).reshape(len(tables), -1, len(segments.groups))
    priced = np.ascontiguousarray(least.transpose(0, 2, 1))
    spans = segments.spans
    best = [np.full((len(span), priced.shape[2]), np.inf) for span in spans]
    best[0][0] = 0.0
    settled = []
    for chunk, (row, window) in enumerate(zip(which, segments.windows, strict=True)):
        if len(window.targets):
            sums = best[chunk].take(window.source - spans[chunk].start, axis=0)
            sums += priced[row].take(moves.group[window.inside], axis=0)
            best[chunk + 1][window.targets - spans[chunk + 1].start] = np.minimum.reduceat(sums, window.begins, axis=0)
        if (chunk + 1) % ranks == 0:
            whole = best[chunk + 1].reshape(-1, *shape) + turns[chunk // ranks]
            settled.append(whole.argmin(axis=2))
            best[chunk + 1].reshape(-1, *shape)[:] = whole.min(axis=2, keepdims=True)
    place = segments.task.units * len(segments.states)
    if place not in spans[-1] or not np.isfinite(best[-1][place - spans[-1].start]).all():
        return None
    return [_picked(segments, tables[:, cost], priced, which, best, settled, cost) for cost in range(shape[0])]


def _picked(
    segments: Segments, tables: FloatArray, priced: FloatArray, which: Sequence[int], best: Sequence[FloatArray],
    settled: Sequence[IntArray], cost: int,
) -> list[int]:  # fmt: skip
    """The row of `cut_turns` for one of the costs, from behind."""
    moves, spans, ranks = segments.moves, segments.spans, len(which) // len(settled)
    place, picks, limit = segments.task.units * len(segments.states), [], 0
    for chunk in reversed(range(len(which))):
        if (chunk + 1) % ranks == 0:
            limit = int(settled[chunk // ranks][place - spans[chunk + 1].start, cost])
        column, inside = cost * tables.shape[1] + limit, moves.ending[place]
        sums = best[chunk][:, column].take(moves.source[inside] - spans[chunk].start)
        sums += priced[which[chunk], :, column].take(moves.group[inside])
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
