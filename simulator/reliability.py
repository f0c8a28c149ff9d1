"""Failures, checkpoints and what they leave of the time: goodput, in closed form and by simulation.

A synchronous job stops when one of its devices does. It then restarts, loads the last checkpoint that is safe and
repeats what was done since. Failures of a device come at random, at a constant rate, so a job of n devices fails
with the mean time between failures of one device divided by n.

Published runs, to judge results by: Llama 3 405B saw 419 unexpected interruptions in 54 days on 16,384 H100 (one in
3.1 hours, 5.8 years between failures of one device) and kept more than 90 % effective training time (arXiv:2407.21783,
section 3.3.4). OPT-175B saw at least 35 manual and an estimated 70 automatic restarts in two months on 992 A100
(arXiv:2205.01068, section 2.5). MegaScale detects a failure in less than 10 minutes on 12,288 devices and also keeps
more than 90 % (arXiv:2402.15627, section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.pipeline_operators import OperatorCosts, Operators
from simulator.schedules import ActionKind, Schedule

FloatArray = npt.NDArray[np.float64]

MAX_FAILURES_SIMULATED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCost:
    """Seconds that a checkpoint stops the job, that it is written in the background, and that it takes to load."""

    blocking_s: float
    background_s: float
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReliability:
    """How often a job fails and what a failure and a checkpoint cost.

    ``restart_s`` is from the failure to the first new step: detection, replacement, start and loading the checkpoint.
    """

    mtbf_s: float
    restart_s: float
    checkpoint: CheckpointCost

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and self.restart_s >= 0 and self.checkpoint.blocking_s >= 0):
            raise InputError(
                f"mean time between failures {self.mtbf_s} s, restart {self.restart_s} s and checkpoint "
                f"{self.checkpoint.blocking_s} s: the first must be above 0, the others not below; correct them"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Shares of the wall time, which add up to 1: useful work, checkpoints, work done again, restarts."""

    interval_s: float
    useful: float
    checkpoint: float
    repeated: float
    restart: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedGoodput:
    """Goodput of simulated jobs, (runs,) each, and their mean shares of the wall time."""

    mean: Goodput
    useful: FloatArray
    failures: FloatArray


def job_mtbf_s(device_mtbf_s: float, devices: int) -> float:
    """Mean time between failures of a job: that of one device over their number."""
    return device_mtbf_s / devices


def checkpoint_cost(
    *,
    written_bytes_per_rank: float,
    loaded_bytes_per_rank: float,
    ranks_per_node: int,
    storage_bandwidth_bytes_per_s: float,
    snapshot_bandwidth_bytes_per_s: float = 0.0,
    copied_bytes_per_rank: float | None = None,
) -> CheckpointCost:
    """What a checkpoint costs when all nodes write at once, each at `storage_bandwidth_bytes_per_s`.

    Bytes written and loaded are the mean over the ranks of a node; `copied_bytes_per_rank` is what the rank with most
    of them writes, where ranks differ. With a snapshot bandwidth (device to host memory, one device) above zero the
    job stops only for the copy, and the host writes while training goes on (CheckFreq, Mohan et al., FAST 2021;
    PyTorch's ``async_save``).
    """
    written = written_bytes_per_rank * ranks_per_node / storage_bandwidth_bytes_per_s
    load = loaded_bytes_per_rank * ranks_per_node / storage_bandwidth_bytes_per_s
    if snapshot_bandwidth_bytes_per_s <= 0:
        return CheckpointCost(blocking_s=written, background_s=0.0, load_s=load)
    copied = written_bytes_per_rank if copied_bytes_per_rank is None else copied_bytes_per_rank
    copy = copied / snapshot_bandwidth_bytes_per_s
    return CheckpointCost(blocking_s=copy, background_s=written, load_s=load)


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints that loses least time, to first order: sqrt(2 δ M).

    J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17(9), 1974.

    >>> round(young_interval_s(5, 24 * 60))
    120
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """The same to higher order: sqrt(2 δ M) (1 + sqrt(δ/2M)/3 + (δ/2M)/9) − δ for δ < 2M, else M.

    J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22(3), 2006; minutes of its figures 3 to 5:

    >>> [round(daly_interval_s(5, mtbf), 1) for mtbf in (24 * 60, 6 * 60, 15)]
    [116.7, 56.7, 9.1]
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def best_interval_s(job: JobReliability, step_time_s: float) -> float:
    """Daly's interval in whole steps, at least one and long enough for the last checkpoint to be written."""
    wanted = daly_interval_s(job.checkpoint.blocking_s, job.mtbf_s)
    least = math.ceil((job.checkpoint.background_s - job.checkpoint.blocking_s) / step_time_s)
    return step_time_s * max(1, round(wanted / step_time_s), least)


