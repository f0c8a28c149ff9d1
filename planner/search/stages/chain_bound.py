"""Bound on every partition of a short chain of unlike units: cuts lie between units, and what is cut is sent.

Each row of consecutive units takes at least its cheapest way through the boundary states, memory aside. The least time
of a busiest rank and of the messages over the cuts then follow by dynamic programming over the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.stages.fragments import BACKLOG, FILL, QUEUE, STEADY, FloatArray, IntArray
from planner.search.stages.segments import PartitionTask

LONG = 48
"""Most units of a chain that is bounded so."""
_GRID = np.append(np.geomspace(1.0, 2.0, 24), np.inf)
"""Limits on a chunk that are tried, as parts of the least one; between two of them the lower one counts."""
_ROUNDING = 1e-9


def unlike(counts: Sequence[int], pieces: int) -> bool:
    """Whether a chain is short and most of its units are not alike: others are told by their equal blocks."""
    return 1 < pieces <= sum(counts) <= LONG and 2 * max(counts) <= sum(counts)


def chain_bound(task: PartitionTask) -> float:
    """Seconds that no partition of the task is faster than, the memory limit aside.

    What synchronisation leaves to do is at least what it leaves of the first unit of a chunk, and at least what
    messages take longer than the passes that hide them.
    """
    kinds = np.repeat(np.arange(len(task.counts)), task.counts)
    steady, behind, fill, even = _paths(task, kinds)
    sends = _sends(task, kinds)
    tails = np.array([max(0.0, float(kind.values[:, QUEUE].min())) for kind in task.kinds])[kinds]
    waits = task.steady_sends * sends

    def waited(seconds: FloatArray) -> FloatArray:
        hidden = task.hidden_share * np.where(np.isfinite(seconds), seconds, 0.0)
        found: FloatArray = seconds + np.maximum(0.0, waits[:, None] - hidden)
        return found

    busy = np.maximum(waited(steady) + tails[:, None], waited(behind))
    limited = float(fill[0, -1]) + cuts_bound(busy, task.fill_sends * sends, task.ranks, task.pieces)
    shared = float(even[0, -1]) + task.fill_sends * float(np.sort(sends[1:])[: task.pieces - 1].sum())
    return max(limited, shared)


def cuts_bound(busy: FloatArray, sends: FloatArray, ranks: int, pieces: int) -> float:
    """Least seconds of the messages that the fill pays and of the busiest rank, over all cuts into `pieces` chunks.

    Parameters
    ----------
    busy : (units, units) seconds of a chunk from one unit to another
    sends : (units,) what the fill pays for a cut before each unit, 0 for the first

    Notes
    -----
    The busiest rank takes at least as long as the longest chunk, and at least the mean of all ranks.
    """
    units = len(busy)
    chunk = np.full((units + 1, units + 1), np.inf)
    upper = np.triu_indices(units)
    chunk[upper[0], upper[1] + 1] = busy[upper]
    paid = np.append(sends, 0.0)[:, None]
    longest = np.append(0.0, np.full(units, np.inf))
    mean = longest.copy()
    for _ in range(pieces):
        longest = np.maximum(longest[:, None], chunk).min(axis=0)
        mean = (mean[:, None] + paid + chunk / ranks).min(axis=0)
    if not np.isfinite(longest[-1]):
        return np.inf
    limits = max(float(longest[-1]), _ROUNDING * _ROUNDING) * _GRID
    allowed = np.where(chunk <= limits[:, None, None] * (1 + _ROUNDING), paid, np.inf)
    spent = np.broadcast_to(np.append(0.0, np.full(units, np.inf)), (len(limits), units + 1))
    for _ in range(pieces):
        spent = (spent[:, :, None] + allowed).min(axis=1)
    return max(float(mean[-1]), float((np.append(longest[-1], limits[:-1]) + spent[:, -1]).min()))


def row_sums(seconds: FloatArray) -> FloatArray:
    """(units, units) sums from one unit to another."""
    ends = np.append(0.0, np.cumsum(seconds))
    sums: FloatArray = ends[None, 1:] - ends[:-1, None]
    return sums


def _paths(task: PartitionTask, kinds: IntArray) -> FloatArray:
    """(4, units, units) least seconds from one unit to another.

    Steady ones, those with what falls behind, what the fill pays, and that with steady ones shared out evenly.
    """
    states = sorted({int(state) for kind in task.kinds for state in (*kind.entry, *kind.exit)})
    width, units = len(states), len(kinds)
    steps = []
    for kind in task.kinds:
        step = np.full((4, width * width), np.inf)
        key = np.searchsorted(states, kind.entry) * width + np.searchsorted(states, kind.exit)
        steady, fill = kind.values[:, STEADY], kind.values[:, FILL]
        for column, seconds in enumerate((steady, steady + kind.values[:, BACKLOG], fill, fill + steady / task.ranks)):
            np.minimum.at(step[column], key, seconds)
        steps.append(step.reshape(4, 1, width, width))
    found = np.full((4, units, units), np.inf)
    reached = np.full((4, units, width), np.inf)
    for unit, kind in enumerate(kinds.tolist()):
        reached[:, unit] = 0.0
        reached[:, : unit + 1] = (reached[:, : unit + 1, :, None] + steps[kind]).min(axis=2)
        found[:, : unit + 1, unit] = reached[:, : unit + 1].min(axis=2)
    return found


def _sends(task: PartitionTask, kinds: IntArray) -> FloatArray:
    """(units,) least seconds of the messages over a cut before each unit, in the states in which it may begin."""
    entries = [np.unique(kind.entry[kind.entry >= 0]) for kind in task.kinds]
    least = [0.0]
    for cut, kind in enumerate(kinds[1:].tolist()):
        begins = entries[kind]
        least.append(float(task.sends_s[cut, begins].min()) if len(begins) else 0.0)
    return np.array(least)
