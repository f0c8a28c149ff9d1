"""Steps that follow one another: a rank begins its next one when its own update is done, whatever others still do.

The time of a step is the period at which steps follow each other. It is less than the time from the start of the first
rank to the end of the last where the one that begins first does not end last, as in Zero Bubble pipelines, whose
timetable is a parallelogram (Qi et al., arXiv:2401.10241, section 4: no rank waits for others before its update).
Where ranks meet at the end of a step, their ends are common, and so is the period.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from simulator import fast_engine
from simulator.task_table import FloatArray, IntArray, TaskTable

Run = Callable[[TaskTable], tuple[FloatArray, FloatArray]]


def following(table: TaskTable, last: IntArray, steps: int) -> TaskTable:
    """So many steps one after the other, task t of step s with number ``s * tasks + t``.

    Parameters
    ----------
    table : one step; nothing crosses links
    last : (ranks,) the task that ends the step of each rank: on all streams of a rank the next one waits for it
    """
    size, number = table.size, np.arange(steps)[:, None]
    first = np.full(len(table.stream_rank), size, dtype=np.int64)
    np.minimum.at(first, table.stream, np.arange(size))
    first = np.sort(first[first < size])
    counts = np.tile(np.diff(table.dependency_offsets), (steps, 1))
    counts[1:, first] += 1
    offsets = np.concatenate(([0], np.cumsum(counts)))
    dependencies = np.empty(offsets[-1], dtype=np.int64)
    rows = np.repeat(np.arange(size), np.diff(table.dependency_offsets))
    place = np.arange(len(rows)) - table.dependency_offsets[rows]
    dependencies[offsets[rows + size * number] + place] = table.dependencies + size * number
    awaited = last[table.stream_rank[table.stream[first]]]
    dependencies[offsets[first + size * number[1:] + 1] - 1] = awaited + size * number[:-1]
    met = max(int(table.meeting.max(initial=-1)) + 1, len(table.meeting_size))
    sizes = np.pad(table.meeting_size, (0, met - len(table.meeting_size)))
    return replace(
        table,
        stream=np.tile(table.stream, steps),
        work=np.tile(table.work, steps),
        latency_s=np.tile(table.latency_s, steps),
        rate_bytes_per_s=np.tile(table.rate_bytes_per_s, steps),
        meeting=np.where(table.meeting < 0, -1, table.meeting + met * number).ravel(),
        meeting_size=np.tile(sizes, steps),
        dependency_offsets=offsets,
        dependencies=dependencies,
        link_offsets=np.zeros(steps * size + 1, dtype=np.int64),
        label=np.tile(table.label, steps),
    )


def period_s(table: TaskTable, last: IntArray, begins: IntArray, ends: FloatArray, run: Run = fast_engine.run) -> float:
    """Seconds after which the next step follows: from the end of one to that of the next where that takes longest.

    With A the map of max-plus algebra from the moments at which ranks and links are free to those of a step later,
    every ``max_r((A x)_r - x_r)`` is a period at which steps can follow one another, and none is less than the least
    one, the eigenvalue of A (Baccelli et al., "Synchronization and Linearity", 1992, 3.2). Here x is how the first step
    leaves them. A rank that begins first and ends last has no gap to fill: the step then takes its whole.

    Parameters
    ----------
    table, last : as in `following`
    begins : (n,) ranks that begin without waiting for another
    ends : (T,) of the tasks of one step
    run : runs a table
    """
    length = float(ends.max())
    if ends[last[begins]].max() >= length:
        return length
    found = run(following(table, last, 2))[1].reshape(2, table.size)
    moments = np.zeros((2, len(table.stream_rank)))
    np.maximum.at(moments, (np.arange(2)[:, None], table.stream), found)
    moments = np.maximum(moments, found[:, last[table.stream_rank]])
    return float((moments[1] - moments[0]).max())