def expected_goodput(job: JobReliability, interval_s: float) -> Goodput:
    """Shares of the wall time of a long job that checkpoints after every `interval_s` of work.

    With work τ, blocking time δ, background time w, restart R and mean time between failures M, one failure follows
    the other after ``M exp(R/M)`` in the mean, restarts that fail included, and N = ``exp(-w/M) / (exp((τ+δ)/M) - 1)``
    checkpoints become safe in between, so that::

        goodput = N τ / (M exp(R/M))

    which for w = 0 is the run time of Daly (2006), equation 20.
    """
    least = max(0.0, job.checkpoint.background_s - job.checkpoint.blocking_s)
    if not interval_s > 0 or interval_s < least * (1 - 1e-9):
        raise InputError(
            f"a checkpoint every {interval_s:.6g} s: the interval must be above 0 and leave the {least:.6g} s that "
            "the last checkpoint needs to be written; use a longer one"
        )
    mtbf, blocking = job.mtbf_s, job.checkpoint.blocking_s
    exponent = job.restart_s / mtbf
    period = (interval_s + blocking) / mtbf
    if exponent > 500:  # exp overflows: such a job never starts again
        return Goodput(interval_s=interval_s, useful=0.0, checkpoint=0.0, repeated=0.0, restart=1.0)
    cycle = mtbf * math.exp(exponent)
    saved = math.exp(-job.checkpoint.background_s / mtbf) / math.expm1(period) if period < 500 else 0.0
    restart = mtbf * math.expm1(exponent)
    return Goodput(
        interval_s=interval_s,
        useful=saved * interval_s / cycle,
        checkpoint=saved * blocking / cycle,
        repeated=(mtbf - saved * (interval_s + blocking)) / cycle,
        restart=restart / cycle,
    )


def simulate_goodput(
    job: JobReliability, interval_s: float, *, useful_s: float, seed: int, runs: int = 100
) -> SimulatedGoodput:
    """Simulate `runs` jobs of `useful_s` seconds of work each, failure by failure.

    Raises
    ------
    InputError
        When so many failures would have to be simulated that the job makes no progress worth the name.
    """
    expected = expected_goodput(job, interval_s)
    if useful_s <= 0 or runs < 1:
        raise InputError(f"{runs} runs of {useful_s} s of work: both must be above 0; correct them")
    if expected.useful * job.mtbf_s * MAX_FAILURES_SIMULATED < useful_s:
        raise InputError(
            f"a job that fails every {job.mtbf_s:.3g} s and needs {job.restart_s:.3g} s to restart makes too little "
            f"progress to simulate {useful_s:.3g} s of work; shorten the checkpoint, the restart or the work"
        )
    random = np.random.default_rng(seed)
    saved, wall, failures, stopped, restarting = (np.zeros(runs) for _ in range(5))
    active = np.arange(runs)
    restart_s = 0.0
    while active.size:
        gap = random.exponential(job.mtbf_s, active.size)
        ran = np.maximum(gap - restart_s, 0.0)
        left = useful_s - saved[active]
        finish = left + job.checkpoint.blocking_s * np.maximum(np.ceil(left / interval_s) - 1, 0.0)
        done = ran >= finish
        ran = np.minimum(ran, finish)
        work, in_checkpoints = _progress(job, interval_s, ran)
        saved[active] += np.where(done, left, np.minimum(work, left))
        stopped[active] += in_checkpoints
        restarting[active] += np.minimum(gap, restart_s)
        wall[active] += np.minimum(gap, restart_s) + ran
        failures[active] += ~done
        active = active[~done]
        restart_s = job.restart_s
    total = float(wall.sum())
    useful, checkpoint, restart = runs * useful_s / total, float(stopped.sum()) / total, float(restarting.sum()) / total
    mean = Goodput(
        interval_s=interval_s,
        useful=useful,
        checkpoint=checkpoint,
        repeated=max(0.0, 1 - useful - checkpoint - restart),
        restart=restart,
    )
    return SimulatedGoodput(mean=mean, useful=useful_s / wall, failures=failures)


