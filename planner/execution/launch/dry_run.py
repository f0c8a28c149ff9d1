"""What every rank of a plan would do in a step, told without starting any."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from planner.execution.job import input_specs
from planner.execution.launch.starting import Prepared
from planner.execution.measuring.recorded import timed_instructions, update_payload
from planner.lowering.instructions import Communicate, Instruction, LoweredStages, StoredParameter
from planner.sharding.placement import local_shape
from simulator.calibration.machine import BACKENDS
from simulator.program import Task
from simulator.schedules import ActionKind


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageLine:
    """Messages of one kind in one group of ranks: how many a step has, and the bytes of all of them together.

    ``group`` are ranks of the job; bytes are counted as in `simulator.program.Collective`.
    """

    collective: str
    axis: str
    group: tuple[int, ...]
    count: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLine:
    """What one rank would do.

    Attributes
    ----------
    place : its coordinate on each mesh axis, and its pipeline rank
    stages : stages it holds, none without a pipeline
    passes : its passes in order as `torch.distributed.pipelining` writes them, such as ``0F1``: stage 0, forward,
        micro-batch 1
    parameters, parameter_bytes : tensors it holds between steps, and their bytes
    inputs : shape of its piece of each input of a micro-batch
    messages : what it sends and receives in a step
    """

    rank: int
    place: dict[str, int]
    stages: tuple[int, ...]
    passes: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    inputs: dict[str, tuple[int, ...]]
    messages: tuple[MessageLine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """A run that was not started.

    ``refused`` says why it would not start on this machine; None where it would. The steps go from
    ``first_step`` to ``steps``.
    """

    processes: int
    backend: str
    device: str
    precision: str
    data: str
    seed: int
    first_step: int
    steps: int
    micro_batches: int
    predicted_step_time_s: float | None
    predicted_peak_memory_bytes: int | None
    refused: str | None
    notes: tuple[str, ...]
    ranks: tuple[RankLine, ...]


def dry_run(prepared: Prepared, refused: str | None) -> DryRun:
    """Tell what all ranks of a job would do."""
    job = prepared.job
    return DryRun(
        processes=job.lowered.devices,
        backend=BACKENDS[job.device_type],
        device=job.device_type,
        precision=prepared.precision,
        data=prepared.data,
        seed=job.seed,
        first_step=job.checkpoints.position.step,
        steps=job.steps,
        micro_batches=job.lowered.micro_batches,
        predicted_step_time_s=prepared.predicted_step_time_s,
        predicted_peak_memory_bytes=prepared.predicted_peak_bytes,
        refused=refused,
        notes=prepared.notes,
        ranks=tuple(rank_line(job.lowered, rank) for rank in range(job.lowered.devices)),
    )


def rank_line(lowered: LoweredStages, rank: int) -> RankLine:
    """Tell what one rank of a plan would do in a step."""
    mesh = lowered.mesh
    coordinates = mesh.coordinates(rank)
    place = {axis.name: at for axis, at in zip(mesh.axes, coordinates, strict=True)}
    mine = lowered.ranks[lowered.pipeline_rank(rank)]
    staged = lowered.schedule.stages > 1
    if staged:
        place["pipeline"] = lowered.pipeline_rank(rank)
    read = {entry.name for stage in mine.stages for entry in lowered.stages[stage].inputs}
    return RankLine(
        rank=rank,
        place=place,
        stages=mine.stages if staged else (),
        passes=tuple(map(str, lowered.schedule.actions(lowered.pipeline_rank(rank)))),
        parameters=len(mine.parameters),
        parameter_bytes=sum(_stored_bytes(lowered, mine.parameters).values()),
        inputs={
            spec.name: tuple(local_shape(spec.shape, entry.placements, mesh.sizes))
            for spec, entry in zip(input_specs(lowered), lowered.inputs, strict=True)
            if entry.name in read
        },
        messages=tuple(_messages(lowered, rank)),
    )


def _stored_bytes(lowered: LoweredStages, stored: tuple[StoredParameter, ...]) -> dict[str, int]:
    """Bytes of a rank's pieces, by the name of their value."""
    specs = {node.name: node.outputs[0] for node in lowered.graph.nodes if node.outputs}
    found = {}
    for one in stored:
        spec = specs[one.value]
        shape = local_shape(spec.shape, one.placements, lowered.mesh.sizes)
        found[one.value] = prod(shape) * getattr(torch, spec.dtype).itemsize
    return found


# Messages


def _messages(lowered: LoweredStages, rank: int) -> Iterator[MessageLine]:
    """Collectives in the order of their first use, then what crosses between stages, then those of the update."""
    counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    def add(collective: str, axis: str, group: tuple[int, ...], times: int, size: float) -> None:
        counts[collective, axis, group] += times
        sizes[collective, axis, group] += round(size * times)

    for instruction, task, times in timed_instructions(lowered, rank):
        if isinstance(instruction, Communicate) and task.collective is not None and times:
            group = _group(lowered, rank, _axis(lowered, instruction, task))
            add(task.collective.value, task.axis, group, times, task.payload_bytes)
    for peer, size in _crossings(lowered, rank):
        add("send", "pipeline", (rank, peer), 1, size)
    for update in lowered.ranks[lowered.pipeline_rank(rank)].update:
        if isinstance(update, Communicate):
            group = _group(lowered, rank, update.axis)
            axes = lowered.mesh.axes
            axis = axes[update.axis].name if update.axis < len(axes) else "shared parameters"
            add(update.collective.value, axis, group, 1, update_payload(lowered, rank, update))
    for key, count in counts.items():
        yield MessageLine(collective=key[0], axis=key[1], group=key[2], count=count, total_bytes=sizes[key])


def _axis(lowered: LoweredStages, instruction: Instruction, task: Task) -> int:
    """Number of a message's mesh axis; one that an operator runs by itself is known by its task alone."""
    if isinstance(instruction, Communicate) and instruction.sources:
        return instruction.axis
    return [axis.name for axis in lowered.mesh.axes].index(task.axis)


def _group(lowered: LoweredStages, rank: int, axis: int) -> tuple[int, ...]:
    """Ranks of the job that meet `rank` on a mesh axis, or, behind those, in a tie between pipeline ranks."""
    mesh = lowered.mesh
    stride, place = lowered.pipeline_stride, lowered.pipeline_rank(rank)
    base = rank - place * stride
    if axis >= len(mesh.axes):
        members = lowered.ranks[place].ties[axis - len(mesh.axes)]
        return tuple(base + member * stride for member in members)
    found = next(ranks for ranks in mesh.groups(axis) if base in ranks)
    return tuple(member + place * stride for member in found)


def _crossings(lowered: LoweredStages, rank: int) -> Iterator[tuple[int, int]]:
    """Every tensor that a rank sends to another stage's rank in a step: that rank, and the bytes."""
    schedule, place, stride = lowered.schedule, lowered.pipeline_rank(rank), lowered.pipeline_stride
    base = rank - place * stride
    for stage, kind, _ in schedule.actions(place):
        if kind is ActionKind.WEIGHT_GRADIENT:
            continue
        forward = kind is ActionKind.FORWARD
        one = lowered.stages[stage]
        crossing, there = (one.leaves, stage + 1) if forward else (one.gradient_leaves, stage - 1)
        if crossing is not None and int(schedule.stage_rank[there]) != place:
            peer = base + int(schedule.stage_rank[there]) * stride
            yield peer, lowered.copies * prod(crossing.shape) * getattr(torch, crossing.dtype).itemsize
