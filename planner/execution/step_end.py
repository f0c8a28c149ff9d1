"""What a rank does between steps: see that all is well, say so, and save."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from planner.execution.checkpoints.checkpoint import (
    Place,
    Steps,
    load_checkpoint,
    place_of,
    save_checkpoint,
    state_pieces,
)
from planner.execution.job import Job
from planner.execution.launch.watch import Agreement
from planner.execution.machine import Held
from planner.execution.optimizers import LossScale
from planner.lowering.instructions import LoweredStages, StoredParameter
from simulator.errors import ExecutionError

DISK_TIMEOUT_S = 1800.0


class StepEnd:
    """Called after every step with its loss, where this rank knows it, and its seconds.

    A loss that is no number, or another than that of a rank which must have the same, ends the run.

    Parameters
    ----------
    store : Store
        What the ranks of the job share.
    save : callable
        Saves a checkpoint, given how many steps have been done.
    """

    def __init__(self, job: Job, store: Store, save: Callable[[int], Path | None]) -> None:
        self._job, self._save = job, save
        self._agreement = _agreement(job, store)

    def __call__(self, step: int, loss: float | None, seconds: float) -> None:
        """Check, report and save."""
        if self._job.logs is not None:
            shown = "" if loss is None else f", loss: {loss:.9g}"
            _say(f"step: {step}{shown}, seconds: {seconds:.4f}")
        if loss is not None:
            if not math.isfinite(loss):
                raise ExecutionError(f"training diverged at step {step}: loss {loss}; lower --learning-rate")
            self._agreement.check(step, loss, self._job.timeout_s)
        if self._job.checkpoints.is_due(step + 1, self._job.steps):
            path = self._save(step + 1)
            if self._job.logs is not None:
                _say(f"saved: {path}")


def _say(line: str) -> None:
    """Write a line to this rank's log."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _agreement(job: Job, store: Store) -> Agreement:
    """Ranks of one stage know the same loss; copies of a network have losses of their own."""
    rank, lowered = dist.get_rank(), job.lowered
    precision = {"float64": "fp64", "bfloat16": "bf16", "float16": "fp16"}.get(_dtype(lowered), "fp32")
    mine = lowered.pipeline_rank(rank)
    leader = next(r for r in range(lowered.devices) if lowered.pipeline_rank(r) == mine)
    return Agreement(store, str(mine), rank, leader, precision)


def _dtype(lowered: LoweredStages) -> str:
    graph = lowered.graph
    return graph.nodes[graph.parameters[0].node].outputs[0].dtype


def places(
    lowered: LoweredStages, stored: tuple[StoredParameter, ...], coordinates: tuple[int, ...]
) -> dict[str, Place]:
    """Where in the whole parameters the pieces of a rank lie, by name."""
    graph = lowered.graph
    shapes = {entry.name: graph.nodes[entry.node].outputs[0].shape for entry in graph.parameters}
    return {p.name: place_of(tuple(shapes[p.name]), lowered.mesh, p.placements, coordinates) for p in stored}


def keep_checkpoints(
    job: Job, kept: Held, steps: Steps, where: dict[str, Place], scale: LossScale
) -> Callable[[int], Path | None]:
    """Load what the run resumes from, and make the function that saves, given how many steps have been done.

    All ranks wait for the slowest disk, longer than they would for a message.
    """
    orders = job.checkpoints
    group: dist.ProcessGroup | None = None
    if orders.save is not None or orders.resume is not None:
        made = dist.new_group(backend="gloo", timeout=timedelta(seconds=max(DISK_TIMEOUT_S, job.timeout_s)))
        assert isinstance(made, dist.ProcessGroup)
        group = made
    if orders.resume is not None:
        load_checkpoint(orders.resume, kept.parameters, steps, where, group)

    def save(done: int) -> Path | None:
        if orders.save is None or orders.record is None:
            return None
        samples = orders.position.sample + (done - orders.position.step) * orders.record.global_batch
        scaled = {"loss_scale": scale.value, "good_steps": scale.good_steps} if _dtype(job.lowered) == "float16" else {}
        record = orders.record.model_copy(update={"step": done, "samples": samples, **scaled})
        return save_checkpoint(orders.save, record, state_pieces(kept.parameters, steps, where), group)

    return save


def resumed_states(steps: Steps) -> list[Tensor]:
    """What optimizers keep already."""
    return [tensor for step in steps.values() for tensor in step.state.values()]
