"""Several chunks a rank, exactly: every cut and way of a short chain that no other one beats.

What one chunk may take depends on what the other chunks of its rank have taken, so that the state of the recurrence
holds the memory of every rank. That is affordable for few units alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import ACTIVATION, RESIDENT, TRANSIENT, FloatArray, dominated
from planner.search.stages.segments import ROUNDING, Segments

SHORT = 12
"""Most units of a chain that is partitioned exactly."""
MOST = 3_000
"""Most partial partitions between the same states."""


@dataclass(frozen=True, slots=True, eq=False)
class _Partial:
    """Partitions of the first units.

    Attributes
    ----------
    values : (n, 2 + 2 ranks) seconds but for the turn under way, seconds of its longest chunk, bytes that stand on
        every rank, bytes that stand there while a unit goes backward
    picks : (n, chunks) rows picked so far
    """

    values: FloatArray
    picks: NDArray[np.int64]


def exact_turns(segments: Segments) -> tuple[list[int] | None, bool]:
    """Rows of the table for every chunk with the least fill and turns, None where none fits; and whether that is sure.

    It is not where too many partial partitions do not beat one another.
    """
    task = segments.task
    start = np.zeros((1, 2 + 2 * task.ranks))
    found = {(0, 0): _Partial(start, np.zeros((1, 0), dtype=np.int64))}
    for chunk in range(task.pieces):
        reached: dict[tuple[int, int], list[_Partial]] = {}
        for group in segments.groups:
            for unit in group.starts:
                before = found.get((unit, group.entry))
                if before is not None:
                    after = _extended(segments, chunk, before, np.arange(group.first, group.last))
                    reached.setdefault((unit + group.length, group.exit), []).append(after)
        found = {}
        for place, parts in reached.items():
            values = np.concatenate([part.values for part in parts])
            if len(values) > MOST:
                return None, False
            order = np.lexsort(values.T[::-1])
            order = order[~dominated(values[order])]
            found[place] = _Partial(values[order], np.concatenate([part.picks for part in parts])[order])
    whole = found.get((task.units, 0))
    if whole is None or not len(whole.values):
        return None, True
    return [int(row) for row in whole.picks[int(np.argmin(whole.values[:, 0]))]], True


def _extended(segments: Segments, chunk: int, before: _Partial, rows: NDArray[np.int64]) -> _Partial:
    """Every partition with every row behind it, as far as the chunk's rank has the memory."""
    task, table = segments.task, segments.values
    rank = int(task.rank_of[chunk])
    which, row = np.repeat(np.arange(len(before.values)), len(rows)), np.tile(rows, len(before.values))
    values = before.values[which].copy()
    values[:, 0] += segments.fill[row]
    values[:, 1] = np.maximum(values[:, 1], segments.busy[row])
    if (chunk + 1) % task.ranks == 0:
        values[:, 0] += values[:, 1]
        values[:, 1] = 0.0
    standing, transient = 2 + rank, 2 + task.ranks + rank
    values[:, standing] += task.in_flight[chunk] * table[row, ACTIVATION] + table[row, RESIDENT]
    values[:, transient] = np.maximum(values[:, transient], table[row, TRANSIENT])
    fits = values[:, standing] + values[:, transient] <= task.limit_bytes * (1 + ROUNDING)
    picks = np.concatenate([before.picks[which[fits]], row[fits, None]], axis=1)
    return _Partial(values[fits], picks)
