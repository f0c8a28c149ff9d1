"""The result of a simulation: when every task of a step runs, where the time goes, what memory does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from simulator.columns import ProgramColumns, columns
from simulator.contention import Transfers, messages_meet, overloads, segment_transfers, without_links
from simulator.hardware import Hardware
from simulator.memory import MemoryTimeline, SegmentSpan, memory_timeline
from simulator.program import BufferKind, Collective, Phase, Program
from simulator.task_order import check_program, execution_order, segment_table, stream_numbers
from simulator.task_table import FloatArray, TaskTable
from simulator.timing import task_times

_COMPUTE, _OPTIMIZER, _COMMUNICATION = range(3)
LONG = 2_000
"""Tasks that take longer to run twice than it takes to find which links are shared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SegmentTimeline:
    """A segment of the step: `count` equal repetitions, the first at `offset_s`.

    ``starts_s`` and ``ends_s``, (tasks,), count from the start of a repetition.
    """

    name: str
    count: int
    offset_s: float
    duration_s: float
    starts_s: FloatArray
    ends_s: FloatArray

    @property
    def end_s(self) -> float:
        """When the last repetition ends, from the start of the step."""
        return self.offset_s + self.count * self.duration_s


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """One simulated step of a device.

    ``breakdown`` holds ``compute_s`` (forward and backward), ``optimizer_s``,
    ``exposed_communication_s`` (only communication runs) and ``bubble_s`` (nothing runs); they add
    up to ``step_time_s``.
    """

    step_time_s: float
    overlaps_communication: bool
    segments: tuple[SegmentTimeline, ...]
    breakdown: Mapping[str, float]
    memory: MemoryTimeline
    program: ProgramColumns

    @property
    def peak_memory_bytes(self) -> int:
        """The most memory in use at any time."""
        return self.memory.peak_bytes

    @property
    def memory_at_peak(self) -> Mapping[BufferKind, int]:
        """What stands in memory at the peak, in bytes."""
        return self.memory.at_peak


Engine = Callable[[TaskTable], tuple[FloatArray, FloatArray]]
"""Runs a table: when its tasks start and end, arrays (tasks,) of seconds."""


def simulate_program(
    program: Program | ProgramColumns, hardware: Hardware, run: Engine, times: Sequence[FloatArray] | None = None
) -> Timeline:
    """The timeline of `program` on `hardware`, by `run`; `times` stand in for `task_times`."""
    program = columns(program) if isinstance(program, Program) else program
    alone = task_times(program, hardware) if times is None else times
    return simulate_segments(
        program,
        alone,
        run,
        overlaps_communication=hardware.overlaps_communication,
        transfers=lambda number: segment_transfers(program, hardware, number, alone[number]),
        compute_speed=hardware.overlap_compute_speed,
        transfer_speed=hardware.overlap_transfer_speed,
        message_workspace=hardware.message_workspace,
    )


def simulate_segments(
    program: Program | ProgramColumns,
    times: Sequence[FloatArray],
    run: Engine,
    *,
    overlaps_communication: bool,
    transfers: Callable[[int], Transfers | None] = lambda number: None,
    compute_speed: float,
    transfer_speed: float,
    message_workspace: Mapping[Collective, float] | None = None,
) -> Timeline:
    """The timeline of a program whose tasks take `times` alone, each segment run by `run` as the table of one rank.

    A segment starts in an idle device and ends in one, so its repetitions are equal: it is run once,
    and `count` of them take `count` times as long, exactly. ``transfers`` are asked for by the number of a segment,
    where it matters which links its messages cross.
    """
    program = columns(program) if isinstance(program, Program) else program
    check_program(program, times)
    segments: list[SegmentTimeline] = []
    spans: list[SegmentSpan] = []
    offset = 0.0
    for number, (segment, seconds) in enumerate(zip(program.segments, times, strict=True)):
        streams = stream_numbers(segment, overlaps_communication=overlaps_communication)
        tabled = partial(
            segment_table, segment, seconds, streams, compute_speed=compute_speed, transfer_speed=transfer_speed
        )
        starts, ends = _run(tabled, run, partial(transfers, number))
        starts.setflags(write=False)
        ends.setflags(write=False)
        segments.append(
            SegmentTimeline(
                name=segment.name,
                count=segment.count,
                offset_s=offset,
                duration_s=float(ends.max(initial=0.0)),
                starts_s=starts,
                ends_s=ends,
            )
        )
        spans.append(
            SegmentSpan(
                offset_s=offset,
                duration_s=segments[-1].duration_s,
                starts_s=starts,
                ends_s=ends,
                order=execution_order(segment, streams[1]),
            )
        )
        offset = segments[-1].end_s
    return Timeline(
        step_time_s=offset,
        overlaps_communication=overlaps_communication,
        segments=tuple(segments),
        breakdown=_breakdown(program, segments),
        memory=memory_timeline(program, spans, message_workspace),
        program=program,
    )


