"""Running a plan for real, beside its prediction and beside one process."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.cost.software import machine_of
from planner.execution.checkpoints.options import last_checkpoint, prepare_folder
from planner.execution.job import Job
from planner.execution.launch.dry_run import DryRun, dry_run
from planner.execution.launch.membership import Membership, find_membership, is_scheduler
from planner.execution.launch.rank_log import Monitor, kept_on_failure, monitored
from planner.execution.launch.starting import Prepared, check_host, check_options, prepare
from planner.execution.measuring.comparing import Comparison, compare
from planner.execution.measuring.recorded import rank_times
from planner.execution.measuring.run_trace import write_run_trace
from planner.execution.options import ExecuteOptions
from planner.execution.reference import run_reference
from planner.execution.verification import (
    NUDGE,
    NUDGED_RUNS,
    ROUNDING,
    ROUNDING_FACTORS,
    TOLERANCES,
    check_finite,
    relative_difference,
    verified,
)
from planner.execution.worker import RankResult, train
from planner.lowering.checked import checked_graph
from planner.planning.loading import lower_to_run
from planner.planning.prediction import simulate_plan
from planner.plans.file import read_plan
from planner.plans.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.calibration.machine import BACKENDS, Disturbance, disturbance
from simulator.calibration.process import settle_worker
from simulator.calibration.timing import paces_of
from simulator.crowding import MOST_OTHERS, MOST_STOLEN
from simulator.errors import ExecutionError, MeshwrightError
from simulator.quantities import bytes_text, interval_text, seconds_text

CHANGED_SPEED = 0.1
"""From this change of the machine's speed on a run says so."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Quantiles over steps of the slowest rank's time, in seconds."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionReport:
    """What a run did and measured.

    ``error`` is predicted step time over measured median, less one. Without verification
    ``reference_losses`` is empty and ``verified``, ``max_loss_difference`` and ``tolerance`` are None;
    the difference is relative. Predictions are None where the plan's profile cannot be read.
    ``machine_speed`` is the speed of typical kernels, run by all ranks together before, between and behind the steps,
    over that of as many processes when the profile was calibrated, None where it does not know;
    ``predicted_at_this_speed_s`` is the prediction divided by it, and ``error_at_this_speed`` that prediction's error.
    ``others_share`` and ``stolen_share`` are the parts of the cores' time that other programs and this machine's host
    took during the timed steps, None where that is not known. ``rank`` is not 0 on the other ranks of a job that was
    joined, which should print nothing.
    """

    processes: int
    backend: str
    launcher: str
    rank: int
    steps: int
    warm_up_steps: int
    precision: str
    data: str
    seed: int
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    max_loss_difference: float | None
    tolerance: float | None
    verified: bool | None
    measured_step_time_s: StepTime
    predicted_step_time_s: float | None
    error: float | None
    measured_peak_memory_bytes: int
    measured_memory_method: str
    predicted_peak_memory_bytes: int | None
    notes: tuple[str, ...] = ()
    first_step: int = 0
    checkpoint: str | None = None
    comparison: Comparison | None = None
    machine_speed: float | None = None
    predicted_at_this_speed_s: float | None = None
    error_at_this_speed: float | None = None
    others_share: float | None = None
    stolen_share: float | None = None

    def __repr__(self) -> str:
        time, predicted = self.measured_step_time_s, self.predicted_step_time_s
        memory, difference = self.predicted_peak_memory_bytes, self.max_loss_difference
        expected = "" if predicted is None else f", predicted {seconds_text(predicted)}"
        lines = [
            f"{self.steps} steps on {self.processes} processes ({self.backend}), {self.precision}, {self.data}",
            f"step {seconds_text(time.median)} ({interval_text(time.p10, time.p90)}){expected}",
            f"memory {bytes_text(self.measured_peak_memory_bytes)}"
            + ("" if memory is None else f", predicted {bytes_text(memory)}"),
            f"loss {self.losses[0]:.6g} at the first step, {self.losses[-1]:.6g} at the last",
        ]
        if difference is not None:
            lines.append(f"losses differ from those of one process by {difference:.2g} (allowed {self.tolerance:.2g})")
        return "\n".join([*lines, *self.notes])


