"""Device memory over a step: what stands there when, and at the peak."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.columns import KIND_INDEX, KINDS, Changes, ProgramColumns
from simulator.errors import ProgramError
from simulator.program import BufferKind, Collective
from simulator.sorting import stable_order

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentSpan:
    """When a segment and its tasks run: what memory has to know of a schedule.

    ``starts_s`` and ``ends_s``, (tasks,), count from the start of a repetition; ``order``, (tasks,), lists the tasks
    such that none comes before one it depends on.
    """

    offset_s: float
    duration_s: float
    starts_s: FloatArray
    ends_s: FloatArray
    order: IntArray


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


class _Block(NamedTuple):
    """The changes of one repetition of a segment in order of time; segment −1 is what is resident.

    ``place``, (changes,), counts through the changes of all the program as they are given.
    """

    segment: int
    repetition: int
    place: IntArray
    times_s: FloatArray


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
    blocks = _blocks(program, spans)
    given = _given(program)
    place = np.concatenate([block.place for block in blocks])
    allocation, standing = _allocations(program, given, blocks, place)
    change = given.sign[place] * given.size_bytes[allocation]
    level = np.cumsum(change)
    peak = int(np.argmax(level)) if level.size else 0
    at_peak = np.zeros(len(KINDS), np.int64)
    np.add.at(at_peak, given.kind[allocation[: peak + 1]], change[: peak + 1])
    bounds = np.cumsum([0, *(len(block.place) for block in blocks)])
    curves = {
        (block.segment, block.repetition): MemoryCurve(times_s=block.times_s, total_bytes=level[start:stop])
        for block, start, stop in zip(blocks, bounds[:-1], bounds[1:], strict=True)
    }
    segments = range(len(program.segments))
    return MemoryTimeline(
        resident_bytes=int(program.resident.size_bytes.sum()),
        peak_bytes=int(at_peak.sum()),
        peak_time_s=_time_of(peak, blocks, bounds, spans),
        at_peak={kind: int(total) for kind, total in zip(KINDS, at_peak, strict=True) if total},
        final_bytes=int(level[-1]) if level.size else 0,
        unreleased=_unreleased(program, standing),
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


def _given(program: ProgramColumns) -> Changes:
    """What is resident, then the changes of the segments, as they are given."""
    parts = (program.resident, *(segment.changes for segment in program.segments))
    return Changes(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Changes)})


def _blocks(program: ProgramColumns, spans: Sequence[SegmentSpan]) -> list[_Block]:
    begin = len(program.resident.row)
    blocks = [_Block(-1, 0, np.arange(begin), np.zeros(begin))]
    for index, (segment, span) in enumerate(zip(program.segments, spans, strict=True)):
        order, times_s = _in_time(segment.changes, span)
        blocks += [_Block(index, repetition, begin + order, times_s) for repetition in range(min(segment.count, 2))]
        begin += len(order)
    return blocks


def _in_time(given: Changes, span: SegmentSpan) -> tuple[IntArray, FloatArray]:
    """Order (changes,) of the changes of a segment in time, and their times in that order.

    At one instant: first the ends of tasks that began earlier, then the tasks that begin now, each in the order of
    dependencies (a task of no length begins and ends in its turn).
    """
    # A task i begins with event 2 i and ends with event 2 i + 1. Listed by their turn, most are in order of time.
    begins, lasts = 2 * span.order, (span.starts_s < span.ends_s)[span.order]
    now = np.repeat(begins, 2 - lasts)
    now[1:] += now[1:] == now[:-1]
    events = np.concatenate([begins[lasts] + 1, now])
    moments = np.stack([span.starts_s, span.ends_s], axis=1).ravel()
    rank = np.empty(len(events), dtype=np.int64)
    rank[events[np.argsort(moments[events], kind="stable")]] = np.arange(len(events))
    event = 2 * given.row + (given.sign < 0)
    order = stable_order(rank[event], len(events))
    return order, moments[event[order]]


def _allocations(
    program: ProgramColumns, given: Changes, blocks: Sequence[_Block], place: IntArray
) -> tuple[IntArray, IntArray]:
    """Place (changes,) of the allocation that each change makes or releases, and the buffers that stand at the end.

    Raises ProgramError where allocations and releases of a buffer do not alternate.
    """
    name = given.buffer[place]
    by_name = stable_order(name, len(program.buffers))
    names, allocates = name[by_name], (given.sign > 0)[place[by_name]]
    goes_on = names[1:] == names[:-1]
    stood = np.zeros(len(names), dtype=bool)
    stood[1:] = goes_on & allocates[:-1]
    wrong = allocates == stood
    if wrong.any():
        raise _wrong_change(program, given, blocks, int(by_name[wrong].min()))
    releases = np.flatnonzero(stood)
    allocation = place.copy()
    allocation[by_name[releases]] = place[by_name[releases - 1]]
    stays = allocates.copy()
    stays[:-1] &= ~goes_on
    return allocation, names[stays]


def _wrong_change(program: ProgramColumns, given: Changes, blocks: Sequence[_Block], number: int) -> ProgramError:
    """What is wrong with change `number` of all blocks."""
    for block in blocks:
        if number < len(block.place):
            break
        number -= len(block.place)
    place = block.place[number]
    name = program.buffers[given.buffer[place]]
    if block.segment < 0:
        return ProgramError(f"resident buffer {name!r} is listed twice; give every buffer a name of its own")
    segment = program.segments[block.segment]
    index = int(given.row[place])
    where = f"task {index} {segment.tasks[segment.which[index]].name!r} of segment {segment.name!r}"
    if block.repetition:
        where += " (second repetition)"
    if given.sign[place] > 0:
        return ProgramError(
            f"buffer {name!r} is allocated twice: {where} allocates it while it stands; release it before"
        )
    return ProgramError(f"{where} releases buffer {name!r}, which is not allocated then; allocate it before")


def _time_of(row: int, blocks: Sequence[_Block], bounds: IntArray, spans: Sequence[SegmentSpan]) -> float:
    """Seconds from the start of the step to change number `row`."""
    if row < bounds[1] or not bounds[-1]:
        return 0.0
    number = int(np.searchsorted(bounds, row, side="right")) - 1
    block = blocks[number]
    span = spans[block.segment]
    return float(span.offset_s + block.repetition * span.duration_s + block.times_s[row - bounds[number]])


def _unreleased(program: ProgramColumns, standing: IntArray) -> tuple[str, ...]:
    stands = np.zeros(len(program.buffers), bool)
    stands[standing] = True
    resident = program.resident.buffer
    gone = resident[~stands[resident]]
    if gone.size:
        raise ProgramError(
            f"resident buffer {program.buffers[gone.min()]!r} is released and not there after the step; "
            "allocate it again"
        )
    stands[resident] = False
    return tuple(program.buffers[left] for left in np.flatnonzero(stands).tolist())
