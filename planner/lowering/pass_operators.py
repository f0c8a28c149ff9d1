"""Times of the operators of passes, with what messages take from the kernels beside them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.lowering.chunk_passes import Draft
from planner.lowering.unit_work import BESIDE, KERNELS, MESSAGES
from simulator.pipeline_operators import Operators
from simulator.program import Task
from simulator.task_table import BoolArray, FloatArray


class TaskTimes:
    """Seconds of the tasks of operators, and those that they take from kernels beside them."""

    def __init__(self, seconds: FloatArray, slowing: FloatArray) -> None:
        self.seconds, self.slowing = seconds.tolist(), slowing.tolist()
        self._known: dict[int, tuple[list[int], float, float]] = {}

    def of(self, draft: Draft) -> FloatArray:
        """(2, operators) of both."""
        known, found = self._known, []
        for numbers in draft.tasks:
            # Operators of equal layers share their lists.
            if id(numbers) not in known:
                taken, lost = (sum([each[n] for n in numbers], 0.0) for each in (self.seconds, self.slowing))
                known[id(numbers)] = numbers, taken, lost
            found.append(known[id(numbers)][1:])
        return np.array(found).T


def reports(tasks: Sequence[Task]) -> frozenset[int]:
    """Messages among the tasks that passes do not wait for: those that sum the loss, and what travels beside anyway."""
    return frozenset(n for n, task in enumerate(tasks) if task.collective is not None and task.launched_with < 0)


def pass_operators(draft: Draft, times: TaskTimes, pairs: bool, beside: frozenset[int]) -> Operators:
    """Times of the operators of a pass; what messages that may hide take from kernels stands before each among them.

    A rank with kernels to run loses that much, whichever they are, and one that waits for the message loses nothing.
    No pass waits for the messages in ``beside``: they travel beside, unless what passes wait for does so as well.
    """
    streams = draft.stream
    if beside and BESIDE not in streams:
        streams = [
            BESIDE if stream == MESSAGES and beside.issuperset(tasks) else stream
            for stream, tasks in zip(streams, draft.tasks, strict=True)
        ]
    taken, lost = times.of(draft)
    slows = _may_hide(draft, streams, pairs) & (lost > 0)
    place = np.arange(len(streams)) + np.cumsum(slows)
    rows = np.zeros(len(streams) + int(slows.sum()), dtype=np.int64)
    rows[place] = [len(after) for after in draft.after]
    kind, lasts, ahead = np.full(len(rows), KERNELS), np.zeros(len(rows)), np.zeros(len(rows), dtype=np.bool_)
    kind[place] = streams
    lasts[place], ahead[place] = taken, draft.ahead
    before = place[slows] - 1
    lasts[before], ahead[before] = lost[slows], ahead[before + 1]
    return Operators(
        seconds=lasts,
        communication=kind.astype(np.int64),
        dependency_offsets=np.concatenate(([0], np.cumsum(rows))).astype(np.int64),
        dependencies=place[[n for after in draft.after for n in after]].astype(np.int64),
        ahead=ahead,
        output=int(place[draft.output]),
    )


def _may_hide(draft: Draft, streams: Sequence[int], pairs: bool) -> BoolArray:
    """(operators,) messages beside which kernels run: those that the next kernel of the pass does not wait for.

    Behind the other pass of a pair hides any.
    """
    found, awaited = [False] * len(streams), -1
    for number in reversed(range(len(streams))):
        if streams[number] == KERNELS:
            awaited = -1
            for before in draft.after[number]:
                if before > awaited and streams[before] == MESSAGES:
                    awaited = before
        else:
            # Messages that a pass waits for travel in their order.
            found[number] = pairs or streams[number] == BESIDE or awaited < number
    return np.array(found, dtype=np.bool_)