def execute(options: ExecuteOptions, say: Say = lambda _: None, monitor: Monitor | None = None) -> ExecutionReport:
    """Train a network as its strategy file says, on as many processes as the plan has devices.

    Parameters
    ----------
    options : ExecuteOptions
        What to run.
    say : callable
        Told in a few words what begins.
    monitor : callable, optional
        Told the number of each step, from 0, and its loss while local processes train.

    Raises
    ------
    InputError
        An option, the plan or the data do not fit.
    ExecutionError
        A rank failed, or the losses differ from those of one process.
    SystemExit
        With code 0 in the scheduler process of msrun, which has nothing to do.
    """
    return execute_plan(read_plan(options.strategy), options, say, monitor)


def rehearse(options: ExecuteOptions, say: Say = lambda _: None) -> DryRun:
    """Do all that `execute` does before it starts processes, and tell what they would do.

    Raises
    ------
    InputError
        An option, the plan or the data do not fit.
    """
    plan = read_plan(options.strategy)
    membership = find_membership(os.environ)
    check_options(plan, options, membership)
    prepared = prepare(plan, options, membership, say)
    refused = None
    try:
        check_host(plan, options, prepared, membership)
    except MeshwrightError as error:  # another machine may have what this one lacks
        refused = str(error)
    return dry_run(prepared, refused)


def execute_plan(
    plan: Plan, options: ExecuteOptions, say: Say = lambda _: None, monitor: Monitor | None = None
) -> ExecutionReport:
    """Do what `execute` does with a plan already read."""
    if is_scheduler(os.environ):
        raise SystemExit(0)
    membership = find_membership(os.environ)
    check_options(plan, options, membership)
    prepared = prepare(plan, options, membership, say)
    check_host(plan, options, prepared, membership)
    job, precision, first = prepared.job, prepared.precision, prepared.job.checkpoints.position.step
    rank = 0 if membership is None else membership.rank
    if rank == 0:
        prepare_folder(job.checkpoints)
    say(f"training {options.steps - first} steps on {plan.devices} processes")
    results = _run_job(job, membership, monitor)
    losses = losses_of(results)
    check_finite(losses)
    reference: list[float] = []
    allowed: list[float] = []
    if options.verify and rank == 0:
        say("training again in one process")
        unbroken = run_reference(job)
        check_finite(unbroken, "training in one process")
        whole = (*unbroken[:first], *losses)
        allowed = verified(whole, unbroken, precision, _rounded_otherwise(plan, job, precision, say))
        reference = unbroken[first:]
    report = _report(prepared, results, membership, reference, allowed)
    return report if rank else _with_comparison(report, plan, prepared, results, options.trace)


def _with_comparison(
    report: ExecutionReport, plan: Plan, prepared: Prepared, results: list[RankResult], trace: str | Path | None
) -> ExecutionReport:
    """Lay what the clocks showed, if anything, beside the prediction; recorded steps begin on all ranks together."""
    records = [result.record for result in results if result.record is not None]
    job = prepared.job
    if not records or prepared.predicted_length_s is None:
        return report
    hardware = machine_of(plan, software=False)
    plan = replace(plan, software="")
    simulated = simulate_plan(plan, checked_graph(plan), hardware)
    if trace is not None:
        write_run_trace(trace, plan, simulated, rank_times(plan, job.lowered, records))
    found = compare(plan, job.lowered, records, hardware, simulated)
    return replace(report, comparison=found)


def _rounded_otherwise(plan: Plan, job: Job, precision: str, say: Say) -> Iterator[list[float]]:
    """Train in one process again and again, so that only rounding sets the losses apart."""
    for draw in range(NUDGED_RUNS):
        say("training again from parameters changed in the last places, to know what rounding does to this network")
        yield run_reference(job, nudge=NUDGE * ROUNDING[precision], draw=draw)
    if precision != "fp64":
        say("training again in one process in fp64, to know what rounding does to this network")
        yield run_reference(replace(job, lowered=lower_to_run(plan, plan.network, precision="fp64")))


def losses_of(results: list[RankResult]) -> tuple[float, ...]:
    """Losses of the whole batches, the mean of what ranks of several last stages know (copies of a network)."""
    known = [result.losses for result in results if result.losses]
    return tuple(float(np.mean(of_step)) for of_step in zip(*known, strict=True)) if known else ()


def _run_job(job: Job, membership: Membership | None, monitor: Monitor | None) -> list[RankResult]:
    if membership is None:
        with kept_on_failure(job.logs) as logs, monitored(logs, job.lowered.devices, monitor):
            return run_workers(train, (replace(job, logs=logs),), job.lowered.devices, logs=logs)[0]
    settle_worker()
    try:
        return train(job, membership)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ExecutionError(
            f"rank {membership.rank} of {membership.world_size} failed: {type(error).__name__}: {error}; "
            "if it only names a connection, another rank failed first: see that rank's output"
        ) from error


