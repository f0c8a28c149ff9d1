"""Recorded steps as times of instructions: what each took, and how long its rank waited for others in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.cost.work import optimizer, update_traffic
from planner.execution.communication import FINISH, RUN, START
from planner.execution.measuring.clocks import RECEIVE, REDUCTION, IntArray, RankRecord, aligned, catalogue
from planner.execution.virtual.script import tie_axes
from planner.graph.operator_graph import DTYPE_BYTES
from planner.lowering.instructions import Accumulate, BeginUpdate, Communicate, Instruction, LoweredStages, Update
from planner.lowering.stages import sums_of
from planner.lowering.sums import FLAG, FLAG_BYTES
from planner.lowering.writer import copied_bytes
from planner.plans.plan import Plan
from planner.sharding.placement import MeshAxis, local_shape
from simulator.pipeline_operators import PLAIN, action_variants
from simulator.program import COMPUTE_STREAM, Kernel, Phase, ProgramAxis, Task
from simulator.schedules import ActionKind

FloatArray = NDArray[np.float64]
NANOSECONDS = 1e9
SUMS = 2
"""Norms that an update of a sharded parameter adds up over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An instruction of a rank with the task that the simulator times for it; ``axis`` is -1 but for messages."""

    task: Task
    axis: int


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTimes:
    """What a rank ran in all recorded steps, event by event.

    Attributes
    ----------
    entries : instructions by their number
    number, part, step : (E,) as in `planner.execution.measuring.clocks.RankRecord`, and the step's number
    begin_s, end_s : (E,) from the beginning of the step
    seconds, busy_s : (E,) and of it with a core, without what is inside of an operator and has an event of its own
    waited_s : (E,) the part of a message for which another rank was late
    durations_s : (S,) of whole steps
    """

    entries: Sequence[Entry]
    number: IntArray
    part: IntArray
    step: IntArray
    begin_s: FloatArray
    end_s: FloatArray
    seconds: FloatArray
    busy_s: FloatArray
    waited_s: FloatArray
    durations_s: FloatArray

    def of_step(self, step: int) -> RankTimes:
        """The events of one step alone."""
        kept = self.step == step
        names = ("number", "part", "step", "begin_s", "end_s", "seconds", "busy_s", "waited_s")
        return replace(self, **{name: getattr(self, name)[kept] for name in names})


def rank_times(plan: Plan, lowered: LoweredStages, records: Sequence[RankRecord]) -> list[RankTimes]:
    """The times of all ranks; in a message a rank waits until the last of its group has come."""
    records = aligned(records)
    found = [_own_times(rank_entries(plan, lowered, rank), record) for rank, record in enumerate(records)]
    for axis, members in _groups(lowered):
        arrivals = [_arrivals(found[rank], records[rank], axis) for rank in members]
        if len({len(events) for events, _ in arrivals}) > 1:
            continue  # a group whose ranks do not send alike has no common messages to lay side by side
        last = np.max([begun for _, begun in arrivals], axis=0)
        for rank, (events, _) in zip(members, arrivals, strict=True):
            begin, end = records[rank].events[events, 2], records[rank].events[events, 3]
            found[rank].waited_s[events] = np.clip(last - begin, 0, end - begin) / NANOSECONDS
    return found


def _own_times(entries: Sequence[Entry], record: RankRecord) -> RankTimes:
    number, part, begin, end, busy = record.events.T
    inner = np.flatnonzero((part == REDUCTION) | (part == RECEIVE))
    first, last = np.searchsorted(begin[inner], begin), np.searchsorted(end[inner], end, side="right")

    def inside(lengths: IntArray) -> IntArray:
        """What of an operator's time has an event of its own."""
        passed = np.concatenate(([0], np.cumsum(lengths[inner])))
        return np.where(part == RUN, passed[np.maximum(first, last)] - passed[first], 0)

    step = np.searchsorted(record.steps[:, 0], begin, side="right") - 1
    origin = record.steps[step, 0]
    return RankTimes(
        entries=entries,
        number=number,
        part=part,
        step=step,
        begin_s=(begin - origin) / NANOSECONDS,
        end_s=(end - origin) / NANOSECONDS,
        seconds=(end - begin - inside(end - begin)) / NANOSECONDS,
        busy_s=(busy - inside(busy)) / NANOSECONDS,
        waited_s=np.zeros(len(number)),
        durations_s=(record.steps[:, 1] - record.steps[:, 0]) / NANOSECONDS,
    )


def _arrivals(times: RankTimes, record: RankRecord, axis: int) -> tuple[IntArray, IntArray]:
    """(K,), (K,) events in which a rank waits for the messages of an axis, in order, and when it had sent each."""
    axes = np.array([entry.axis for entry in times.entries] or [-1])
    own = (axes[times.number] == axis) & (times.part <= FINISH)
    starts = np.flatnonzero((times.part == START) & own)
    finishes: dict[int, list[int]] = {}
    for event in np.flatnonzero((times.part == FINISH) & own).tolist():
        finishes.setdefault(int(times.number[event]), []).append(event)
    ends = [finishes[int(times.number[event])].pop(0) for event in starts.tolist()]
    inner = np.flatnonzero((times.part == REDUCTION) & (times.number == axis))
    events = np.concatenate([np.array(ends, np.int64), inner])
    begun = np.concatenate([record.events[starts, 3], record.events[inner, 2]])
    order = np.argsort(begun, kind="stable")
    return events[order], begun[order]


