"""A chain cut once: of all pairs of segments that make up the network the one that takes least."""

from __future__ import annotations

import numpy as np

from planner.search.stages.fragments import IntArray
from planner.search.stages.picked import Picks
from planner.search.stages.segments import Segments


def best_pair(segments: Segments) -> Picks | None:
    """Rows of the table for both chunks, of two ranks, with the least fill and busiest rank; None where none fits.

    Of pairs that take as long the one with the least fill is picked.
    """
    task, groups = segments.task, segments.groups
    allowed, which = segments.allowed_of(np.full(2, task.limit_bytes))
    ways = [group.last - group.first for group in groups]
    # The place of the cut: so many units, and the boundary state behind them.
    width = len(segments.states)
    behind = np.repeat([(g.starts.start + g.length) * width + g.exit for g in groups], ways)
    before = np.repeat([g.starts.start * width + g.entry for g in groups], ways)
    first: IntArray = np.flatnonzero(allowed[which[0]] & (before == 0))
    second: IntArray = np.flatnonzero(allowed[which[1]] & (behind == task.units * width))
    one, other = (behind[first][:, None] == before[second]).nonzero()
    if not len(one):
        return None
    one, other = first[one], second[other]
    fill_s = segments.fill[one] + segments.fill[other]
    step_s = fill_s + np.maximum(segments.busy[one], segments.busy[other])
    pick = np.lexsort((fill_s, step_s))[0]
    return [int(one[pick]), int(other[pick])]
