"""What ranks really do while they train: the messages they send, and the gradients they update with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from planner.execution import interpreter, reference, worker
from planner.execution.checkpoints.checkpoint import Place
from planner.execution.job import Job
from planner.execution.measuring.recorded import rank_entries
from planner.execution.optimizers import ElementStep, SummedStep
from planner.execution.run import losses_of
from planner.execution.step_end import places
from planner.execution.virtual.script import tie_axes
from planner.lowering.instructions import LoweredStages
from planner.networks import load_network
from planner.plans.plan import Plan
from simulator.pipeline_operators import PLAIN, action_variants
from simulator.program import Task
from simulator.schedules import ActionKind

Sent = tuple[str, str, float]
"""Kind of collective, mesh axis, bytes as the simulator counts them."""
CROSSING = "pipeline"
"""In place of the axis of what goes from stage to stage."""


def planned_messages(plan: Plan, lowered: LoweredStages, rank: int) -> list[Sent]:
    """The messages of a step of one rank: those of its passes as they are timed, and what crosses between stages."""
    schedule, place = lowered.schedule, lowered.pipeline_rank(rank)
    variants, found = action_variants(schedule), []
    for i in range(int(schedule.offsets[place]), int(schedule.offsets[place + 1])):
        kind, number, variant = ActionKind(int(schedule.kind[i])), int(schedule.stage[i]), int(variants[i])
        stage = lowered.stages[number]
        found += _collectives(stage.passes.get((kind, variant), stage.passes[kind, PLAIN]).tasks)
        crossing, there = stage.gradient_leaves, number - 1
        if kind is ActionKind.FORWARD:
            crossing, there = stage.leaves, number + 1
        if kind is ActionKind.WEIGHT_GRADIENT or crossing is None or int(schedule.stage_rank[there]) == place:
            continue
        width = getattr(torch, crossing.dtype).itemsize
        found.append(("send", CROSSING, float(lowered.copies * prod(crossing.shape) * width)))
    updating = [
        entry.task for entry in rank_entries(plan, lowered, rank) if entry.task.name == "messages of the update"
    ]
    return [*found, *_collectives(updating)]


def _collectives(tasks: Any) -> Iterator[Sent]:
    task: Task
    for task in tasks:
        if task.collective is not None:
            yield str(task.collective), task.axis, task.payload_bytes


def record(job: Job) -> list[list[Sent]]:
    """Train as one rank and return the messages of each step."""
    with messages_of(job) as steps:
        worker.train(job)
    return steps


@contextmanager
def messages_of(job: Job) -> Iterator[list[list[Sent]]]:
    """Note the messages of each step of a job that is trained inside."""
    steps: list[list[Sent]] = []
    axes: dict[tuple[int, ...] | None, str] = {None: CROSSING}
    run_step = worker.Interpreter.run_step

    def recorded_step(self: Any, feed: Any) -> Any:
        steps.append([])
        with _seen(lambda kind, size, group: steps[-1].append((kind, axes[_members(group)], size))):
            return run_step(self, feed)

    make = worker._groups

    def groups(lowered: LoweredStages, *arguments: Any) -> Any:
        found = make(lowered, *arguments)
        for group, axis in zip(found, (*lowered.mesh.axes, *tie_axes(lowered)), strict=True):
            if group is not None:
                axes.setdefault(_members(group), axis.name)
        return found

    with patch.object(worker.Interpreter, "run_step", recorded_step), patch.object(worker, "_groups", groups):
        yield steps


def _members(group: Any) -> tuple[int, ...] | None:
    return None if group is None else tuple(dist.get_process_group_ranks(group))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


@contextmanager
def _seen(note: Callable[[str, float, Any], None]) -> Iterator[None]:
    """Note every collective that is called, and every tensor sent to another stage."""

    def watched(kind: str, place: int) -> Callable[..., Any]:
        call = getattr(dist, kind)

        def run(*tensors: Tensor, **options: Any) -> Any:
            note(names[kind], _bytes(tensors[place]), options["group"])
            return call(*tensors, **options)

        return run

    def around(messages: list[Any]) -> Any:
        sent = [message for message in messages if message.op is dist.isend]
        for message in sent:
            note("send", _bytes(message.tensor), message.group)
        return send(messages)

    def crossing(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        note("send", _bytes(tensor), options["group"])
        return dist.isend(tensor, *arguments, **options)

    names = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    places = {"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
    send = dist.batch_isend_irecv
    calls = {kind: watched(kind, places[kind]) for kind in names}
    # Rings send by `isend` as well, inside of batches.
    between_stages = SimpleNamespace(**{**vars(dist), "isend": crossing})
    with patch.multiple(dist, batch_isend_irecv=around, **calls), patch.object(interpreter, "dist", between_stages):
        yield


# Gradients

Pieces = dict[str, list[tuple[Place, Tensor]]]
"""A rank's piece of the gradient of each parameter in each step, and its place in the whole."""


def record_gradients(job: Job) -> tuple[Pieces, tuple[float, ...]]:
    """Train as one rank; returns the gradients that it updates its pieces of the parameters with, and the losses."""
    found: Pieces = {}
    make = worker.Held

    def held(*, parameters: Mapping[str, Tensor], optimizers: Mapping[str, Any], **others: Any) -> Any:
        coordinates = job.lowered.mesh.coordinates(dist.get_rank())
        where = places(job.lowered, worker.held_parameters(job.lowered), coordinates)

        def watched(name: str, step: ElementStep | SummedStep) -> ElementStep | SummedStep:
            update = step.begin if isinstance(step, SummedStep) else step.change

            def noted(parameter: Tensor, gradient: Tensor, *state: Any) -> Any:
                found.setdefault(name, []).append((where[name], gradient.clone()))
                return update(parameter, gradient, *state)

            return replace(step, **{"begin" if isinstance(step, SummedStep) else "change": noted})

        steps = {name: watched(name, step) for name, step in optimizers.items()}
        return make(parameters=parameters, optimizers=steps, **others)

    with patch.object(worker, "Held", held):
        return found, losses_of(worker.train(job))


def whole_gradients(ranks: list[Pieces], steps: int) -> dict[str, list[Tensor]]:
    """The gradients of each parameter in each step, put together from the pieces of all ranks."""
    found: dict[str, list[Tensor]] = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        pieces = [rank[name] for rank in ranks if name in rank]
        whole = [torch.full(pieces[0][0][0].whole, torch.nan, dtype=torch.float64) for _ in range(steps)]
        for mine in pieces:
            assert len(mine) == steps
            for total, (place, piece) in zip(whole, mine, strict=True):
                here = tuple(slice(at, at + size) for at, size in zip(place.offsets, place.sizes, strict=True))
                total[here] = piece.reshape(place.sizes)
        found[name] = whole
    return found


def reference_gradients(job: Job, nudge: float = 0.0) -> tuple[dict[str, list[Tensor]], tuple[float, ...]]:
    """What plain PyTorch in one process updates with in each step, by parameter, and the losses."""
    steps: list[list[Tensor]] = []
    update = reference._update

    def noted(optimizer: Any, parameters: list[Any], *others: Any) -> None:
        steps.append([parameter.grad.clone() for parameter in parameters])
        update(optimizer, parameters, *others)

    with patch.object(reference, "_update", noted):
        losses = reference.run_reference(job, nudge=nudge)
    names = [name for name, _ in load_network(job.network).build(0).named_parameters()]
    return {name: list(each) for name, each in zip(names, zip(*steps, strict=True), strict=True)}, tuple(losses)
