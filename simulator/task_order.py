"""Segments as task tables, and the order in which their tasks may run."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import numpy as np

from simulator.columns import ProgramColumns, SegmentColumns
from simulator.contention import Transfers
from simulator.errors import ProgramError
from simulator.program import COMPUTE_STREAM, HOST, Segment
from simulator.task_table import FloatArray, IntArray, StreamKind, TaskTable

Streams = dict[str, Sequence[int]]
"""The tasks of every stream, in the order they run there."""


def check_program(program: ProgramColumns, times: Sequence[FloatArray]) -> None:
    """Raise ProgramError where a segment refers to tasks it has not, runs less than once or lacks a valid time."""
    if len(times) != len(program.segments):
        raise ProgramError(f"{len(times)} arrays of task times for {len(program.segments)} segments; give one for each")
    for segment, seconds in zip(program.segments, times, strict=True):
        _check_times(segment, seconds)
        if segment.count < 1:
            raise ProgramError(
                f"segment {segment.name!r} has count {segment.count}; a segment runs at least once: leave it out"
            )
        size = segment.size
        wrong = np.flatnonzero((segment.dependencies < 0) | (segment.dependencies >= size))
        if wrong.size:
            row = int(np.searchsorted(segment.dependency_offsets, wrong[0], side="right")) - 1
            raise ProgramError(
                f"{_label(segment, row)} of segment {segment.name!r} waits for task {segment.dependencies[wrong[0]]}; "
                f"the segment has tasks 0 to {size - 1}: use indices of the same segment"
            )


def _check_times(segment: SegmentColumns, seconds: FloatArray) -> None:
    if seconds.shape != (segment.size,):
        raise ProgramError(
            f"segment {segment.name!r} has {segment.size} tasks and times of shape {seconds.shape}; "
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


def stream_numbers(segment: SegmentColumns, *, overlaps_communication: bool) -> tuple[tuple[str, ...], IntArray]:
    """Names of the streams in order of first use, and the number (n,) of each task's; one where nothing overlaps."""
    if not overlaps_communication:
        return (COMPUTE_STREAM,), np.zeros(segment.size, dtype=np.int64)
    known: dict[str, int] = {}
    of_task = np.array([known.setdefault(task.stream, len(known)) for task in segment.tasks], dtype=np.int64)
    streams = of_task[segment.which]
    first = np.full(len(known), segment.size)
    first[streams[::-1]] = np.arange(segment.size)[::-1]
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    names = tuple(known)
    return tuple(names[number] for number in order if first[number] < segment.size), rank[streams]


def segment_table(
    segment: SegmentColumns,
    seconds: FloatArray,
    streams: tuple[tuple[str, ...], IntArray],
    *,
    transfers: Transfers | None,
    compute_speed: float,
    transfer_speed: float,
) -> TaskTable:
    """A segment of known times as the task table of one rank; what the host moves slows nothing."""
    names, stream = streams
    # The stream of copies to and from the host has the name of their axis.
    kind = {COMPUTE_STREAM: StreamKind.COMPUTE, HOST: StreamKind.COPY}
    kinds = (kind.get(name, StreamKind.COMMUNICATION) for name in names)
    return TaskTable(
        stream=stream,
        stream_rank=np.zeros(len(names), dtype=np.int64),
        stream_kind=np.fromiter(kinds, dtype=np.int64, count=len(names)),
        **shared_work(seconds, transfers),
        meeting=np.full(segment.size, -1, dtype=np.int64),
        dependency_offsets=segment.dependency_offsets,
        dependencies=segment.dependencies,
        compute_speed=compute_speed,
        transfer_speed=transfer_speed,
        label=segment.which,
        labels=tuple([task.name for task in segment.tasks]),
        stream_names=names,
        name=f"segment {segment.name!r}",
    )


def shared_work(seconds: FloatArray, transfers: Transfers | None) -> dict[str, Any]:
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


def execution_order(segment: SegmentColumns, stream: IntArray) -> IntArray:
    """Tasks such that each comes after those it waits for and those before it on its stream, (n,).

    Of the tasks that could come next, the one of lowest index does (Kahn's algorithm with a heap).
    A segment that an engine has run to its end has such an order.
    """
    size = segment.size
    row = np.repeat(np.arange(size), np.diff(segment.dependency_offsets))
    if (segment.dependencies < row).all():
        return np.arange(size)
    followers: list[list[int]] = [[] for _ in range(size)]
    waiting = np.diff(segment.dependency_offsets).tolist()
    for index, before in zip(row.tolist(), segment.dependencies.tolist(), strict=True):
        followers[before].append(index)
    for number in range(int(stream.max()) + 1):
        for before, index in pairwise(np.flatnonzero(stream == number).tolist()):
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
    return np.array(order, dtype=np.int64)


def _label(segment: SegmentColumns, index: int) -> str:
    return f"task {index} {segment.tasks[segment.which[index]].name!r}"
