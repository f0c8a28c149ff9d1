"""What picked rows of a table of segments, one for every chunk, make of a task."""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from planner.search.stages.chunk_terms import memory_bytes, step_s
from planner.search.stages.fragments import FILL, STEADY
from planner.search.stages.outcome import Partition
from planner.search.stages.segments import Segments

Picks = list[int]
"""Row of the table for every chunk."""


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
