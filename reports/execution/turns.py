"""An executed plan and the same training by hand, in turns in the same processes.

The speed of a machine changes while a program runs. Blocks of steps of both take turns, so that each meets what the
machine does besides, and the ratio of every round stands for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from planner.execution.job import Job
from planner.execution.worker import Trainer
from reports.execution.by_hand import HandSplit, HandTrainer, HandWritten, like
from simulator.calibration.launch import run_workers

WARM_UP = 2
COMPARED = 20
"""Steps whose losses are compared: rounding grows with every one."""
ROUNDS, MOST_STEPS = 9, 25
"""Fewer leave the median of long, single steps to chance: five were 21 % off once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Seconds of steps, the slowest rank's, by round: of the plan and by hand, the median step of each block.

    ``loss_difference`` is the largest relative difference of their losses in the first steps.
    """

    plan_s: tuple[float, ...]
    by_hand_s: tuple[float, ...]
    loss_difference: float

    @property
    def ratios(self) -> tuple[float, ...]:
        """Time of the plan over that by hand in every round."""
        return tuple(plan / hand for plan, hand in zip(self.plan_s, self.by_hand_s, strict=True))


def rounds_within(seconds: float, step_s: float) -> tuple[int, int]:
    """Rounds, and steps of a block: as many as take so many seconds together, and one at least.

    >>> rounds_within(12.0, 0.05), rounds_within(12.0, 2.0)
    ((9, 13), (9, 1))
    """
    return ROUNDS, max(1, min(MOST_STEPS, int(seconds / (2 * step_s * ROUNDS))))


def take_turns(job: Job, way: HandSplit, rounds: int, steps: int) -> Turns:
    """Train as a job and by hand on new processes of this machine, in rounds of blocks of `steps` of each.

    Raises
    ------
    InputError
        The job's training is not written by hand in this way.
    ExecutionError
        A rank failed.
    """
    results = run_workers(_rank, (job, like(job, way), rounds, steps), job.lowered.devices)
    times = np.max([times for times, _ in results], axis=0)
    losses = np.mean([losses for _, losses in results], axis=0)
    blocks = np.median(times[:, WARM_UP:].reshape(2, rounds, steps), axis=2).tolist()
    losses = losses[:, :COMPARED]
    apart = np.abs(losses[1] - losses[0]) / np.maximum(np.abs(losses[0]), 1e-12)
    return Turns(plan_s=tuple(blocks[0]), by_hand_s=tuple(blocks[1]), loss_difference=float(apart.max()))


def _rank(job: Job, work: HandWritten, rounds: int, steps: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One rank: seconds and losses (2, steps) of the plan and by hand."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=job.timeout_s))
    try:
        both: Sequence[Trainer | HandTrainer] = (Trainer(job, torch.device("cpu")), HandTrainer(work))
        times, losses = np.zeros((2, WARM_UP + rounds * steps)), np.zeros((2, WARM_UP + rounds * steps))
        blocks = [(0, WARM_UP), *((first, first + steps) for first in range(WARM_UP, times.shape[1], steps))]
        for number, (first, end) in enumerate(blocks):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                for step in range(first, end):
                    batches = both[which].batches(step)
                    dist.barrier()
                    losses[which, step], times[which, step] = both[which].run(batches)
        return times, losses
    finally:
        dist.destroy_process_group()
