"""Predicted beside measured, by class of work: where a step took longer or shorter than was said, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.execution.communication import FINISH, RUN, START
from planner.execution.measuring.clocks import RECEIVE, REDUCTION, RankRecord
from planner.execution.measuring.recorded import FloatArray, RankTimes, quiet_tasks, rank_times
from planner.execution.virtual.script import predicted_times, tie_axes
from planner.lowering.instructions import LoweredStages
from planner.planning.prediction import ROUNDING, SimulatedPlan, operator_run, operator_tasks
from planner.plans.plan import Plan
from simulator.calibration.from_run import MessageRow, WorkRow
from simulator.hardware import Hardware
from simulator.program import Kernel, Task

OPERATORS, MESSAGES, REST = "operators", "messages", "rest"
WAITING, STAGES, BETWEEN = "waiting for other ranks", "waiting for other stages", "between instructions"

Group = tuple[str, str]
"""Kind and name of an error's row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """One class of work in a step: seconds of a rank's time, the mean over ranks; rows add up to the step.

    ``kind`` is `OPERATORS`, `MESSAGES` (what computation does not hide) or `REST`; ``calls`` is the mean over ranks.
    ``without_core_s`` is the part of an operator's time in which its rank had no core, because of other ranks on the
    same cores or of other programs.
    """

    kind: str
    name: str
    calls: float
    predicted_s: float
    measured_s: float
    without_core_s: float = 0.0

    @property
    def difference_s(self) -> float:
        """Measured less predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A step as predicted and as recorded.

    ``recorded_step_time_s`` is the slowest rank's, the median of the recorded steps, which the clocks make a little
    longer than others; ``errors`` add up to the predicted step and to the mean rank of the recorded step in the middle.
    ``hardware`` is the profile of the prediction.
    """

    network: str
    hardware: str
    hardware_hash: str
    processes: int
    recorded_steps: int
    recorded_step_time_s: float
    errors: tuple[ErrorRow, ...]
    work: tuple[WorkRow, ...]
    messages: tuple[MessageRow, ...]


def compare(
    plan: Plan,
    lowered: LoweredStages,
    records: Sequence[RankRecord],
    hardware: Hardware,
    simulated: SimulatedPlan,
) -> Comparison:
    """Lay the recorded steps of all ranks beside the prediction on `hardware`.

    Parameters
    ----------
    records : one a rank
    simulated : the step on `hardware`, which says how long it takes and what of its messages computation hides
    """
    ranks = rank_times(plan, lowered, records)
    quiet = [quiet_tasks(lowered, rank) for rank in range(len(ranks))]
    tasks = {id(entry.task): entry.task for rank in ranks for entry in rank.entries}
    tasks |= {id(task): task for of_rank in quiet for task, _ in of_rank}
    seconds = dict(zip(tasks, predicted_times(plan, lowered, list(tasks.values()), hardware), strict=True))
    whole = np.max([rank.durations_s for rank in ranks], axis=0)
    middle = middle_step(ranks)
    exposed = _exposed(simulated)
    shown = {key: value * exposed.get(_group(tasks[key]), 1.0) for key, value in seconds.items()}
    waiting = 1.0 - 1.0 / hardware.waiting(len(ranks)) if lowered.schedule.ranks == 1 else 0.0
    return Comparison(
        network=plan.network,
        hardware=plan.hardware,
        hardware_hash=hardware.hash,
        processes=len(records),
        recorded_steps=len(whole),
        recorded_step_time_s=float(np.median(whole)),
        errors=tuple(
            _errors([rank.of_step(middle) for rank in ranks], quiet, shown, waiting, simulated.result.length_s, middle)
        ),
        work=tuple(_work_rows(ranks, seconds)),
        messages=tuple(_message_rows(lowered, ranks, seconds)),
    )


def middle_step(ranks: Sequence[RankTimes]) -> int:
    """The recorded step of median length."""
    whole = np.max([rank.durations_s for rank in ranks], axis=0)
    return int(np.argsort(whole, kind="stable")[(len(whole) - 1) // 2])


def _exposed(simulated: SimulatedPlan) -> dict[Group, float]:
    """Part of the time of messages, by their rows, in which the simulated rank of each computes nothing."""
    work, run = simulated.lowered.work, operator_run(simulated)
    starts, ends = run.times
    rank = run.table.stream_rank[run.table.stream]
    kernels = run.table.label == 0
    taken: dict[Group, float] = {}
    shown: dict[Group, float] = {}
    tasks = list(operator_tasks(simulated, run))
    for one in range(simulated.lowered.schedule.ranks):
        mine = np.flatnonzero(kernels & (rank == one))
        mine = mine[np.argsort(starts[mine], kind="stable")]
        begin, end = starts[mine], ends[mine]
        before = np.concatenate(([0.0], np.cumsum(end - begin)))

        def computed(
            moment: float, begin: FloatArray = begin, end: FloatArray = end, before: FloatArray = before
        ) -> float:
            """Seconds of computation before a moment."""
            place = int(np.searchsorted(begin, moment))
            return float(before[place] - max(0.0, end[place - 1] - moment)) if place else 0.0

        for operator, numbers in tasks:
            length = float(ends[operator] - starts[operator])
            messages = [n for n in numbers if work.tasks[n].collective is not None]
            if rank[operator] != one or kernels[operator] or not length or not messages:
                continue
            hidden = computed(float(ends[operator])) - computed(float(starts[operator]))
            for number in messages:
                group, part = _group(work.tasks[number]), length / len(messages)
                taken[group] = taken.get(group, 0.0) + part
                shown[group] = shown.get(group, 0.0) + part * (1.0 - hidden / length)
    return {group: shown[group] / seconds for group, seconds in taken.items()}


# Errors


@dataclass(slots=True)
class _Sums:
    calls: float = 0.0
    predicted_s: float = 0.0
    measured_s: float = 0.0
    without_core_s: float = 0.0


def _group(task: Task, *, inside: bool = False) -> Group:
    if task.collective is None:
        return OPERATORS, task.kernel.value
    where = "inside operators" if inside else str(task.collective)
    return MESSAGES, f"{where} on {task.axis}" if task.axis else f"{where} among stages"


def _errors(
    ranks: Sequence[RankTimes],
    quiet: Sequence[Sequence[tuple[Task, int]]],
    seconds: Mapping[int, float],
    waiting: float,
    predicted_step_s: float,
    step: int,
) -> Iterator[ErrorRow]:
    sums: dict[Group, _Sums] = {}
    for rank, silent in zip(ranks, quiet, strict=True):
        for group, predicted, measured, calls, waited in _parts(rank, silent, seconds, waiting):
            total = sums.setdefault(group, _Sums())
            total.calls += calls / len(ranks)
            total.predicted_s += predicted / len(ranks)
            total.measured_s += measured / len(ranks)
            total.without_core_s += waited / len(ranks)
    measured_step_s = float(np.mean([rank.durations_s[step] for rank in ranks]))
    rest = sums.setdefault((REST, BETWEEN), _Sums())
    staged = (REST, STAGES) in sums
    left = sums[REST, STAGES] if staged else rest
    left.predicted_s = predicted_step_s - sum(total.predicted_s for total in sums.values())
    rest.measured_s = measured_step_s - sum(total.measured_s for total in sums.values())
    if abs(left.predicted_s) < 1e3 * ROUNDING * predicted_step_s:
        left.predicted_s = 0.0
    order = (OPERATORS, MESSAGES, REST)
    for (kind, name), total in sorted(
        sums.items(), key=lambda item: (order.index(item[0][0]), -item[1].measured_s, item[0][1])
    ):
        yield ErrorRow(
            kind=kind,
            name=name,
            calls=total.calls,
            predicted_s=total.predicted_s,
            measured_s=total.measured_s,
            without_core_s=total.without_core_s,
        )


def _parts(
    rank: RankTimes, silent: Sequence[tuple[Task, int]], seconds: Mapping[int, float], waiting: float
) -> Iterator[tuple[Group, float, float, float, float]]:
    """Group, predicted and measured seconds, calls, and seconds without a core, of all in a step of a rank.

    ``waiting`` is the part of the predicted seconds of kernels in which ranks wait for the slowest of them.
    """
    inside = {task.axis for task, _ in silent if task.collective is not None}
    for task, times in silent:
        yield _group(task, inside=True), times * seconds[id(task)], 0.0, 0.0, 0.0
    events = zip(rank.number, rank.part, rank.seconds, rank.busy_s, rank.waited_s, strict=True)
    for number, part, took, busy, waited in events:
        if part == RECEIVE:
            yield (REST, STAGES), 0.0, took, 1.0, 0.0
        elif part == REDUCTION:
            name = next(iter(inside)) if len(inside) == 1 else "several axes"
            yield (MESSAGES, f"inside operators on {name}"), 0.0, took - waited, 1.0, 0.0
            yield (REST, WAITING), 0.0, waited, 0.0, 0.0
        else:
            task = rank.entries[number].task
            first = part in (RUN, START)
            idle = max(0.0, took - busy) if part == RUN else 0.0
            predicted = seconds[id(task)] * first
            late = waiting * predicted if part == RUN else 0.0
            yield _group(task), predicted - late, took - waited, float(first), idle
            if late:
                yield (REST, WAITING), late, 0.0, 0.0, 0.0
            if part == FINISH:
                yield (REST, WAITING), 0.0, waited, 0.0, 0.0


# What calibration learns from


@dataclass(slots=True)
class _Samples:
    predicted_s: float
    measured_s: list[float] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)


def _work_rows(ranks: Sequence[RankTimes], seconds: Mapping[int, float]) -> Iterator[WorkRow]:
    found: dict[tuple[Kernel, str, float, float], _Samples] = {}
    for rank in ranks:
        run = rank.part == RUN
        for number, took, busy in zip(rank.number[run], rank.seconds[run], rank.busy_s[run], strict=True):
            task = rank.entries[number].task
            key = (task.kernel, task.dtype, task.flops, task.bytes_moved)
            samples = found.setdefault(key, _Samples(seconds[id(task)]))
            samples.measured_s.append(float(took))
            samples.busy_s.append(float(busy))
    for (kernel, dtype, flops, moved), samples in sorted(found.items(), key=lambda item: item[0]):
        yield WorkRow(
            kernel=kernel,
            dtype=dtype,
            flops=flops,
            bytes_moved=moved,
            calls=len(samples.measured_s),
            predicted_s=samples.predicted_s,
            measured_s=float(np.median(samples.measured_s)),
            busy_s=float(np.median(samples.busy_s)),
        )


def _message_rows(
    lowered: LoweredStages, ranks: Sequence[RankTimes], seconds: Mapping[int, float]
) -> Iterator[MessageRow]:
    sizes = {axis.name: axis.size for axis in lowered.mesh.axes} | {a.name: a.size for a in tie_axes(lowered)}
    found: dict[tuple[str, str, float], _Samples] = {}
    for rank in ranks:
        begun: dict[int, list[float]] = {}
        for event in np.flatnonzero((rank.part == START) | (rank.part == FINISH)).tolist():
            number = int(rank.number[event])
            if rank.part[event] == START:
                begun.setdefault(number, []).append(float(rank.seconds[event]))
                continue
            task, waited = rank.entries[number].task, float(rank.waited_s[event])
            key = (str(task.collective), task.axis, task.payload_bytes)
            samples = found.setdefault(key, _Samples(seconds[id(task)]))
            samples.measured_s.append(begun[number].pop(0) + float(rank.seconds[event]) - waited)
            samples.waited_s.append(waited)
    for (collective, axis, payload), samples in sorted(found.items(), key=lambda item: item[0]):
        yield MessageRow(
            collective=collective,
            axis=axis,
            group_size=sizes.get(axis, 1),
            payload_bytes=payload,
            calls=len(samples.measured_s),
            predicted_s=samples.predicted_s,
            measured_s=float(np.median(samples.measured_s)),
            waited_s=float(np.median(samples.waited_s)),
        )