def _progress(job: JobReliability, interval_s: float, ran: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Work that is safe after running for `ran` seconds, and seconds stopped for its checkpoints."""
    period = interval_s + job.checkpoint.blocking_s
    safe = np.maximum(np.floor((ran - job.checkpoint.background_s) / period), 0.0)
    return safe * interval_s, safe * job.checkpoint.blocking_s


def compute_factors(
    ranks: int, *, seed: int, slow_ranks: int = 0, slowdown: float = 1.5, spread: float = 0.0
) -> FloatArray:
    """Factors (ranks,) by which the kernels of each rank take longer than those of the median rank.

    The factors are log-normal, ``exp(spread z)`` with standard normal z, and those of `slow_ranks` ranks drawn at
    random are multiplied by `slowdown`. Identical devices of one cluster differ by 8 % on average and 22 % at most,
    outliers run up to 1.5 times slower than the median (Sinha et al., SC 2022, arXiv:2208.11035).
    """
    if not 0 <= slow_ranks <= ranks:
        raise InputError(f"{slow_ranks} slow ranks of {ranks}: name at most as many as the plan has devices")
    if slowdown < 1 or spread < 0:
        raise InputError(f"slow-down {slowdown} and spread {spread}: at least 1 and 0; correct them")
    random = np.random.default_rng(seed)
    factors = np.exp(spread * random.standard_normal(ranks)) if spread else np.ones(ranks)
    factors[random.choice(ranks, slow_ranks, replace=False)] *= slowdown
    return factors


def slow_stages(schedule: Schedule, costs: OperatorCosts, factors: FloatArray) -> OperatorCosts:
    """The passes of a pipeline with the kernels of pipeline rank r taking ``factors[r]`` times as long.

    What frames the passes (prologue, epilogue, messages between ranks) stays. Stages that are alike and equally slow
    share their operators, as before.
    """
    if len(factors) != schedule.ranks or not np.all(factors > 0):
        raise InputError(f"{len(factors)} factors for {schedule.ranks} pipeline ranks: one above 0 each")
    made: dict[tuple[int, float], Operators] = {}

    def slowed(operators: Operators, factor: float) -> Operators:
        key = (id(operators), factor)
        if key not in made:
            kernels = operators.communication == 0
            made[key] = replace(operators, seconds=operators.seconds * np.where(kernels, factor, 1.0))
        return made[key]

    of_stage = np.asarray(factors)[schedule.stage_rank].tolist()

    def passes(given: Mapping[ActionKind, Sequence[Operators]]) -> dict[ActionKind, list[Operators]]:
        return {kind: [slowed(one, f) for one, f in zip(row, of_stage, strict=True)] for kind, row in given.items()}

    return replace(costs, passes=passes(costs.passes), first=passes(costs.first), last=passes(costs.last))


def slow_level(hardware: Hardware, level: str, share: float) -> Hardware:
    """The cluster with links of `level` at `share` of their bandwidth, as one slow link makes the step see it.

    A ring, a tree or an exchange moves at the speed of its slowest member, and the groups without the slow link
    wait for the one with it at the end of the step.
    """
    names = [found.name for found in hardware.levels]
    if level not in names or not 0 < share <= 1:
        raise InputError(
            f"link of {level!r} at {share} of its bandwidth: levels are {', '.join(names)}, shares in (0, 1]"
        )
    levels = tuple(
        replace(
            found,
            bandwidth_bytes_per_s=found.bandwidth_bytes_per_s * share,
            reduction_bandwidth_bytes_per_s=found.reduction_bandwidth_bytes_per_s * share,
        )
        if found.name == level
        else found
        for found in hardware.levels
    )
    return replace(hardware, levels=levels)