def _report(
    prepared: Prepared,
    results: list[RankResult],
    membership: Membership | None,
    reference: list[float],
    allowed: list[float],
) -> ExecutionReport:
    job, step_time = prepared.job, prepared.predicted_step_time_s
    slowest = np.max([result.step_times_s for result in results], axis=0)[job.warm_up_steps :]
    p10, median, p90 = (float(value) for value in np.quantile(slowest, (0.1, 0.5, 0.9)))
    speed = None
    if prepared.calibrated_pace_s is not None and results[0].paces_s:
        speed = prepared.calibrated_pace_s / paces_of([result.paces_s for result in results]).median_s
    disturbed = _disturbed(results, membership)
    at_this_speed = None if step_time is None or speed is None else step_time / speed
    losses = losses_of(results)
    differences = [relative_difference(*pair) for pair in zip(losses, reference, strict=False)]
    return ExecutionReport(
        processes=len(results),
        backend=BACKENDS[job.device_type],
        launcher="local processes" if membership is None else membership.launcher,
        rank=0 if membership is None else membership.rank,
        steps=job.steps,
        first_step=job.checkpoints.position.step,
        warm_up_steps=job.warm_up_steps,
        precision=prepared.precision,
        data=prepared.data,
        seed=job.seed,
        checkpoint=last_checkpoint(job.checkpoints, job.steps),
        losses=losses,
        reference_losses=tuple(reference),
        max_loss_difference=max(differences) if differences else None,
        tolerance=max(allowed) if allowed else None,
        verified=True if reference else None,
        measured_step_time_s=StepTime(median=median, p10=p10, p90=p90),
        predicted_step_time_s=step_time,
        error=None if step_time is None else step_time / median - 1,
        measured_peak_memory_bytes=max(result.peak_memory_bytes for result in results),
        measured_memory_method=results[0].memory_method,
        predicted_peak_memory_bytes=prepared.predicted_peak_bytes,
        notes=(
            *prepared.notes,
            *_loose(prepared.precision, allowed),
            *_busy(disturbed, job.device_type),
            *_changed(speed),
        ),
        machine_speed=speed,
        others_share=None if disturbed is None else disturbed.others_share,
        stolen_share=None if disturbed is None else disturbed.stolen_share,
        predicted_at_this_speed_s=at_this_speed,
        error_at_this_speed=None if at_this_speed is None else at_this_speed / median - 1,
    )


def _loose(precision: str, allowed: Sequence[float]) -> tuple[str, ...]:
    """Say so where rounding alone takes the losses far apart: that they are near one process's then proves less."""
    largest = max(allowed, default=0.0)
    if largest <= TOLERANCES.get(precision, math.inf):
        return ()
    remedy = "" if precision == "fp64" else "; --precision fp64 proves more"
    return (
        f"runs of one process that only rounding sets apart differ by {largest / ROUNDING_FACTORS[precision]:.1e}, so "
        f"that {largest:.1e} was allowed{remedy}",
    )


def _changed(speed: float | None) -> tuple[str, ...]:
    """Say so where the machine has another speed than when it was calibrated."""
    if speed is None or abs(speed - 1) < CHANGED_SPEED:
        return ()
    word = "slower" if speed < 1 else "faster"
    return (
        f"the machine has become {word} since it was calibrated: typical kernels on all processes together ran at "
        f"{speed:.0%} of their speed then; calibrate again, or compare the step time with the prediction at this speed",
    )


def _disturbed(results: list[RankResult], membership: Membership | None) -> Disturbance | None:
    """What took time from the cores of the ranks; None where they are not all on this machine."""
    if membership is not None and membership.local_size < membership.world_size:
        return None
    return disturbance([result.use for result in results])


def _busy(found: Disturbance | None, device_type: str) -> tuple[str, ...]:
    """Say so where other programs or the host took time from the cores: the measured time is then not the plan's."""
    if device_type != "cpu" or found is None:
        return ()
    taken = []
    if found.others_share > MOST_OTHERS:
        taken.append(f"other programs took {found.others_share:.0%} of the cores' time")
    if found.stolen_share > MOST_STOLEN:
        taken.append(f"the host of this machine took {found.stolen_share:.0%} of the cores' time")
    return (f"{' and '.join(taken)}; measure on an idle machine",) if taken else ()
