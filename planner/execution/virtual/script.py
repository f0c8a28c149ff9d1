"""What each rank of a virtual run does, in order, with the seconds that it is predicted to take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Communicate, Instruction, LoweredStages, read_values, written_values
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.plans.plan import Plan
from simulator.hardware import Hardware
from simulator.pipeline_operators import PLAIN, action_variants
from simulator.program import Collective, ProgramAxis, Task
from simulator.schedules import ActionKind
from simulator.timing import task_times


@dataclass(frozen=True, slots=True, kw_only=True)
class Computation:
    """Computation."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginMessage:
    """Send one's part of message `number` to the group of an axis; it takes so long once all have sent theirs.

    ``slow_seconds`` is what it takes where a link of the group is slow.
    """

    number: int
    axis: int
    collective: Collective
    seconds: float
    slow_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Wait for message `number`."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Post:
    """Send to the pipeline rank of a stage; with `blocking` the sender is busy as long as it takes."""

    rank: int
    tag: int
    seconds: float
    slow_seconds: float
    blocking: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Receive:
    """Receive from the pipeline rank of a stage."""

    rank: int
    tag: int


Deed = Computation | BeginMessage | End | Post | Receive


@dataclass(slots=True)
class _DeedWriter:
    """Writes deeds; computation in a row becomes one."""

    overlaps: bool
    deeds: list[Deed] = field(default_factory=list)
    open: list[tuple[int, frozenset[str], frozenset[str]]] = field(default_factory=list)
    count: int = 0

    def work(self, seconds: float) -> None:
        last = self.deeds[-1] if self.deeds else None
        if isinstance(last, Computation):
            self.deeds[-1] = Computation(seconds=last.seconds + seconds)
        elif seconds > 0:
            self.deeds.append(Computation(seconds=seconds))

    def settle(self, instruction: Instruction, released: Sequence[str]) -> None:
        """Wait for messages whose results are touched or whose sources change."""
        written = frozenset(written_values(instruction))
        touched = frozenset(read_values(instruction)) | written | frozenset(released)
        still = []
        for number, sources, targets in self.open:
            if targets & touched or sources & written:
                self.deeds.append(End(number=number))
            else:
                still.append((number, sources, targets))
        self.open = still

    def message(self, task: Task, axis: int, instruction: Communicate, seconds: float, slow_seconds: float) -> None:
        assert task.collective is not None
        begin = BeginMessage(
            number=self.count, axis=axis, collective=task.collective, seconds=seconds, slow_seconds=slow_seconds
        )
        self.count += 1
        self.deeds.append(begin)
        if self.overlaps and instruction.sources:
            self.open.append((begin.number, frozenset(instruction.sources), frozenset(instruction.targets)))
        else:
            self.deeds.append(End(number=begin.number))

    def drain(self) -> None:
        self.deeds += [End(number=number) for number, *_ in self.open]
        self.open = []


Times = Mapping[int, tuple[float, float]]
"""Seconds of each task, by its identity, and those where links are slow."""


def predicted_times(plan: Plan, lowered: LoweredStages, tasks: Sequence[Task], hardware: Hardware) -> list[float]:
    """Seconds of each task in a job of the plan's size; nothing of messages that the simulator does not time."""
    hardware, computing = _as_simulated(plan, hardware)
    mesh = lowered.mesh
    axes = [ProgramAxis(name=a.name, size=a.size, stride=mesh.stride(i)) for i, a in enumerate(mesh.axes)]
    timed = [task for task in tasks if task.collective is None or task.axis]
    found = iter(task_times(timed, (*axes, *tie_axes(lowered)), hardware, computing).tolist())
    return [next(found) if task.collective is None or task.axis else 0.0 for task in tasks]


def _as_simulated(plan: Plan, hardware: Hardware) -> tuple[Hardware, float]:
    """The hardware and the number of computing ranks with which the simulation of the plan times its kernels."""
    if hardware.caches is None and len(hardware.slowdown_table) == 1:
        return hardware, plan.devices
    found = lower_pipeline(plan, checked_graph(plan), hardware)
    return found.hardware, found.computing


def tie_axes(lowered: LoweredStages) -> tuple[ProgramAxis, ...]:
    """The groups of stages that share parameters, in the order of `RankInstructions.ties`, as axes."""
    return tuple(
        ProgramAxis(
            name=f"stages {', '.join(map(str, members))}",
            size=len(members),
            stride=lowered.pipeline_stride * (members[1] - members[0]),
        )
        for members in lowered.ranks[0].ties
    )


