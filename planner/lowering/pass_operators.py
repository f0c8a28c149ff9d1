"""Times of the operators of passes, with what messages take from the kernels beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.lowering.draft import Draft
from planner.lowering.unit_work import BESIDE, KERNELS, MESSAGES
from simulator.pipeline_operators import Operators
from simulator.program import Task
from simulator.task_table import BoolArray, FloatArray, IntArray


class TaskTimes:
    """Seconds of the tasks of operators, and those that they take from kernels beside them."""

    def __init__(self, seconds: FloatArray, slowing: FloatArray) -> None:
        self.seconds, self.slowing = seconds.tolist(), slowing.tolist()
        self._known: dict[int, tuple[list[int], float, float]] = {}

    def of(self, draft: Draft) -> FloatArray:
        """(2, operators) of both."""
        known, seconds, slowing = self._known, self.seconds, self.slowing
        found = []
        for numbers in draft.tasks:
            # Operators of equal layers share their lists.
            one = known.get(id(numbers))
            if one is None:
                taken, lost = sum([seconds[n] for n in numbers], 0.0), sum([slowing[n] for n in numbers], 0.0)
                one = known[id(numbers)] = numbers, taken, lost
            found.append(one)
        return np.array([[one[1] for one in found], [one[2] for one in found]])


def reports(tasks: Sequence[Task]) -> frozenset[int]:
    """Messages among the tasks that passes do not wait for: those that sum the loss, and what travels beside anyway."""
    return frozenset(n for n, task in enumerate(tasks) if task.collective is not None and task.launched_with < 0)


def pass_operators(draft: Draft, times: TaskTimes, pairs: bool, beside: frozenset[int]) -> Operators:
    """Times of the operators of a pass; what messages that may hide take from kernels stands before each among them.

    A rank with kernels to run loses that much, whichever they are, and one that waits for the message loses nothing.
    No pass waits for the messages in ``beside``: they travel beside, unless what passes wait for does so as well.
    """
    streams = np.array(draft.stream)
    if beside and not (streams == BESIDE).any():
        hides = [
            stream == MESSAGES and beside.issuperset(tasks)
            for stream, tasks in zip(draft.stream, draft.tasks, strict=True)
        ]
        streams[hides] = BESIDE
    taken, lost = times.of(draft)
    waits, after = np.array(draft.waits), np.array(draft.after, dtype=np.int64)
    slows = (lost > 0) & (streams != KERNELS) & (pairs | _may_hide(streams, waits, after))
    place = np.arange(len(streams)) + np.cumsum(slows)
    size = len(streams) + int(slows.sum())
    rows, kind = np.zeros(size, dtype=np.int64), np.full(size, KERNELS, dtype=np.int64)
    lasts, ahead = np.zeros(size), np.zeros(size, dtype=np.bool_)
    rows[place], kind[place], lasts[place], ahead[place] = waits, streams, taken, draft.ahead
    before = place[slows] - 1
    lasts[before], ahead[before] = lost[slows], ahead[before + 1]
    return Operators(
        seconds=lasts,
        communication=kind,
        dependency_offsets=np.concatenate(([0], np.cumsum(rows))).astype(np.int64),
        dependencies=place[after].astype(np.int64),
        ahead=ahead,
        output=int(place[draft.output]),
    )


def _may_hide(streams: IntArray, waits: IntArray, after: IntArray) -> BoolArray:
    """(operators,) whether kernels run beside each, if it is a message: the next of the pass does not wait for it.

    Messages that a pass waits for travel in their order; behind the other pass of a pair hides any.
    """
    numbers = np.arange(len(streams))
    awaited = np.full(len(streams) + 1, -1)
    rows, sent = np.repeat(numbers, waits), streams[after] == MESSAGES
    np.maximum.at(awaited, rows[sent], after[sent])
    following = np.minimum.accumulate(np.where(streams == KERNELS, numbers, len(streams))[::-1])[::-1]
    hides: BoolArray = (streams == BESIDE) | (awaited[following] < numbers)
    return hides