def _run(
    tabled: Callable[..., TaskTable], run: Engine, transfers: Callable[[], Transfers | None]
) -> tuple[FloatArray, FloatArray]:
    """Run a segment as if no link were shared, which is quick, and again if that asks too much of one.

    Which links messages cross is not even asked where none are under way at once, and nothing slows them. Where overlap
    slows anything, nothing is quick: what is long is run once, with the links.
    """
    table = tabled(transfers=None)
    slows = table.compute_speed != 1 or table.transfer_speed != 1
    if slows and table.size >= LONG:
        shared = transfers()
        return run(table if shared is None else tabled(transfers=shared))
    alone = None
    if table.transfer_speed == 1:
        alone = run(table)
        if not messages_meet(table, *alone):
            return alone
    shared = transfers()
    if shared is not None:
        table = tabled(transfers=shared)
        alone = alone or run(without_links(table))
        return run(table) if table.links.size and overloads(table, *alone) else alone
    return alone or run(table)


def _breakdown(program: ProgramColumns, timelines: Sequence[SegmentTimeline]) -> dict[str, float]:
    """Seconds of a step by what runs; where several do, compute comes before optimizer before communication."""
    compute = optimizer = exposed = bubble = 0.0
    for segment, timeline in zip(program.segments, timelines, strict=True):
        classes = np.fromiter((_class_of(task.collective, task.phase) for task in segment.tasks), np.int64)
        of_task = classes[segment.which]
        spans = [_spans(timeline.starts_s[of_task == kind], timeline.ends_s[of_task == kind]) for kind in range(3)]
        kinds = np.repeat(np.arange(3), [len(starts) for starts, _ in spans])
        times = np.concatenate([*(starts for starts, _ in spans), *(ends for _, ends in spans)])
        order = np.argsort(times, kind="stable")
        change = np.zeros((3, len(times) + 1))
        change[np.tile(kinds, 2)[order], np.arange(1, len(times) + 1)] = np.repeat((1, -1), len(kinds))[order]
        running = np.cumsum(change, axis=1) > 0
        lengths = np.diff(times[order], prepend=0.0, append=timeline.duration_s) * segment.count
        taken = np.zeros(lengths.shape, bool)
        parts: list[float] = []
        for row in running:
            parts.append(float(lengths[row & ~taken].sum()))
            taken |= row
        compute += parts[_COMPUTE]
        optimizer += parts[_OPTIMIZER]
        exposed += parts[_COMMUNICATION]
        bubble += float(lengths[~taken].sum())
    return {"compute_s": compute, "exposed_communication_s": exposed, "bubble_s": bubble, "optimizer_s": optimizer}


def _spans(starts: FloatArray, ends: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Where the spans in which any of some tasks runs begin and end."""
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > reached[:-1]))[: len(starts)])
    return starts[first], reached[np.append(first[1:], len(starts))[: len(first)] - 1]


def _class_of(collective: Collective | None, phase: Phase) -> int:
    if collective is not None:
        return _COMMUNICATION
    return _OPTIMIZER if phase is Phase.UPDATE else _COMPUTE