def rank_scripts(
    plan: Plan, lowered: LoweredStages, timed: LoweredPipeline, slow_timed: LoweredPipeline, hardware: Hardware,
    slow: Hardware,
) -> list[list[Deed]]:  # fmt: skip
    """The step of each pipeline rank.

    Parameters
    ----------
    timed, slow_timed : what the simulator runs, with links as they are and slow, for messages between stages
    """
    tasks = [task for stage in lowered.stages for one in stage.passes.values() for task in one.tasks]
    times = _both(plan, lowered, tasks, hardware, slow)
    return [_rank_script(lowered, timed, slow_timed, times, rank, hardware) for rank in range(lowered.schedule.ranks)]


def _both(plan: Plan, lowered: LoweredStages, tasks: Sequence[Task], hardware: Hardware, slow: Hardware) -> Times:
    pairs = zip(*(predicted_times(plan, lowered, tasks, one) for one in (hardware, slow)), strict=True)
    return {id(task): pair for task, pair in zip(tasks, pairs, strict=True)}


def _run(
    writer: _DeedWriter,
    lowered: LoweredStages,
    instructions: Sequence[Instruction],
    tasks: Sequence[Task],
    releases: Sequence[Sequence[str]],
    times: Times,
) -> None:
    names = [axis.name for axis in lowered.mesh.axes]
    for instruction, task, released in zip(instructions, tasks, releases, strict=True):
        writer.settle(instruction, released)
        seconds, slow_seconds = times[id(task)]
        if task.collective is None:
            writer.work(seconds)
        else:
            assert isinstance(instruction, Communicate)
            writer.message(task, names.index(task.axis), instruction, seconds, slow_seconds)


def _rank_script(
    lowered: LoweredStages,
    timed: LoweredPipeline,
    slow_timed: LoweredPipeline,
    times: Times,
    rank: int,
    hardware: Hardware,
) -> list[Deed]:
    schedule = lowered.schedule
    writer = _DeedWriter(overlaps=hardware.overlaps_communication)
    variants = schedule.of_rank(rank, action_variants(schedule))
    sends = [np.broadcast_to(np.asarray(one.costs.send_s), schedule.stages) for one in (timed, slow_timed)]
    blocking = not timed.costs.overlap_sends
    for (stage, kind, batch), variant in zip(schedule.actions(rank), variants, strict=True):
        one = lowered.stages[stage]
        key = (kind, variant if (kind, variant) in one.passes else PLAIN)
        forward, last = kind is ActionKind.FORWARD, kind is ActionKind.WEIGHT_GRADIENT
        arrives = one.arrives if forward else one.gradient_arrives
        leaves = one.leaves if forward else one.gradient_leaves
        before, behind = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
        count, direction = lowered.micro_batches, 0 if forward else 1
        if arrives is not None and not last and int(schedule.stage_rank[before]) != rank:
            tag = (before * 2 + direction) * count + batch
            writer.deeds.append(Receive(rank=int(schedule.stage_rank[before]), tag=tag))
        given = one.passes[key]
        _run(writer, lowered, given.instructions, given.tasks, given.releases, times)
        if leaves is not None and not last and int(schedule.stage_rank[behind]) != rank:
            tag = (stage * 2 + direction) * count + batch
            there = int(schedule.stage_rank[behind])
            seconds, slow_seconds = (float(row[stage]) for row in sends)
            writer.deeds.append(
                Post(rank=there, tag=tag, seconds=seconds, slow_seconds=slow_seconds, blocking=blocking)
            )
            if timed.costs.stalls:
                writer.work(timed.costs.send_stall * seconds)
    writer.drain()
    for place, (members, seconds) in enumerate(timed.costs.meetings):
        if rank in members:
            tie = len(lowered.mesh.axes) + lowered.ranks[0].ties.index(tuple(members))
            slow_seconds = float(slow_timed.costs.meetings[place][1])
            writer.deeds += [
                BeginMessage(number=writer.count, axis=tie, collective=Collective.ALL_REDUCE, seconds=float(seconds),
                      slow_seconds=slow_seconds),
                End(number=writer.count),
            ]  # fmt: skip
            writer.count += 1
    epilogue = np.broadcast_to(np.asarray(timed.costs.epilogue_s), schedule.ranks)
    writer.work(float(epilogue[rank]))
    return writer.deeds


def messages(deeds: Sequence[Deed]) -> Iterator[float]:
    """Seconds of every message of a script."""
    for deed in deeds:
        if isinstance(deed, BeginMessage | Post):
            yield deed.seconds
