"""Device memory over a step: what stands there when, and at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.columns import KIND_INDEX, KINDS, Changes, ProgramColumns, SegmentColumns
from simulator.errors import ProgramError
from simulator.program import BufferKind, Collective

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentSpan:
    """When a segment and its tasks run: what memory has to know of a schedule.

    ``starts_s`` and ``ends_s``, (tasks,), count from the start of a repetition; ``position``,
    (tasks,), ranks the tasks in an order that respects their dependencies.
    """

    offset_s: float
    duration_s: float
    starts_s: FloatArray
    ends_s: FloatArray
    position: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryCurve:
    """Bytes in use after every change, (changes,), at times (changes,) from the start of a repetition."""

    times_s: FloatArray
    total_bytes: IntArray


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryTimeline:
    """The memory of one device over a step.

    ``at_peak`` has the kinds that stand at the peak. ``first[s]`` is the curve of segment `s` the
    first time it runs, ``later[s]`` of every other time.
    ``unreleased`` names buffers that outlive the step without being resident.
    """

    resident_bytes: int
    peak_bytes: int
    peak_time_s: float
    at_peak: Mapping[BufferKind, int]
    final_bytes: int
    unreleased: tuple[str, ...]
    first: tuple[MemoryCurve, ...]
    later: tuple[MemoryCurve, ...]


class _Changes(NamedTuple):
    """Buffers that come (sign +1) or go (−1) in a segment, in order of time; arrays (changes,)."""

    task: IntArray
    sign: IntArray
    name: IntArray
    size: IntArray
    kind: IntArray
    time: FloatArray


class _Block(NamedTuple):
    """The changes of one repetition of a segment; segment −1 is what is resident."""

    segment: int
    repetition: int
    changes: _Changes


def memory_timeline(
    program: ProgramColumns, spans: Sequence[SegmentSpan], message_workspace: Mapping[Collective, float] | None = None
) -> MemoryTimeline:
    """Memory of a device that runs `program` at the times of `spans`.

    While a message is on its way it takes, beside its source and its result, as many bytes for each of its payload as
    `message_workspace` says of its collective.

    A buffer stands from the start of the task that allocates it to the end of the task that
    releases it; at one instant, what ends is released before what starts is allocated. A repeated
    segment is followed twice: from its second time on it finds the memory it leaves behind, so all
    later times are alike.

    Raises
    ------
    ProgramError
        When a buffer is allocated while it stands or released while it does not.
    """
    if message_workspace:
        program = _with_workspace(program, message_workspace)
    blocks = [_Block(-1, 0, _resident_changes(program))]
    for index, (segment, span) in enumerate(zip(program.segments, spans, strict=True)):
        changes = _segment_changes(segment, span)
        blocks += [_Block(index, repetition, changes) for repetition in range(min(segment.count, 2))]
    size, kind = _resolve_releases(program, blocks)
    sign = np.concatenate([block.changes.sign for block in blocks])
    level = np.cumsum(sign * size)
    if not level.size:
        level, sign, size, kind = (np.zeros(1, np.int64) for _ in range(4))
    peak = int(np.argmax(level))
    bounds = np.cumsum([0, *(block.changes.sign.size for block in blocks)])
    curves = {
        (block.segment, block.repetition): MemoryCurve(times_s=block.changes.time, total_bytes=level[start:stop])
        for block, start, stop in zip(blocks, bounds[:-1], bounds[1:], strict=True)
    }
    at_peak = np.zeros(len(KINDS), np.int64)
    np.add.at(at_peak, kind[: peak + 1], (sign * size)[: peak + 1])
    segments = range(len(program.segments))
    return MemoryTimeline(
        resident_bytes=int(program.resident.size_bytes.sum()),
        peak_bytes=int(level[peak]),
        peak_time_s=_time_of(peak, blocks, bounds, spans),
        at_peak={kind: int(total) for kind, total in zip(KINDS, at_peak, strict=True) if total},
        final_bytes=int(level[-1]),
        unreleased=_unreleased(program, blocks),
        first=tuple(curves[index, 0] for index in segments),
        later=tuple(curves.get((index, 1), curves[index, 0]) for index in segments),
    )


def _with_workspace(program: ProgramColumns, message_workspace: Mapping[Collective, float]) -> ProgramColumns:
    """The program with a buffer more for every message."""
    names, segments = list(program.buffers), []
    for segment in program.segments:
        share = [message_workspace.get(task.collective, 0.0) if task.collective else 0.0 for task in segment.tasks]
        needed = np.array([task.payload_bytes * part for task, part in zip(segment.tasks, share, strict=True)])
        sizes = needed[segment.which].astype(np.int64)
        rows = np.flatnonzero(sizes)
        numbers = len(names) + np.arange(len(rows))
        names += [f"workspace of {segment.tasks[segment.which[row]].name}" for row in rows]
        ones, given = np.ones(len(rows), np.int64), segment.changes
        changes = Changes(
            row=np.concatenate((given.row, rows, rows)),
            sign=np.concatenate((given.sign, ones, -ones)),
            buffer=np.concatenate((given.buffer, numbers, numbers)),
            size_bytes=np.concatenate((given.size_bytes, sizes[rows], 0 * ones)),
            kind=np.concatenate((given.kind, KIND_INDEX[BufferKind.WORKSPACE] * ones, 0 * ones)),
        )
        segments.append(replace(segment, changes=changes))
    return replace(program, segments=tuple(segments), buffers=names)


def _resident_changes(program: ProgramColumns) -> _Changes:
    given = program.resident
    return _Changes(given.row, given.sign, given.buffer, given.size_bytes, given.kind, np.zeros(len(given.row)))


def _segment_changes(segment: SegmentColumns, span: SegmentSpan) -> _Changes:
    given = segment.changes
    task_of, sign, name, size, kind = given.row, given.sign, given.buffer, given.size_bytes, given.kind
    time = np.where(sign > 0, span.starts_s[task_of], span.ends_s[task_of])
    # At one instant: first the ends of tasks that began earlier, then the tasks that begin now,
    # each in the order of dependencies (a task of no length begins and ends in its turn).
    ends_earlier_task = (sign < 0) & (span.starts_s < span.ends_s)[task_of]
    turn = np.where(ends_earlier_task, 0, 2 * len(span.position)) + 2 * span.position[task_of] + (sign < 0)
    order = np.lexsort((turn, time))
    return _Changes(task_of[order], sign[order], name[order], size[order], kind[order], time[order])


def _resolve_releases(program: ProgramColumns, blocks: Sequence[_Block]) -> tuple[IntArray, IntArray]:
    """Size and kind of every change, a release taking those of its allocation; checks that they alternate."""
    sign, name, size, kind = (
        np.concatenate([getattr(block.changes, column) for block in blocks])
        for column in ("sign", "name", "size", "kind")
    )
    # What fits into 16 bits is sorted several times as fast.
    by_name = np.argsort(name.astype(np.uint16) if len(program.buffers) < 2**16 else name, kind="stable")
    signs, names, first = sign[by_name], name[by_name], np.ones(len(by_name), bool)
    first[1:] = names[1:] != names[:-1]
    before = np.where(first, -1, np.roll(signs, 1))
    wrong = by_name[signs == before]
    if wrong.size:
        raise _wrong_change(program, blocks, int(wrong.min()))
    releases = np.flatnonzero(signs < 0)
    size[by_name[releases]] = size[by_name[releases - 1]]
    kind[by_name[releases]] = kind[by_name[releases - 1]]
    return size, kind


def _wrong_change(program: ProgramColumns, blocks: Sequence[_Block], row: int) -> ProgramError:
    for block in blocks:
        if row < block.changes.sign.size:
            break
        row -= block.changes.sign.size
    name = program.buffers[block.changes.name[row]]
    if block.segment < 0:
        return ProgramError(f"resident buffer {name!r} is listed twice; give every buffer a name of its own")
    segment = program.segments[block.segment]
    index = int(block.changes.task[row])
    place = f"task {index} {segment.tasks[segment.which[index]].name!r} of segment {segment.name!r}"
    if block.repetition:
        place += " (second repetition)"
    if block.changes.sign[row] > 0:
        return ProgramError(
            f"buffer {name!r} is allocated twice: {place} allocates it while it stands; release it before"
        )
    return ProgramError(f"{place} releases buffer {name!r}, which is not allocated then; allocate it before")


def _time_of(row: int, blocks: Sequence[_Block], bounds: IntArray, spans: Sequence[SegmentSpan]) -> float:
    """Seconds from the start of the step to change number `row`."""
    if row < bounds[1] or not bounds[-1]:
        return 0.0
    number = int(np.searchsorted(bounds, row, side="right")) - 1
    block = blocks[number]
    span = spans[block.segment]
    return float(span.offset_s + block.repetition * span.duration_s + block.changes.time[row - bounds[number]])


def _unreleased(program: ProgramColumns, blocks: Sequence[_Block]) -> tuple[str, ...]:
    names = program.buffers
    standing = np.zeros(len(names), np.int64)
    for block in blocks:
        np.add.at(standing, block.changes.name, block.changes.sign)
    resident = np.zeros(len(names), bool)
    resident[program.resident.buffer] = True
    gone = np.flatnonzero(resident & (standing == 0))
    if gone.size:
        raise ProgramError(
            f"resident buffer {names[gone[0]]!r} is released and not there after the step; allocate it again"
        )
    return tuple(names[left] for left in np.flatnonzero(~resident & (standing != 0)).tolist())
