"""Times of the operators of passes, with what messages take from the kernels beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise

import numpy as np

from planner.lowering.unit_work import BESIDE, KERNELS, MESSAGES
from planner.lowering.written import PassDraft
from simulator import fast_engine
from simulator.contention import message_transfers, messages_meet, overloads, shared_work
from simulator.hardware import Hardware
from simulator.pipeline_operators import Operators, pass_table
from simulator.program import ProgramAxis, Task
from simulator.task_table import BoolArray, FloatArray, IntArray


class TaskTimes:
    """Seconds of the tasks of operators, and those that they take from kernels beside them."""

    def __init__(self, seconds: FloatArray, slowing: FloatArray) -> None:
        self.seconds, self.slowing = seconds.tolist(), slowing.tolist()
        self._known: dict[int, tuple[list[int], float, float]] = {}

    def of(self, operators: Iterable[list[int]]) -> FloatArray:
        """(2, operators) of both, of operators that run these tasks."""
        known, seconds, slowing = self._known, self.seconds, self.slowing
        found = []
        for numbers in operators:
            # Operators of equal layers share their lists.
            one = known.get(id(numbers))
            if one is None:
                taken, lost = sum([seconds[n] for n in numbers], 0.0), sum([slowing[n] for n in numbers], 0.0)
                one = known[id(numbers)] = numbers, taken, lost
            found.append(one)
        return np.array([[one[1] for one in found], [one[2] for one in found]])


@dataclass(frozen=True, kw_only=True, eq=False)
class PassTasks:
    """Tasks of a pass: the `Operators` of number ``rows[i]`` runs those of the numbers ``tasks[i]``."""

    tasks: Sequence[Sequence[int]]
    rows: IntArray

    @property
    def numbers(self) -> list[int]:
        """All tasks, in order."""
        return [*chain.from_iterable(self.tasks)]


@dataclass(frozen=True, kw_only=True, eq=False)
class CrossedLinks:
    """The links that messages of a job cross: its axes on the devices of a cluster, and all tasks."""

    hardware: Hardware
    devices: int
    axes: tuple[ProgramAxis, ...]
    tasks: Sequence[Task]

    def shared(self, one: Operators, sent: Mapping[int, int]) -> Operators:
        """A pass whose messages take as long as they do where those of several axes share links.

        Parameters
        ----------
        sent : mapping of int to int
            The task that each of its messages sends, by its place among the operators.
        """
        slows = self.hardware.overlap_transfer_speed != 1
        table = pass_table(one)
        times = fast_engine.run(table)
        if not sent or not (slows or messages_meet(table, *times)):
            return one
        rows = np.array(sorted(sent))
        tasks = [self.tasks[sent[row]] for row in rows.tolist()]
        found = message_transfers(tasks, one.seconds[rows], self.hardware, self.devices, self.axes)
        if found is None:
            return one
        found = replace(found, tasks=rows[found.tasks])
        table = replace(table, **shared_work(one.seconds, found), transfer_speed=self.hardware.overlap_transfer_speed)
        if not slows and not overloads(table, *times):
            return one
        starts, ends = fast_engine.run(table)
        return replace(one, seconds=np.where(one.communication > 0, ends - starts, one.seconds))


def reports(tasks: Sequence[Task]) -> frozenset[int]:
    """Messages among the tasks that passes do not wait for: those that sum the loss, and what travels beside anyway."""
    return frozenset(n for n, task in enumerate(tasks) if task.collective is not None and task.launched_with < 0)


def pass_operators(
    drafts: Sequence[PassDraft],
    times: TaskTimes,
    pairs: bool,
    beside: frozenset[int],
    links: CrossedLinks,
    *,
    alone: bool,
) -> list[tuple[Operators, PassTasks]]:
    """Times of the operators of passes; what messages that may hide take from kernels stands before each among them.

    A rank with kernels to run loses that much, whichever they are, and one that waits for the message loses nothing.
    No pass waits for the messages in ``beside``: they travel beside, unless what passes wait for does so as well. On a
    stage ``alone`` what passes wait for takes turns with the messages beside it on the same axis, as messages of one
    communicator do; in pipelines it is taken to have a stream of its own.
    """
    # One array for all passes, cut at the end.
    begins = np.cumsum([0, *(len(draft.stream) for draft in drafts)])
    sizes = np.diff(begins)
    streams = np.array([stream for draft in drafts for stream in _streams(draft, beside)])
    waits = np.array([count for draft in drafts for count in draft.waits])
    after = np.array([start + n for start, d in zip(begins.tolist(), drafts, strict=False) for n in d.after], np.int64)
    taken, lost = times.of(tasks for draft in drafts for tasks in draft.tasks)
    slows = (lost > 0) & (streams != KERNELS)
    if not pairs:
        slows &= _may_hide(streams, waits, after, np.repeat(begins[1:], sizes))
    added = np.concatenate(([0], np.cumsum(slows)))
    place = np.arange(len(streams)) + added[1:]
    size = len(streams) + int(added[-1])
    rows, kind = np.zeros(size, dtype=np.int64), np.full(size, KERNELS, dtype=np.int64)
    lasts, ahead = np.zeros(size), np.zeros(size, dtype=np.bool_)
    if alone:
        streams = np.array([stream for draft in drafts for stream in _in_turn(draft, beside, links.tasks)])
    rows[place], kind[place], lasts[place] = waits, streams, taken
    ahead[place] = [one for draft in drafts for one in draft.ahead]
    before = place[slows] - 1
    lasts[before], ahead[before] = lost[slows], ahead[before + 1]
    offsets, dependencies = np.concatenate(([0], np.cumsum(rows))), place[after]
    outputs = place[begins[:-1] + [draft.output for draft in drafts]].tolist()
    made = [
        Operators(
            seconds=lasts[first:last],
            communication=kind[first:last],
            dependency_offsets=offsets[first : last + 1] - offsets[first],
            dependencies=dependencies[offsets[first] : offsets[last]] - first,
            ahead=ahead[first:last],
            output=output - first,
        )
        for (first, last), output in zip(pairwise((begins + added[begins]).tolist()), outputs, strict=True)
    ]
    found = []
    for one, draft, (begin, end) in zip(made, drafts, pairwise(begins.tolist()), strict=True):
        ran = PassTasks(tasks=draft.tasks, rows=place[begin:end] - place[begin] + slows[begin])
        meets = links.hardware.overlaps_communication and {MESSAGES, BESIDE} <= set(one.communication.tolist())
        shared = links.shared(one, _sent(draft, ran.rows.tolist(), links.tasks)) if meets else one
        found.append((shared, ran))
    return found


def _sent(draft: PassDraft, rows: Sequence[int], tasks: Sequence[Task]) -> dict[int, int]:
    """The largest message of each operator that has any, by the operator's place in its pass."""
    found = {}
    for row, stream, numbers in zip(rows, draft.stream, draft.tasks, strict=True):
        messages = [n for n in numbers if stream != KERNELS and tasks[n].collective is not None]
        if messages:
            found[row] = max(messages, key=lambda n: tasks[n].payload_bytes)
    return found