def _groups(lowered: LoweredStages) -> Iterator[tuple[int, list[int]]]:
    """Every group of every mesh axis, on all stages, and of every set of stages that share parameters."""
    stages, stride = lowered.schedule.ranks, lowered.pipeline_stride
    for axis in range(len(lowered.mesh.axes)):
        for members in lowered.mesh.groups(axis):
            for stage in range(stages):
                yield axis, [rank + stage * stride for rank in members]
    for tie, holders in enumerate(lowered.ranks[0].ties, len(lowered.mesh.axes)):
        for rank in lowered.mesh.ranks():
            yield tie, [rank + stage * stride for stage in holders]


# Instructions and tasks


def rank_entries(plan: Plan, lowered: LoweredStages, rank: int) -> list[Entry]:
    """The tasks of `planner.execution.measuring.clocks.catalogue`, in its order."""
    known = {id(instruction): task for instruction, task, _ in timed_instructions(lowered, rank)}
    found = []
    for instruction in catalogue(lowered, rank):
        task = known.get(id(instruction)) or _update_task(plan, lowered, rank, instruction)
        found.append(Entry(task=task, axis=instruction.axis if isinstance(instruction, Communicate) else -1))
    return found


def quiet_tasks(lowered: LoweredStages, rank: int) -> list[tuple[Task, int]]:
    """Tasks that another instruction runs, such as sums inside operators, and how often a step has each."""
    return [
        (task, times)
        for instruction, task, times in timed_instructions(lowered, rank)
        if isinstance(instruction, Communicate) and not instruction.sources and times
    ]


def timed_instructions(lowered: LoweredStages, rank: int) -> Iterator[tuple[Instruction, Task, int]]:
    """Every instruction with its task and how often a step runs it."""
    schedule, place = lowered.schedule, lowered.pipeline_rank(rank)
    variants = schedule.of_rank(place, action_variants(schedule))
    runs: dict[tuple[int, ActionKind, int], int] = {}
    for (stage, kind, _), variant in zip(schedule.actions(place), variants, strict=True):
        key = (stage, kind, variant if (kind, variant) in lowered.stages[stage].passes else PLAIN)
        runs[key] = runs.get(key, 0) + 1
    for stage in lowered.ranks[place].stages:
        for (kind, variant), one in lowered.stages[stage].passes.items():
            for instruction, task in zip(one.instructions, one.tasks, strict=True):
                yield instruction, task, runs.get((stage, kind, variant), 0)


def update_payload(lowered: LoweredStages, rank: int, message: Communicate) -> float:
    """Bytes of a message at the end of a step: of gradients, of sums over whole parameters, or of a flag."""
    if message.sources[0].startswith(FLAG):
        return float(FLAG_BYTES)
    nodes = {node.name: node for node in lowered.graph.nodes}
    total = 0.0
    for stored in lowered.ranks[lowered.pipeline_rank(rank)].parameters:
        spec = nodes[stored.value].outputs[0]
        if any(source.startswith(f"{stored.value}.gradient") for source in message.sources):
            width = DTYPE_BYTES[message.dtype or spec.dtype]
            total += width * float(np.prod(local_shape(spec.shape, stored.placements, lowered.mesh.sizes)))
        elif any(source.partition("@")[0] == sums_of(stored.value) for source in message.sources):
            total += SUMS * max(DTYPE_BYTES["float32"], DTYPE_BYTES[spec.dtype])
    return total


def _update_task(plan: Plan, lowered: LoweredStages, rank: int, instruction: Instruction) -> Task:
    """What an instruction at the end of a step is timed as."""
    mesh = lowered.mesh
    if isinstance(instruction, Communicate):
        axes: list[MeshAxis | ProgramAxis] = [*mesh.axes, *tie_axes(lowered)]
        payload = update_payload(lowered, rank, instruction)
        return Task(
            name="messages of the update",
            phase=Phase.UPDATE,
            stream="communication",
            collective=instruction.collective,
            axis=axes[instruction.axis].name,
            payload_bytes=payload,
            copied_bytes=copied_bytes(instruction, payload, axes[instruction.axis].size),
        )
    if not isinstance(instruction, Update | BeginUpdate):
        kernel = Kernel.ACCUMULATION if isinstance(instruction, Accumulate) else Kernel.COPY
        return Task(name="gradients of stages", phase=Phase.UPDATE, stream=COMPUTE_STREAM, kernel=kernel)
    stored = lowered.ranks[lowered.pipeline_rank(rank)].parameters
    entry = next(one for one in stored if one.name == instruction.parameter)
    node = next(node for node in lowered.graph.nodes if node.name == entry.value)
    spec, update = node.outputs[0], optimizer(plan.optimizer)
    elements = float(np.prod(local_shape(spec.shape, entry.placements, mesh.sizes)))
    return Task(
        name=f"update {entry.name}",
        phase=Phase.UPDATE,
        kernel=Kernel.OPTIMIZER,
        dtype=spec.dtype,
        flops=elements * update.flops,
        bytes_moved=elements * update_traffic(update, spec.dtype),
    )
