"""Segments as task tables, and the order in which their tasks may run."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.contention import Transfers
from simulator.errors import ProgramError
from simulator.program import COMPUTE_STREAM, Program, Segment
from simulator.task_table import StreamKind, TaskTable

FloatArray = npt.NDArray[np.float64]

Streams = dict[str, Sequence[int]]
"""The tasks of every stream, in the order they run there."""


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


def segment_table(
    segment: Segment,
    seconds: FloatArray,
    streams: Streams,
    *,
    transfers: Transfers | None,
    compute_speed: float,
    transfer_speed: float,
) -> TaskTable:
    """A segment of known times as the task table of one rank; what is not on the compute stream communicates."""
    size = len(segment.tasks)
    stream = np.zeros(size, dtype=np.int64)
    for number, tasks in enumerate(streams.values()):
        stream[np.asarray(tasks, dtype=np.int64)] = number
    offsets = np.zeros(size + 1, dtype=np.int64)
    np.cumsum([len(task.after) for task in segment.tasks], out=offsets[1:])
    kinds = (StreamKind.COMPUTE if name == COMPUTE_STREAM else StreamKind.COMMUNICATION for name in streams)
    return TaskTable(
        stream=stream,
        stream_rank=np.zeros(len(streams), dtype=np.int64),
        stream_kind=np.fromiter(kinds, dtype=np.int64, count=len(streams)),
        **_work(seconds, transfers),
        meeting=np.full(size, -1, dtype=np.int64),
        dependency_offsets=offsets,
        dependencies=np.array([before for task in segment.tasks for before in task.after], dtype=np.int64),
        compute_speed=compute_speed,
        transfer_speed=transfer_speed,
        label=np.arange(size),
        labels=tuple([task.name for task in segment.tasks]),
        stream_names=tuple(streams),
        name=f"segment {segment.name!r}",
    )


def _work(seconds: FloatArray, transfers: Transfers | None) -> dict[str, Any]:
    """Work of the tasks and links that they share, as fields of a `TaskTable`."""
    size = len(seconds)
    work, latency, rate = seconds, np.zeros(size), np.zeros(size)
    offsets = np.zeros(size + 1, dtype=np.int64)
    links, weights, capacity = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    if transfers is not None:
        tasks, links, weights = transfers.tasks, transfers.links, transfers.link_weights
        capacity = transfers.link_capacity
        latency[tasks], rate[tasks] = transfers.latency_s, transfers.rate_bytes_per_s
        work = (seconds - latency) * np.where(rate > 0, rate, 1.0)
        offsets[tasks + 1] = transfers.link_counts
        np.cumsum(offsets, out=offsets)
    return {
        "work": work,
        "latency_s": latency,
        "rate_bytes_per_s": rate,
        "link_offsets": offsets,
        "links": links,
        "link_weights": weights,
        "link_capacity": capacity,
    }


def execution_order(segment: Segment, streams: Streams) -> Sequence[int]:
    """Tasks such that each comes after those it waits for and those before it on its stream.

    Of the tasks that could come next, the one of lowest index does (Kahn's algorithm with a heap).
    A segment that an engine has run to its end has such an order.
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
    return order


def _label(segment: Segment, index: int) -> str:
    return f"task {index} {segment.tasks[index].name!r}"