def _streams(draft: PassDraft, beside: frozenset[int]) -> Sequence[int]:
    if not beside or BESIDE in draft.stream:
        return draft.stream
    return [
        BESIDE if stream == MESSAGES and beside.issuperset(tasks) else stream
        for stream, tasks in zip(draft.stream, draft.tasks, strict=True)
    ]


def _in_turn(draft: PassDraft, beside: frozenset[int], tasks: Sequence[Task]) -> Sequence[int]:
    """Streams where messages of the axis that most bytes cross beside the pass share one.

    Those of other axes do not wait for these: each axis has a communicator of its own.
    """
    crossed: dict[str, float] = {}
    for stream, numbers in zip(draft.stream, draft.tasks, strict=True):
        for task in [tasks[n] for n in numbers if stream == BESIDE and tasks[n].collective is not None]:
            crossed[task.axis] = crossed.get(task.axis, 0.0) + task.payload_bytes
    shared = max(crossed, key=lambda axis: crossed[axis], default=None)
    waits = [any(tasks[n].axis == shared for n in numbers if tasks[n].collective) for numbers in draft.tasks]
    return [
        BESIDE if stream == MESSAGES and waits_there else stream
        for stream, waits_there in zip(_streams(draft, beside), waits, strict=True)
    ]


def _may_hide(streams: IntArray, waits: IntArray, after: IntArray, ends: IntArray) -> BoolArray:
    """(operators,) whether kernels run beside each, if it is a message: the next of the pass does not wait for it.

    Messages that a pass waits for travel in their order; behind the other pass of a pair hides any. A pass ends before
    the operator that `ends` (operators,) says.
    """
    size = len(streams)
    numbers, awaited = np.arange(size), np.full(size + 1, -1)
    rows, sent = np.repeat(numbers, waits), streams[after] == MESSAGES
    np.maximum.at(awaited, rows[sent], after[sent])
    following = np.minimum.accumulate(np.where(streams == KERNELS, numbers, size)[::-1])[::-1]
    hides: BoolArray = (streams == BESIDE) | (following >= ends) | (awaited[following] < numbers)
    return hides
