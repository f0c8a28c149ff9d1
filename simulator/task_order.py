"""The order in which a segment's tasks may run: streams, dependencies, deadlocks."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from simulator.errors import ProgramError
from simulator.program import COMPUTE_STREAM, Program, Segment

FloatArray = npt.NDArray[np.float64]

Streams = dict[str, Sequence[int]]
"""The tasks of every stream, in the order they run there."""

_TASKS_SHOWN = 6


def check_program(program: Program, times: Sequence[FloatArray]) -> None:
    """Raise ProgramError where a segment refers to tasks it has not, runs less than once or lacks a valid time."""
    if len(times) != len(program.segments):
        raise ProgramError(f"{len(times)} arrays of task times for {len(program.segments)} segments; give one for each")
    for segment, seconds in zip(program.segments, times, strict=True):
        _check_times(segment, seconds)
        if segment.count < 1:
            raise ProgramError(
                f"segment {segment.name!r} has count {segment.count}; a segment runs at least once: leave it out"
            )
        size = len(segment.tasks)
        for index, task in enumerate(segment.tasks):
            for before in task.after:
                if not 0 <= before < size:
                    raise ProgramError(
                        f"{_label(segment, index)} of segment {segment.name!r} waits for task {before}; "
                        f"the segment has tasks 0 to {size - 1}: use indices of the same segment"
                    )


def _check_times(segment: Segment, seconds: FloatArray) -> None:
    if seconds.shape != (len(segment.tasks),):
        raise ProgramError(
            f"segment {segment.name!r} has {len(segment.tasks)} tasks and times of shape {seconds.shape}; "
            "give one time for each task"
        )
    wrong = np.flatnonzero(~(np.isfinite(seconds) & (seconds >= 0)))
    if wrong.size:
        index = int(wrong[0])
        raise ProgramError(
            f"{_label(segment, index)} of segment {segment.name!r} takes {seconds[index]} s; a time is finite and "
            "not negative: check its work and the hardware's rates"
        )


def streams_of(segment: Segment, *, overlaps_communication: bool) -> Streams:
    """Task indices of every stream, in order of first use; one stream where nothing overlaps."""
    if not overlaps_communication:
        return {COMPUTE_STREAM: range(len(segment.tasks))}
    streams: dict[str, list[int]] = {}
    for index, task in enumerate(segment.tasks):
        streams.setdefault(task.stream, []).append(index)
    return dict(streams)


def execution_order(segment: Segment, streams: Streams) -> Sequence[int]:
    """Tasks such that each comes after those it waits for and those before it on its stream.

    Of the tasks that could come next, the one of lowest index does (Kahn's algorithm with a heap).
    Raises ProgramError where no such order exists.
    """
    if all(max(task.after, default=-1) < index for index, task in enumerate(segment.tasks)):
        return range(len(segment.tasks))
    waiting = [len(task.after) for task in segment.tasks]
    followers: list[list[int]] = [[] for _ in segment.tasks]
    for index, task in enumerate(segment.tasks):
        for before in task.after:
            followers[before].append(index)
    for tasks in streams.values():
        for before, index in pairwise(tasks):
            waiting[index] += 1
            followers[before].append(index)
    ready = [index for index, count in enumerate(waiting) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        index = heappop(ready)
        order.append(index)
        for follower in followers[index]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, follower)
    if len(order) < len(segment.tasks):
        raise deadlock(segment, streams, frozenset(order))
    return order


def deadlock(segment: Segment, streams: Streams, ended: frozenset[int]) -> ProgramError:
    """The error that names a cycle of tasks waiting for each other, given the tasks that did end."""
    previous = {index: before for tasks in streams.values() for before, index in pairwise(tasks)}
    stream_of = {index: name for name, tasks in streams.items() for index in tasks}
    index = next(i for i in range(len(segment.tasks)) if i not in ended)
    path: list[int] = []
    reasons: list[str] = []
    while index not in path:
        path.append(index)
        # A task that cannot start has an unfinished one before it, so the walk must come back.
        unmet = [before for before in segment.tasks[index].after if before not in ended]
        before = unmet[0] if unmet else previous[index]
        link = "waits for" if unmet else f"comes behind (stream {stream_of[index]!r})"
        reasons.append(f"{_label(segment, index)} {link} {_label(segment, before)}")
        index = before
    cycle = reasons[path.index(index) :]
    shown = "; ".join(cycle[:_TASKS_SHOWN]) + (f"; … {len(cycle)} tasks in all" if len(cycle) > _TASKS_SHOWN else "")
    return ProgramError(
        f"segment {segment.name!r} never ends: {shown}. A task may wait only for tasks that can end before it: "
        "drop one of these dependencies or move a task to another stream"
    )


def _label(segment: Segment, index: int) -> str:
    return f"task {index} {segment.tasks[index].name!r}"
