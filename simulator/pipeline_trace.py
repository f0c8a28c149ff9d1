"""A simulated step as a trace that Perfetto and Chrome open: one process for each pipeline rank.

Computation is drawn pass by pass (``stage F micro-batch``, as PyTorch writes schedules) with its kernels inside,
messages one by one, memory as a counter. Format: "Trace Event Format", Google, 2016, complete events (X) and counters
(C), times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simulator.pipeline_memory import RankMemory
from simulator.pipeline_operators import EPILOGUE, LABELS, MEETING, PROLOGUE, SEND, STREAMS
from simulator.program import Task
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import FloatArray, IntArray, TaskTable
from simulator.whole_file import write_whole

MAX_EVENTS = 150_000
_MICROSECONDS = 1e6
_THREADS = ("compute", "communication", "communication beside", "send")
_CATEGORY = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "backward",
    ActionKind.WEIGHT_GRADIENT: "backward",
}


def write_pipeline_trace(
    path: str | Path,
    schedule: Schedule,
    table: TaskTable,
    times: tuple[FloatArray, FloatArray],
    actions: IntArray,
    memory: tuple[RankMemory, ...],
    tasks: Iterable[tuple[int, Sequence[tuple[Task, float]]]],
    *,
    description: dict[str, Any],
) -> Path:
    """Write the trace of all pipeline ranks, whole or not at all.

    Kernels are drawn of as many passes as the file has room for; those of a pair of passes that runs together are not.

    Parameters
    ----------
    table, times : TaskTable and arrays (T,), (T,)
        What `simulator.pipeline_operators.operator_table` made, and when its tasks start and end.
    actions : (T,) action of each task, -1 for none
    memory : one a rank, at the times of this run
    tasks : operators of passes, by their numbers in the table, and what each runs with the seconds that it takes alone
    description : what ``otherData`` says
    """
    events = _events(schedule, table, times, actions, memory, tasks)
    return write_whole(path, _document(events, description))


def _document(events: Iterator[str], description: dict[str, Any]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms",\n"otherData":' + json.dumps(description, indent=1) + ',\n"traceEvents":[\n'
    separator = ""
    for number, event in enumerate(events):
        if number == MAX_EVENTS:
            break
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _events(
    schedule: Schedule,
    table: TaskTable,
    times: tuple[FloatArray, FloatArray],
    actions: IntArray,
    memory: tuple[RankMemory, ...],
    tasks: Iterable[tuple[int, Sequence[tuple[Task, float]]]],
) -> Iterator[str]:
    for rank in range(schedule.ranks):
        yield _event("M", rank, 0, name="process_name", args={"name": f"pipeline rank {rank}"})
        yield _event("M", rank, 0, name="process_sort_index", args={"sort_index": rank})
        for number, name in enumerate(_THREADS):
            yield _event("M", rank, number, name="thread_name", args={"name": name})
    yield from _passes(schedule, table, times, actions)
    yield from _messages(schedule, table, times, actions)
    for rank, curve in enumerate(memory):
        for time, total in zip(curve.times_s.tolist(), curve.total_bytes.tolist(), strict=True):
            yield _event("C", rank, 0, ts=time * _MICROSECONDS, name="memory", args={"bytes": total})
    yield from _tasks(table, times, tasks)


def _passes(
    schedule: Schedule, table: TaskTable, times: tuple[FloatArray, FloatArray], actions: IntArray
) -> Iterator[str]:
    """One event for the kernels of each action or pair, one for each prologue and epilogue."""
    starts, ends = action_times(schedule, table, times, actions)
    for leader in schedule.leaders.tolist():
        name = str(schedule.action(leader))
        if schedule.paired[leader]:
            name += f" & {schedule.action(leader + 1)}"
        kind = ActionKind(int(schedule.kind[leader]))
        rank, start, end = int(schedule.action_rank[leader]), starts[leader], ends[leader]
        if end > start:
            yield _complete(rank, 0, start, end, name=name, cat=_CATEGORY[kind], args={"pass": kind.name.lower()})
    for task in np.flatnonzero((table.label == PROLOGUE) | (table.label == EPILOGUE)).tolist():
        rank, start, end = int(table.stream_rank[table.stream[task]]), times[0][task], times[1][task]
        if end > start:
            yield _complete(rank, 0, start, end, name="update", cat="update", args={})


def _messages(
    schedule: Schedule, table: TaskTable, times: tuple[FloatArray, FloatArray], actions: IntArray
) -> Iterator[str]:
    """Messages between stages and at the end of the step, and those of pairs of passes."""
    starts, ends = times
    kind = table.label
    in_pair = (kind > 0) & (kind < STREAMS) & np.append(schedule.paired, False)[actions]
    for task in np.flatnonzero(in_pair | (kind == SEND) | (kind == MEETING)).tolist():
        if ends[task] <= starts[task]:
            continue
        label = int(kind[task])
        thread = len(_THREADS) - 1 if label == SEND else 2 if label == MEETING else label
        of = f" of {schedule.action(int(actions[task]))}" if actions[task] >= 0 else ""
        rank = int(table.stream_rank[table.stream[task]])
        yield _complete(rank, thread, starts[task], ends[task], name=LABELS[label] + of, cat="communication", args={})


def _tasks(
    table: TaskTable,
    times: tuple[FloatArray, FloatArray],
    tasks: Iterable[tuple[int, Sequence[tuple[Task, float]]]],
) -> Iterator[str]:
    """What the operators of passes run; the tasks of one share its time as they would take it alone."""
    for operator, inside in tasks:
        rank, thread = int(table.stream_rank[table.stream[operator]]), int(table.label[operator])
        start, end = float(times[0][operator]), float(times[1][operator])
        alone = sum(seconds for _, seconds in inside)
        scale = (end - start) / alone if end > start and alone > 0 else 0.0
        for task, seconds in inside:
            if seconds * scale > 0:
                yield _complete(rank, thread, start, start + seconds * scale, **_described(task))
            start += seconds * scale


def _described(task: Task) -> dict[str, Any]:
    """Name, category and arguments of a task."""
    if task.collective is None:
        arguments: dict[str, Any] = {"kernel": task.kernel.value, "phase": task.phase.value, "dtype": task.dtype}
        arguments |= {"flops": task.flops, "bytes": task.bytes_moved}
    else:
        arguments = {"collective": task.collective.value, "axis": task.axis, "payload_bytes": task.payload_bytes}
    return {"name": task.name, "cat": "communication" if task.collective else task.phase.value, "args": arguments}


def action_times(
    schedule: Schedule, table: TaskTable, times: tuple[FloatArray, FloatArray], actions: IntArray
) -> tuple[FloatArray, FloatArray]:
    """(A,), (A,) start of the first and end of the last kernel of each action; both of a pair have the pair's."""
    kernels = np.flatnonzero((actions >= 0) & (table.label == 0))
    starts, ends = np.full(schedule.size, np.inf), np.zeros(schedule.size)
    np.minimum.at(starts, actions[kernels], times[0][kernels])
    np.maximum.at(ends, actions[kernels], times[1][kernels])
    second = np.flatnonzero(schedule.paired) + 1
    starts[second], ends[second] = starts[second - 1], ends[second - 1]
    return starts, ends


def _complete(rank: int, thread: int, start: float, end: float, **fields: Any) -> str:
    return _event("X", rank, thread, ts=start * _MICROSECONDS, dur=(end - start) * _MICROSECONDS, **fields)


def _event(phase: str, rank: int, thread: int, **fields: Any) -> str:
    return json.dumps({"ph": phase, "pid": rank, "tid": thread, **fields}, separators=(",", ":"))
