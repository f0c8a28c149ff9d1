"""The recurrence of the stage partition: cheapest way to cut a chain so that every chunk is one allowed segment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.stages.segments import BoolArray, Segments, Window

_START = np.array([0.0, np.inf])
"""Sums before the first chunk."""
_MANY = 100_000
"""Sums behind one chunk from which on the compiled loop is worth loading."""


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
    best = [_START]
    for row, window in zip(which, segments.windows, strict=True):
        best.append(_behind(best[-1], costs[row], window))
    # All that ends with the last unit ends in the network's end, the one place behind the last chunk.
    if not np.isfinite(best[-1][0]):
        return None
    picks, place = list[int](), 0
    for chunk in reversed(range(len(which))):
        group, place = _last(best[chunk], costs[which[chunk]], segments.windows[chunk], place)
        picks.append(group)
    return picks[::-1]


def _behind(before: FloatArray, costs: FloatArray, window: Window) -> FloatArray:
    """(places + 1, …) least sums behind a chunk from those before it and costs (groups, …); the last is no place."""
    behind = np.empty((window.source.shape[1] + 1, *before.shape[1:]))
    behind[-1] = np.inf
    if before.ndim == 2 and window.source.size * before.shape[1] >= _MANY:
        from planner.search.compiled import least_sums

        least_sums(before, np.ascontiguousarray(costs), window.source, window.group, behind[:-1])
        return behind
    sums = before.take(window.source, axis=0)
    sums += costs.take(window.group, axis=0)
    sums.min(axis=0, out=behind[:-1])
    return behind


def _last(before: FloatArray, costs: FloatArray, window: Window, place: int) -> tuple[int, int]:
    """Group of the segment behind which one of the sums of `_behind` is the least, and the place before it."""
    source, group = window.source[:, place], window.group[:, place]
    sums = before.take(source)
    sums += costs.take(group)
    pick = int(sums.argmin())
    return int(group[pick]), int(source[pick])


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
    ranks, costs = len(which) // len(turns), tables.shape[1]
    priced = np.minimum.reduceat(tables, segments.offsets, axis=3).transpose(0, 3, 1, 2)
    matter = _matter(segments, priced, turns)
    if not matter.any(axis=1).all():
        return None
    sums, found = np.repeat(_START[:, None], costs, axis=1), list[_Turn]()
    for turn, limits in enumerate(map(np.flatnonzero, matter)):
        inner = priced[:, :, :, limits].reshape(*priced.shape[:2], -1)
        best, chunks = [np.repeat(sums, len(limits), axis=1)], range(turn * ranks, (turn + 1) * ranks)
        for chunk in chunks:
            best.append(_behind(best[-1], inner[which[chunk]], segments.windows[chunk]))
        whole = best.pop().reshape(-1, costs, len(limits)) + turns[turn][:, limits]
        found.append(_Turn(chunks, limits, best, whole.argmin(axis=2)))
        sums = whole.min(axis=2)
    if not np.isfinite(sums[0]).all():
        return None
    return [_picked(segments, tables[:, cost], priced[:, :, cost], which, found, cost) for cost in range(costs)]


class _Turn(NamedTuple):
    """Sums of a turn: before each of its `chunks` under each of its `limits`, and which limit is best behind it."""

    chunks: range
    limits: IntArray
    best: list[FloatArray]
    settled: IntArray


def _picked(
    segments: Segments, tables: FloatArray, priced: FloatArray, which: Sequence[int], turns: Sequence[_Turn], cost: int
) -> list[int]:
    """The row of `cut_turns` for one of the costs, from behind."""
    picks, place = list[tuple[int, int, int]](), 0
    for turn in reversed(turns):
        settled = int(turn.settled[place, cost])
        column, limit = cost * len(turn.limits) + settled, int(turn.limits[settled])
        for chunk, before in zip(reversed(turn.chunks), reversed(turn.best), strict=True):
            row = which[chunk]
            group, place = _last(before[:, column], priced[row, :, limit], segments.windows[chunk], place)
            picks.append((row, limit, group))
    inside = {pick: segments.groups[pick[2]] for pick in dict.fromkeys(picks)}
    rows = {
        (row, limit, number): group.first + int(tables[row, limit, group.first : group.last].argmin())
        for (row, limit, number), group in inside.items()
    }
    return [rows[pick] for pick in reversed(picks)]


def _matter(segments: Segments, priced: FloatArray, turns: FloatArray) -> BoolArray:
    """(turns, limits) whether a limit allows a segment of a turn that the one before it does not, or costs less.

    Parameters
    ----------
    priced : (kinds, groups, costs, limits) least seconds of each group
    turns : (turns, costs, limits) seconds that a limit costs in each turn
    """
    none = np.full((*priced.shape[:3], 1), np.inf)
    other = (priced != np.concatenate([none, priced[:, :, :, :-1]], axis=3)).any(axis=(0, 2))
    found: BoolArray = segments.of_turns @ other
    found[:, 1:] |= (turns[:, :, 1:] < turns[:, :, :-1]).any(axis=1)
    return found
