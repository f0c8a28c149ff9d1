"""What ranks really send while they train: kind, mesh axis and bytes of every message, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from planner.execution import worker
from planner.execution.job import Job
from planner.instructions import LoweredPlan

Sent = tuple[str, str, float]
"""Kind of collective, mesh axis, bytes as the simulator counts them."""


def planned_messages(lowered: LoweredPlan) -> list[Sent]:
    """The messages of a step, as they are timed."""
    return [
        (str(task.collective), task.axis, task.payload_bytes)
        for segment in lowered.program.segments
        for _ in range(segment.count)
        for task in segment.tasks
        if task.collective is not None
    ]


def record(job: Job) -> list[list[Sent]]:
    """Train as one rank and return the messages of each step."""
    steps: list[list[Sent]] = []
    axes: dict[tuple[int, ...], str] = {}
    run_step = worker.Interpreter.run_step

    def recorded_step(self: Any, feed: Any) -> Any:
        steps.append([])
        with _seen(lambda kind, size, group: steps[-1].append((kind, axes[_members(group)], size))):
            return run_step(self, feed)

    make = worker._groups

    def groups(lowered: LoweredPlan, *arguments: Any) -> Any:
        found = make(lowered, *arguments)
        axes.update((_members(g), a.name) for g, a in zip(found, lowered.mesh.axes, strict=True))
        return found

    with patch.object(worker.Interpreter, "run_step", recorded_step), patch.object(worker, "_groups", groups):
        worker.train(job)
    return steps


def _members(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())


@contextmanager
def _seen(note: Callable[[str, float, Any], None]) -> Iterator[None]:
    """Note every collective that is called."""

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

    names = {
        "all_reduce": "all_reduce",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_tensor": "reduce_scatter",
        "all_to_all_single": "all_to_all",
    }
    places = {"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 1, "all_to_all_single": 1}
    send = dist.batch_isend_irecv
    calls = {kind: watched(kind, places[kind]) for kind in names}
    with patch.multiple(dist, batch_isend_irecv=around, **calls):
        yield
