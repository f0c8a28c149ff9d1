"""A simulated step as a trace that Perfetto and Chrome open.

Format: "Trace Event Format", Google, 2016. One process for each rank, one thread for each stream,
complete events (X), flow arrows (s, f) and memory counters (C); times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from simulator.errors import InputError
from simulator.program import COMPUTE_STREAM, Program, ProgramAxis, Segment, Task
from simulator.task_order import streams_of
from simulator.timeline import Timeline
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from simulator.hardware import Hardware

MAX_REPETITIONS = 4
MAX_EVENTS = 150_000
MAX_ARROWS = 30_000

_STEP_THREAD = "step"
_NANOSECONDS = 1e9
_ARROW_INSET_NS = 1000
_COUNTER_STEPS = 1000

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """How much of the step is drawn: ranks 0 … `ranks` − 1, the first `repetitions` of every segment."""

    ranks: int
    repetitions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawing:
    """One segment as drawn: whole nanoseconds from the start of a repetition, (tasks,).

    ``drawn`` are the tasks that last at least a nanosecond, in order of start; ``bodies`` their
    events without process and time.
    """

    offset_ns: int
    duration_ns: int
    starts_ns: IntArray
    ends_ns: IntArray
    threads: tuple[int, ...]
    drawn: tuple[int, ...]
    bodies: tuple[str, ...]
    counters: tuple[tuple[tuple[int, int], ...], ...]


def write_trace(
    timeline: Timeline, program: Program, path: str | Path, *, max_ranks: int = 16, hardware: Hardware | None = None
) -> None:
    """Write `timeline` as trace-event JSON, whole or not at all.

    All ranks run the same program at the same times; the first `max_ranks` are drawn. Long traces
    are cut: of a repeated segment the first few repetitions are drawn, then fewer ranks; the file's
    ``otherData`` says what was left out. With `hardware`, collectives name their algorithm.

    Raises
    ------
    InputError
        When `max_ranks` is below one or the file cannot be written.
    """
    if max_ranks < 1:
        raise InputError(f"a trace of {max_ranks} ranks is empty; draw at least one")
    threads = _threads(timeline, program)
    drawings = _drawings(timeline, program, threads, hardware)
    scope = _scope(program, drawings, max_ranks)
    write_whole(path, _document(timeline, program, drawings, threads, scope))


def _threads(timeline: Timeline, program: Program) -> dict[str, int]:
    """Thread numbers: the overview, then streams in order of first use."""
    streams = [COMPUTE_STREAM]
    for segment in program.segments:
        streams += streams_of(segment, overlaps_communication=timeline.overlaps_communication)
    return {name: number for number, name in enumerate(dict.fromkeys([_STEP_THREAD, *streams]))}


def _scope(program: Program, drawings: list[_Drawing], max_ranks: int) -> _Scope:
    """The most that stays within the limit of events: repetitions are given up before ranks."""
    ranks = min(program.devices, max_ranks)
    for repetitions in range(MAX_REPETITIONS, 0, -1):
        events = sum(
            min(segment.count, repetitions) * (len(drawing.drawn) + max(map(len, drawing.counters)))
            for segment, drawing in zip(program.segments, drawings, strict=True)
        )
        if events * ranks <= MAX_EVENTS:
            break
    return _Scope(ranks=max(1, min(ranks, MAX_EVENTS // max(events, 1))), repetitions=repetitions)


def _drawings(
    timeline: Timeline, program: Program, threads: dict[str, int], hardware: Hardware | None
) -> list[_Drawing]:
    drawings: list[_Drawing] = []
    offset = 0
    step = max(1, timeline.peak_memory_bytes // _COUNTER_STEPS)
    for index, (segment, found) in enumerate(zip(program.segments, timeline.segments, strict=True)):
        starts = np.rint(found.starts_s * _NANOSECONDS).astype(np.int64)
        ends = np.rint(found.ends_s * _NANOSECONDS).astype(np.int64)
        duration = int(ends.max(initial=0))
        drawn = [int(i) for i in np.lexsort((ends, starts)) if ends[i] > starts[i]]
        streams = streams_of(segment, overlaps_communication=timeline.overlaps_communication)
        thread_of = {task: threads[name] for name, tasks in streams.items() for task in tasks}
        curves = (timeline.memory.first[index], timeline.memory.later[index])
        drawings.append(
            _Drawing(
                offset_ns=offset,
                duration_ns=duration,
                starts_ns=starts,
                ends_ns=ends,
                threads=tuple(thread_of[i] for i in range(len(segment.tasks))),
                drawn=tuple(drawn),
                bodies=tuple(_body(segment.tasks[i], program, hardware) for i in drawn),
                counters=tuple(_counter_points(c.times_s, c.total_bytes, step) for c in curves),
            )
        )
        # Whole nanoseconds throughout, so that rounding never lets one event run into the next.
        offset += segment.count * duration
    return drawings


def _body(task: Task, program: Program, hardware: Hardware | None) -> str:
    if task.collective is None:
        arguments: dict[str, Any] = {"kernel": task.kernel.value, "phase": task.phase.value, "dtype": task.dtype}
        arguments |= {"flops": task.flops, "bytes": task.bytes_moved}
    else:
        arguments = {"collective": task.collective.value, "phase": task.phase.value, "axis": task.axis}
        arguments |= {"payload_bytes": task.payload_bytes}
        axis = next((axis for axis in program.axes if axis.name == task.axis), None)
        if axis is not None:
            arguments["group_size"] = axis.size
            if hardware is not None:
                arguments["algorithm"] = _algorithm(task, axis, hardware)
    category = "communication" if task.collective else task.phase.value
    return _fields({"name": task.name, "cat": category, "args": arguments})


def _algorithm(task: Task, axis: ProgramAxis, hardware: Hardware) -> str:
    from simulator.collectives import collective_algorithm
    from simulator.topology import group_shape

    assert task.collective is not None
    shape = group_shape(hardware, axis.size, axis.stride)
    return collective_algorithm(hardware, task.collective, task.payload_bytes, shape)


def _counter_points(times_s: npt.NDArray[np.float64], totals: IntArray, step: int) -> tuple[tuple[int, int], ...]:
    """Nanoseconds and bytes where memory has changed by `step` or more since the last point, and the last."""
    times = np.rint(times_s * _NANOSECONDS).astype(np.int64)
    settled = np.flatnonzero(np.append(times[1:] != times[:-1], [True] * min(1, len(times))))
    points: list[tuple[int, int]] = []
    for place, (time, total) in enumerate(zip(times[settled].tolist(), totals[settled].tolist(), strict=True)):
        if place == len(settled) - 1 or not points or abs(total - points[-1][1]) >= step:
            points.append((time, total))
    return tuple(points)


def _document(
    timeline: Timeline, program: Program, drawings: list[_Drawing], threads: dict[str, int], scope: _Scope
) -> Iterator[str]:
    """The file, a piece at a time."""
    yield '{"displayTimeUnit":"ms",\n"otherData":'
    yield json.dumps(_description(timeline, program, drawings, scope), indent=1)
    yield ',\n"traceEvents":[\n'
    separator = ""
    for event in _events(program, drawings, threads, scope):
        yield separator + event
        separator = ",\n"
    yield "\n]}\n"


def _description(timeline: Timeline, program: Program, drawings: list[_Drawing], scope: _Scope) -> dict[str, Any]:
    return {
        "program": program.name,
        "step_time_s": timeline.step_time_s,
        "breakdown": dict(timeline.breakdown),
        "peak_memory_bytes": timeline.peak_memory_bytes,
        "peak_memory_time_s": timeline.memory.peak_time_s,
        "devices": program.devices,
        "ranks_drawn": scope.ranks,
        "segments": [
            {
                "name": segment.name,
                "repetitions": segment.count,
                "repetitions_drawn": min(segment.count, scope.repetitions),
                "tasks": len(segment.tasks),
                "tasks_drawn": len(drawing.drawn),
            }
            for segment, drawing in zip(program.segments, drawings, strict=True)
        ],
        "note": "all ranks run alike; tasks that take no time are not drawn",
    }


def _events(program: Program, drawings: list[_Drawing], threads: dict[str, int], scope: _Scope) -> Iterator[str]:
    for rank in range(scope.ranks):
        yield from _names(rank, threads)
    for rank in range(scope.ranks):
        yield _counter(rank, 0, sum(buffer.size_bytes for buffer in program.resident))
        for segment, drawing in zip(program.segments, drawings, strict=True):
            yield from _overview(rank, segment, drawing, scope)
            for repetition in range(min(segment.count, scope.repetitions)):
                yield from _repetition(rank, drawing, repetition)
    yield from _arrows(program, drawings, scope)


def _names(rank: int, threads: dict[str, int]) -> Iterator[str]:
    yield _event("M", rank, 0, name="process_name", args={"name": f"rank {rank}"})
    yield _event("M", rank, 0, name="process_sort_index", args={"sort_index": rank})
    for name, number in threads.items():
        yield _event("M", rank, number, name="thread_name", args={"name": name})
        yield _event("M", rank, number, name="thread_sort_index", args={"sort_index": number})


def _overview(rank: int, segment: Segment, drawing: _Drawing, scope: _Scope) -> Iterator[str]:
    """One event for each repetition drawn, and one for all others."""
    drawn = min(segment.count, scope.repetitions)
    rest = segment.count - drawn
    spans = [(f"{segment.name} {i + 1}/{segment.count}", i, 1) for i in range(drawn)]
    if rest:
        spans.append((f"{segment.name}: {rest} more repetitions, not drawn", drawn, rest))
    for name, first, count in spans:
        if drawing.duration_ns:
            start = drawing.offset_ns + first * drawing.duration_ns
            body = _fields({"name": name, "cat": "segment"})
            yield _complete(rank, 0, start, count * drawing.duration_ns, body)


def _repetition(rank: int, drawing: _Drawing, repetition: int) -> Iterator[str]:
    base = drawing.offset_ns + repetition * drawing.duration_ns
    for task, body in zip(drawing.drawn, drawing.bodies, strict=True):
        start = int(drawing.starts_ns[task])
        yield _complete(rank, drawing.threads[task], base + start, int(drawing.ends_ns[task]) - start, body)
    for time, total in drawing.counters[min(repetition, 1)]:
        yield _counter(rank, base + time, total)


def _complete(rank: int, thread: int, start_ns: int, duration_ns: int, body: str) -> str:
    return f'{{"ph":"X","pid":{rank},"tid":{thread},"ts":{start_ns / 1000},"dur":{duration_ns / 1000},{body}}}'


def _counter(rank: int, time_ns: int, total: int) -> str:
    return _event("C", rank, 0, ts=time_ns / 1000, name="memory", args={"bytes": total})


def _event(phase: str, rank: int, thread: int, **fields: Any) -> str:
    return f'{{"ph":"{phase}","pid":{rank},"tid":{thread},{_fields(fields)}}}'


def _fields(fields: dict[str, Any]) -> str:
    return json.dumps(fields, separators=(",", ":"))[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Arrow:
    """From (rank, task) near its start or end to (rank, task) near its start."""

    name: str
    source: tuple[int, int]
    target: tuple[int, int]


def _arrows(program: Program, drawings: list[_Drawing], scope: _Scope) -> Iterator[str]:
    """Arrows of the first repetition of every segment, longest collectives first while the limit lasts."""
    number = 0
    for segment, drawing in zip(program.segments, drawings, strict=True):
        producers, consumers = _neighbours(segment, drawing)
        lengths = drawing.ends_ns - drawing.starts_ns
        collectives = [i for i in drawing.drawn if segment.tasks[i].collective is not None]
        for task in sorted(collectives, key=lambda i: (-int(lengths[i]), i)):
            for arrow in _arrows_of(program, segment, task, producers.get(task), consumers.get(task), scope):
                if number == MAX_ARROWS:
                    return
                number += 1
                yield from _flow(number, arrow, drawing)


def _neighbours(segment: Segment, drawing: _Drawing) -> tuple[dict[int, int], dict[int, int]]:
    """For every collective the drawn task that feeds it and the first drawn task that waits for it.

    Tasks that are not drawn stand for the drawn one before them (producers) or after them
    (consumers) on their stream.
    """
    shown = set(drawing.drawn)
    last_shown: dict[int, int] = {}
    before: list[int | None] = []
    for index, thread in enumerate(drawing.threads):
        if index in shown:
            last_shown[thread] = index
        before.append(last_shown.get(thread))
    next_shown: dict[int, int] = {}
    behind: list[int | None] = [None] * len(before)
    for index in range(len(before) - 1, -1, -1):
        if index in shown:
            next_shown[drawing.threads[index]] = index
        behind[index] = next_shown.get(drawing.threads[index])
    producers: dict[int, int] = {}
    consumers: dict[int, int] = {}
    for index, task in enumerate(segment.tasks):
        for needed in task.after:
            if task.collective is not None and (source := before[needed]) is not None:
                producers[index] = max((producers.get(index, source), source), key=lambda i: int(drawing.ends_ns[i]))
            if segment.tasks[needed].collective is not None and (target := behind[index]) is not None:
                first = consumers.get(needed, target)
                consumers[needed] = min((first, target), key=lambda i: int(drawing.starts_ns[i]))
    return producers, consumers


def _arrows_of(
    program: Program, segment: Segment, task: int, producer: int | None, consumer: int | None, scope: _Scope
) -> Iterator[_Arrow]:
    name = segment.tasks[task].name
    for rank in range(scope.ranks):
        if producer is not None and producer != task:
            yield _Arrow(name=name, source=(rank, producer), target=(rank, task))
        if consumer is not None and consumer != task:
            yield _Arrow(name=name, source=(rank, task), target=(rank, consumer))
    axis = next((axis for axis in program.axes if axis.name == segment.tasks[task].axis), None)
    if axis is None or axis.size == 1:
        return
    for rank in range(scope.ranks):
        # Every rank points to the next of its group, as far as drawn: a chain through the group.
        following = rank + axis.stride
        if (rank // axis.stride) % axis.size < axis.size - 1 and following < scope.ranks:
            yield _Arrow(name=name, source=(rank, task), target=(following, task))


def _flow(number: int, arrow: _Arrow, drawing: _Drawing) -> Iterator[str]:
    """A start and an end a little inside their events, so that viewers bind them to these and not to neighbours."""
    (from_rank, source), (to_rank, target) = arrow.source, arrow.target
    leave = int(drawing.ends_ns[source]) - _inset(drawing, source)
    arrive = int(drawing.starts_ns[target]) + _inset(drawing, target)
    if source == target:
        leave, arrive = arrive, max(arrive, int(drawing.ends_ns[target]) - _inset(drawing, target))
    fields = {"cat": "communication", "name": arrow.name, "id": number}
    for phase, rank, task, time, extra in (
        ("s", from_rank, source, leave, {}),
        ("f", to_rank, target, max(leave, arrive), {"bp": "e"}),
    ):
        time_us = (drawing.offset_ns + time) / 1000
        yield _event(phase, rank, drawing.threads[task], ts=time_us, **fields, **extra)


def _inset(drawing: _Drawing, task: int) -> int:
    return min(_ARROW_INSET_NS, int(drawing.ends_ns[task] - drawing.starts_ns[task]) // 2)
