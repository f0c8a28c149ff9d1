"""A program as columns: equal tasks are written once, and arrays say which of them runs where.

What simulates a program reads these columns. A network of many equal layers has few tasks that differ, so it is
written, timed and followed in arrays; `columns` makes the same of a program written task by task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from simulator.errors import ProgramError
from simulator.program import Buffer, BufferKind, Program, ProgramAxis, Segment, Task
from simulator.task_table import IntArray

KINDS = tuple(BufferKind)
KIND_INDEX = {kind: index for index, kind in enumerate(KINDS)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """Buffers that tasks allocate (sign +1) or release (−1), arrays (changes,).

    ``row`` is the task, ``buffer`` a number for the name; a release has neither size nor kind.
    """

    row: IntArray
    sign: IntArray
    buffer: IntArray
    size_bytes: IntArray
    kind: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentColumns:
    """A segment of n tasks: row i is ``tasks[which[i]]`` but for what it waits for and its buffers.

    Attributes
    ----------
    tasks : those that differ
    which : (n,)
    dependency_offsets, dependencies : (n + 1,), (D,) rows that each waits for
    """

    name: str
    count: int
    tasks: Sequence[Task]
    which: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    changes: Changes

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.which)


@dataclass(frozen=True, kw_only=True, eq=False)
class ProgramColumns:
    """A `simulator.program.Program` in columns; ``buffers`` are the names of buffers by number."""

    name: str
    devices: int
    axes: tuple[ProgramAxis, ...]
    segments: tuple[SegmentColumns, ...]
    resident: Changes
    buffers: Sequence[str]


def columns(program: Program) -> ProgramColumns:
    """The columns of a program written task by task.

    Raises
    ------
    ProgramError
        When a buffer has a negative size.
    """
    numbers: dict[str, int] = {}
    resident = _changes([(0, buffer) for buffer in program.resident], [], numbers)
    segments = tuple(_segment_columns(segment, numbers) for segment in program.segments)
    return ProgramColumns(
        name=program.name,
        devices=program.devices,
        axes=program.axes,
        segments=segments,
        resident=resident,
        buffers=tuple(numbers),
    )


def _segment_columns(segment: Segment, numbers: dict[str, int]) -> SegmentColumns:
    offsets = np.zeros(len(segment.tasks) + 1, dtype=np.int64)
    np.cumsum([len(task.after) for task in segment.tasks], out=offsets[1:])
    return SegmentColumns(
        name=segment.name,
        count=segment.count,
        tasks=segment.tasks,
        which=np.arange(len(segment.tasks)),
        dependency_offsets=offsets,
        dependencies=np.array(list(chain.from_iterable(task.after for task in segment.tasks)), dtype=np.int64),
        changes=_changes(
            [(row, buffer) for row, task in enumerate(segment.tasks) for buffer in task.allocates],
            [(row, name) for row, task in enumerate(segment.tasks) for name in task.releases],
            numbers,
        ),
    )


def _changes(
    allocated: Sequence[tuple[int, Buffer]], released: Sequence[tuple[int, str]], numbers: dict[str, int]
) -> Changes:
    rows = [
        (row, 1, numbers.setdefault(b.name, len(numbers)), _size(b), KIND_INDEX[b.kind]) for row, b in allocated
    ] + [(row, -1, numbers.setdefault(name, len(numbers)), 0, 0) for row, name in released]
    table = np.array(rows, dtype=np.int64).reshape(len(rows), 5).T
    return Changes(row=table[0], sign=table[1], buffer=table[2], size_bytes=table[3], kind=table[4])


def _size(buffer: Buffer) -> int:
    if buffer.size_bytes < 0:
        raise ProgramError(f"buffer {buffer.name!r} has {buffer.size_bytes} bytes; a size cannot be negative")
    return buffer.size_bytes
