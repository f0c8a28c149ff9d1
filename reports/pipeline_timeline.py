"""The picture of one simulated step of a pipeline: a lane for each rank, and the memory of all ranks beneath."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.planning.pipeline_prediction import OperatorRun, PipelinePrediction, operator_run
from reports.timeline import Bar, FloatArray, Picture
from simulator.pipeline_memory import RankMemory
from simulator.pipeline_operators import EPILOGUE, MEETING, PROLOGUE
from simulator.pipeline_trace import action_times
from simulator.program import Phase
from simulator.schedules import ActionKind, Schedule

MAX_LANES = 16
"""Of more ranks only so many are drawn, the first and the last among them."""


def pipeline_picture(found: PipelinePrediction, *, title: str) -> Picture:
    """Picture of a predicted pipeline: passes, updates and the collectives that all wait for."""
    run, ranks = operator_run(found), found.lowered.schedule.ranks
    drawn = np.unique(np.linspace(0, ranks - 1, min(ranks, MAX_LANES)).round().astype(int)).tolist()
    return Picture(
        title=title,
        step_time_s=found.result.length_s,
        lanes=[_lane(rank) for rank in drawn],
        bars=list(_bars(found.lowered.schedule, run, frozenset(drawn))),
        curves=[_curve(run.memory[rank], found.result.length_s) for rank in drawn],
    )


def _lane(rank: int) -> str:
    return f"rank {rank}"


def _bars(schedule: Schedule, run: OperatorRun, drawn: frozenset[int]) -> Iterator[Bar]:
    """Every pass of the drawn ranks; of a pair that runs together, the forward pass first and the other behind it."""
    starts, ends = action_times(schedule, run.table, run.times, run.actions)
    for leader in schedule.leaders.tolist():
        rank = int(schedule.action_rank[leader])
        if rank in drawn:
            start, end = float(starts[leader]), float(ends[leader])
            members = [leader, leader + 1] if schedule.paired[leader] else [leader]
            width = (end - start) / len(members)
            for place, action in enumerate(members):
                forward = schedule.kind[action] == ActionKind.FORWARD
                phase = Phase.FORWARD if forward else Phase.BACKWARD
                yield _lane(rank), phase.value, start + place * width, start + (place + 1) * width
    label = run.table.label
    for kind, tasks in (
        ("communication", np.flatnonzero(label == MEETING)),
        (Phase.UPDATE.value, np.flatnonzero((label == PROLOGUE) | (label == EPILOGUE))),
    ):
        for task in tasks.tolist():
            rank = int(run.table.stream_rank[run.table.stream[task]])
            if rank in drawn and run.times[1][task] > run.times[0][task]:
                yield _lane(rank), kind, float(run.times[0][task]), float(run.times[1][task])


def _curve(memory: RankMemory, length_s: float) -> tuple[FloatArray, FloatArray]:
    """Bytes in use after every change, from the start of the first rank to the end of the last."""
    times = np.concatenate([[0.0], memory.times_s, [length_s]])
    sizes = np.concatenate([memory.total_bytes[:1], memory.total_bytes, memory.total_bytes[-1:]])
    return times, sizes
