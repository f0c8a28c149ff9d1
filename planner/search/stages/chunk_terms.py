"""The objective and the memory of a partition from what each of its chunks takes."""

from __future__ import annotations

import numpy as np

from planner.search.stages.fragments import ACTIVATION, RESIDENT, TRANSIENT, FloatArray
from planner.search.stages.task import PartitionTask


def turns_s(task: PartitionTask, fill_s: FloatArray, busy_s: FloatArray) -> float:
    """Fill and the longest chunk of each turn, from both terms (chunks,) of the objective."""
    return float(fill_s.sum() + busy_s.reshape(task.chunks, task.ranks).max(axis=1).sum())


def step_s(task: PartitionTask, fill_s: FloatArray, busy_s: FloatArray, passes_s: FloatArray) -> float:
    """Seconds of the step; turns may even out, but no rank takes less than all of its chunks.

    Parameters
    ----------
    passes_s : (chunks,) seconds of all passes of each chunk
    """
    if task.uneven_s is None:
        return turns_s(task, fill_s, busy_s)
    ranks = np.bincount(task.rank_of, busy_s, task.ranks)
    return max(turns_s(task, fill_s, busy_s) + task.uneven_s(passes_s), float(fill_s.sum() + ranks.max()))


def memory_bytes(task: PartitionTask, values: FloatArray) -> FloatArray:
    """(ranks,) bytes at the peak, from values (chunks, 7) as in `Fragments.values`."""
    standing = np.bincount(task.rank_of, task.in_flight * values[:, ACTIVATION] + values[:, RESIDENT], task.ranks)
    transient = np.zeros(task.ranks)
    np.maximum.at(transient, task.rank_of, values[:, TRANSIENT])
    memory: FloatArray = standing + transient
    return memory
