"""Programs for the simulator's tests: a short way to write them, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from simulator.program import (
    COMPUTE_STREAM,
    Buffer,
    BufferKind,
    Collective,
    Kernel,
    Phase,
    Program,
    ProgramAxis,
    Segment,
    Task,
)

STREAMS = (COMPUTE_STREAM, "communication:data", "communication:tensor")
DURATIONS = st.sampled_from((0.0, 1.0, 2.0, 0.5, 0.1, 1e-6, 3.3))


def task(name: str, **fields: Any) -> Task:
    return Task(name=name, **{"phase": Phase.FORWARD, "kernel": Kernel.MATMUL, **fields})


def communication(name: str, axis: str = "data", **fields: Any) -> Task:
    values = {"phase": Phase.BACKWARD, "collective": Collective.ALL_REDUCE, "axis": axis, "payload_bytes": 1e6}
    return Task(name=name, stream=f"communication:{axis}", **{**values, **fields})


def buffer(name: str, size_bytes: int = 10, kind: BufferKind = BufferKind.ACTIVATION) -> Buffer:
    return Buffer(name=name, size_bytes=size_bytes, kind=kind)


def program(*segments: Segment, resident: tuple[Buffer, ...] = ()) -> Program:
    axes = (ProgramAxis(name="data", size=2, stride=2), ProgramAxis(name="tensor", size=2, stride=1))
    return Program(name="test", devices=4, axes=axes, segments=segments, resident=resident)


def segment(*tasks: Task, count: int = 1, name: str = "segment") -> Segment:
    return Segment(name=name, tasks=tasks, count=count)


@st.composite
def segments(draw: st.DrawFn, name: str = "segment") -> Segment:
    """Tasks on several streams that run in some hidden order, so that they cannot block each other.

    Dependencies may point to later indices on other streams. Every buffer is released where the
    segment has run past its allocation.
    """
    size = draw(st.integers(0, 12))
    streams = draw(st.lists(st.sampled_from(STREAMS), min_size=size, max_size=size))
    hidden = _interleave(draw, streams)
    position = {index: place for place, index in enumerate(hidden)}
    after = [
        tuple(b for b in range(size) if position[b] < position[i] and draw(st.integers(0, 3)) == 0) for i in range(size)
    ]
    allocates: list[list[Buffer]] = [[] for _ in range(size)]
    releases: list[list[str]] = [[] for _ in range(size)]
    for index in range(size):
        for number in range(draw(st.integers(0, 2))):
            one = buffer(f"{name}.{index}.{number}", draw(st.integers(0, 100)), draw(st.sampled_from(list(BufferKind))))
            allocates[index].append(one)
            users = [i for i in range(size) if i == index or index in after[i]]
            releases[draw(st.sampled_from(users))].append(one.name)
    tasks = []
    for index, stream in enumerate(streams):
        fields = {"after": after[index], "allocates": tuple(allocates[index]), "releases": tuple(releases[index])}
        phase = draw(st.sampled_from(list(Phase)))
        if stream == COMPUTE_STREAM:
            tasks.append(task(f"{name}.task{index}", phase=phase, **fields))
        else:
            tasks.append(communication(f"{name}.task{index}", stream.split(":")[1], phase=phase, **fields))
    return segment(*tasks, name=name, count=draw(st.integers(1, 3)))


def _interleave(draw: st.DrawFn, streams: list[str]) -> list[int]:
    """A merge of the streams: an order in which all tasks can run."""
    queues = {name: [i for i, s in enumerate(streams) if s == name] for name in STREAMS}
    order = []
    while any(queues.values()):
        order.append(queues[draw(st.sampled_from([name for name in STREAMS if queues[name]]))].pop(0))
    return order


@st.composite
def timed_programs(draw: st.DrawFn) -> tuple[Program, list[np.ndarray]]:
    """A program that can run where streams overlap, and a time for each task."""
    found = tuple(draw(segments(f"s{number}")) for number in range(draw(st.integers(1, 3))))
    times = [np.array([draw(DURATIONS) for _ in one.tasks]) for one in found]
    resident = tuple(buffer(f"r{i}", draw(st.integers(0, 50)), BufferKind.PARAMETER) for i in range(2))
    return program(*found, resident=resident), times
