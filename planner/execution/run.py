"""Running a plan for real, beside its prediction and beside one process."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from planner.execution.checkpoint_options import (
    check_verifiable,
    checkpoints,
    digest_of,
    find_beginning,
    last_checkpoint,
)
from planner.execution.comparing import Comparison, compare
from planner.execution.data import check_dataset, open_dataset
from planner.execution.job import Job, check_precision, input_specs
from planner.execution.membership import Membership, find_membership, is_scheduler
from planner.execution.optimizers import hyperparameters
from planner.execution.rank_log import kept_on_failure
from planner.execution.recorded import rank_times
from planner.execution.reference import run_reference
from planner.execution.run_trace import write_run_trace
from planner.execution.verification import (
    PERTURBATION,
    check_finite,
    compare_losses,
    first_beyond,
    relative_difference,
    tolerances,
)
from planner.execution.worker import BACKENDS, RankResult, train
from planner.instructions import LoweredPlan, LoweredStages
from planner.lowering.checked import checked_graph
from planner.prediction import predict, predict_plan
from planner.strategy.file import read_plan
from planner.strategy.loading import lower_to_run, naming
from planner.strategy.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.calibration.machine import count_devices
from simulator.calibration.process import available_cores, settle_worker, worker_threads
from simulator.errors import ExecutionError, InputError, MeshwrightError, ProfileError
from simulator.hardware import load_profile

DEFAULT_TIMEOUT_S = 60.0
DEFAULT_JOIN_TIMEOUT_S = 300.0
WARM_UP_STEPS = 2
RECORDED_STEPS = 5
BUSY_SHARE = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteOptions:
    """What to run and how.

    ``processes`` must equal the plan's devices and may be left out. ``data`` names a data set
    (`planner.execution.data.open_dataset`), ``precision`` replaces the plan's. Without a seed it is that of the
    checkpoint to ``resume``, else 0. ``steps`` count from the beginning of training. Checkpoints go to ``save`` after
    every ``save_every`` steps and at the end. ``force`` starts a run that is predicted not to fit in memory. Logs of
    the ranks go to ``log_dir``. ``join_timeout_s`` bounds the meeting of the processes and ``timeout_s``
    each collective: a rank that hangs ends the run after it. ``measure`` clocks the instructions of more steps, and
    ``trace`` writes them beside the prediction.
    """

    strategy: str | Path
    processes: int | None = None
    steps: int = 10
    data: str | None = None
    verify: bool = False
    precision: str | None = None
    seed: int | None = None
    learning_rate: float | None = None
    device: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    join_timeout_s: float = DEFAULT_JOIN_TIMEOUT_S
    save: str | Path | None = None
    save_every: int | None = None
    resume: str | Path | None = None
    force: bool = False
    log_dir: str | Path | None = None
    measure: bool = False
    trace: str | Path | None = None


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
    ``rank`` is not 0 on the other ranks of a job that was joined, which should print nothing.
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


def execute(options: ExecuteOptions, say: Say = lambda _: None) -> ExecutionReport:
    """Train a network as its strategy file says, on as many processes as the plan has devices.

    Parameters
    ----------
    options : ExecuteOptions
        What to run.
    say : callable
        Told in a few words what begins.

    Raises
    ------
    InputError
        An option, the plan or the data do not fit.
    ExecutionError
        A rank failed, or the losses differ from those of one process.
    SystemExit
        With code 0 in the scheduler process of msrun, which has nothing to do.
    """
    if is_scheduler(os.environ):
        raise SystemExit(0)
    return execute_plan(read_plan(options.strategy), options, say)


def execute_plan(plan: Plan, options: ExecuteOptions, say: Say = lambda _: None) -> ExecutionReport:
    """Do what `execute` does with a plan already read."""
    membership = find_membership(os.environ)
    _check(plan, options, membership)
    precision = options.precision or plan.precision
    check_precision(precision)
    with naming(options.strategy):
        hyperparameters(plan.optimizer)
    begin = find_beginning(
        options.resume,
        plan,
        steps=options.steps,
        precision=precision,
        seed=options.seed,
        data=options.data,
        learning_rate=options.learning_rate,
    )
    check_verifiable(begin, plan, options.verify)
    constants = hyperparameters(plan.optimizer, begin.learning_rate, plan.global_batch)
    say("lowering the plan")
    lowered = lower_to_run(plan, options.strategy, precision=precision)
    dataset = open_dataset(begin.data, input_specs(lowered), begin.seed)
    check_dataset(dataset, input_specs(lowered))
    rank = 0 if membership is None else membership.rank
    record = begin.record(plan, constants.learning_rate, precision)
    job = Job(
        lowered=lowered,
        network=plan.network,
        sequence_length=plan.sequence_length,
        optimizer=plan.optimizer,
        constants=constants,
        data=begin.data,
        seed=begin.seed,
        steps=options.steps,
        warm_up_steps=min(WARM_UP_STEPS, options.steps - begin.position.step - 1),
        device_type=options.device or _best_device(plan.devices),
        timeout_s=options.timeout_s,
        join_timeout_s=options.join_timeout_s,
        digest=digest_of(plan, replace(options, strategy="", log_dir=None)),
        logs=None if options.log_dir is None else Path(options.log_dir).absolute(),
        checkpoints=checkpoints(options.save, options.save_every, begin, record, first=rank == 0),
        recorded_steps=RECORDED_STEPS if options.measure or options.trace is not None else 0,
    )
    say(f"training {options.steps - begin.position.step} steps on {plan.devices} processes")
    results = _run_job(job, membership)
    losses = losses_of(results)
    check_finite(losses)
    reference: list[float] = []
    allowed: list[float] = []
    if options.verify and rank == 0:
        say("training again in one process")
        unbroken = run_reference(job)
        check_finite(unbroken, "training in one process")
        whole = (*unbroken[: begin.position.step], *losses)
        exact = _exact_if_needed(plan, job, whole, unbroken, precision, say)
        compare_losses(whole, unbroken, precision, exact)
        allowed = tolerances(precision, unbroken, exact)
        reference = unbroken[begin.position.step :]
    report = _report(plan, job, results, membership, reference, allowed, precision, dataset.description)
    return report if rank else _with_comparison(report, plan, job, results, options.trace)


def _with_comparison(
    report: ExecutionReport, plan: Plan, job: Job, results: list[RankResult], trace: str | Path | None
) -> ExecutionReport:
    """Lay what the clocks showed, if anything, beside the prediction."""
    records = [result.record for result in results if result.record is not None]
    if not records or report.predicted_step_time_s is None:
        return report
    hardware = load_profile(plan.hardware)
    timeline = predict(plan, job.lowered, hardware)[1] if isinstance(job.lowered, LoweredPlan) else None
    if trace is not None:
        ranks = rank_times(plan, job.lowered, records)
        write_run_trace(trace, plan, job.lowered, checked_graph(plan), hardware, timeline, ranks)
    found = compare(plan, job.lowered, records, hardware, report.predicted_step_time_s, timeline)
    return replace(report, comparison=found)


def _exact_if_needed(
    plan: Plan, job: Job, losses: tuple[float, ...], reference: list[float], precision: str, say: Say
) -> list[float]:
    """Train in fp64 as well where only that can tell rounding from a wrong plan."""
    if first_beyond(losses, reference, tolerances(precision, reference)) is None:
        return []
    if precision == "fp64":
        say("training again from parameters changed in the last places, to know what rounding does to this network")
        return run_reference(job, perturbation=PERTURBATION)
    say("training again in one process in fp64, to know what rounding does to this network")
    return run_reference(replace(job, lowered=lower_to_run(plan, plan.network, precision="fp64")))


def losses_of(results: list[RankResult]) -> tuple[float, ...]:
    """Losses of the whole batches, the mean of what ranks of several last stages know (copies of a network)."""
    known = [result.losses for result in results if result.losses]
    return tuple(float(np.mean(of_step)) for of_step in zip(*known, strict=True)) if known else ()


def _run_job(job: Job, membership: Membership | None) -> list[RankResult]:
    if membership is None:
        with kept_on_failure(job.logs) as logs:
            return run_workers(train, (replace(job, logs=logs),), job.lowered.devices, logs=logs)[0]
    settle_worker(owned=False)
    try:
        return train(job, membership)
    except MeshwrightError:
        raise
    except Exception as error:
        raise ExecutionError(
            f"rank {membership.rank} of {membership.world_size} failed: {type(error).__name__}: {error}; "
            "if it only names a connection, another rank failed first: see that rank's output"
        ) from error


def _check(plan: Plan, options: ExecuteOptions, membership: Membership | None) -> None:
    size = plan.devices
    if membership is not None and membership.world_size != size:
        raise InputError(
            f"{membership.launcher} started {membership.world_size} processes, the plan is for {size} devices; "
            f"start {size} processes or plan for --devices {membership.world_size}"
        )
    if options.processes is not None and options.processes != size:
        raise InputError(
            f"--processes {options.processes} differs from the plan's {size} devices; "
            f"use --processes {size} or plan for --devices {options.processes}"
        )
    if options.steps < 1:
        raise InputError(f"--steps {options.steps} is less than 1; train at least one step")
    if not options.timeout_s > 0:
        raise InputError(f"a timeout of {options.timeout_s} s is not positive; give seconds, such as 60")
    if options.device is not None and options.device not in BACKENDS:
        raise InputError(f"device {options.device!r} is not one of {', '.join(BACKENDS)}; choose one of them")
    if options.device not in (None, "cpu"):
        _check_accelerators(options.device, size, membership)


def _check_accelerators(device: str, processes: int, membership: Membership | None) -> None:
    """Each process takes the device of its number on its machine."""
    found = count_devices(device)
    if membership is None and processes > found:
        raise InputError(
            f"--device {device}: this machine has {found} {device} devices, the plan needs {processes}; "
            f"use --device cpu or plan for --devices {found}"
        )
    if membership is not None and membership.local_rank >= found:
        raise InputError(
            f"--device {device}: this machine has {found} {device} devices, but {membership.launcher} started "
            f"local rank {membership.local_rank} here; start one process for each device or use --device cpu"
        )


def _best_device(processes: int) -> str:
    """Take an accelerator that has a device for each process, else the CPU."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= processes:
        return "cuda"
    if importlib.util.find_spec("torch_npu") is not None:
        import torch_npu

        if torch_npu.npu.is_available() and torch_npu.npu.device_count() >= processes:
            return "npu"
    return "cpu"


def _report(
    plan: Plan,
    job: Job,
    results: list[RankResult],
    membership: Membership | None,
    reference: list[float],
    allowed: list[float],
    precision: str,
    data: str,
) -> ExecutionReport:
    slowest = np.max([result.step_times_s for result in results], axis=0)[job.warm_up_steps :]
    p10, median, p90 = (float(value) for value in np.quantile(slowest, (0.1, 0.5, 0.9)))
    step_time, peak, notes = _prediction(plan, job.lowered)
    losses = losses_of(results)
    differences = [relative_difference(*pair) for pair in zip(losses, reference, strict=False)]
    return ExecutionReport(
        processes=len(results),
        backend=BACKENDS[job.device_type],
        launcher="torch elastic" if membership is None else membership.launcher,
        rank=0 if membership is None else membership.rank,
        steps=job.steps,
        first_step=job.checkpoints.position.step,
        warm_up_steps=job.warm_up_steps,
        precision=precision,
        data=data,
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
        predicted_peak_memory_bytes=peak,
        notes=(*notes, *_busy(results, job.device_type)),
    )


def _busy(results: list[RankResult], device_type: str) -> tuple[str, ...]:
    """Say so where other programs kept the workers from their cores: the measured time is then not the plan's."""
    share = float(np.mean([result.waited_share for result in results]))
    if device_type != "cpu" or len(results) * worker_threads() > available_cores() or share < BUSY_SHARE:
        return ()
    return (
        f"other programs kept the processes waiting for a core {share:.0%} of the time; measure on an idle machine",
    )


def _prediction(plan: Plan, lowered: LoweredPlan | LoweredStages) -> tuple[float | None, int | None, tuple[str, ...]]:
    """Predict step time and peak memory on the plan's hardware, with notes where something is missing."""
    try:
        hardware = load_profile(plan.hardware)
    except ProfileError as error:
        return None, None, (f"no prediction: {error}, and correct hardware.profile in the strategy file",)
    notes: tuple[str, ...] = ()
    if hardware.hash != plan.hardware_hash:
        notes = (f"profile {plan.hardware} has changed since the plan was made",)
    if isinstance(lowered, LoweredPlan):
        prediction, _ = predict(plan, lowered, hardware)
    else:
        prediction = predict_plan(plan, checked_graph(plan), hardware)
    return prediction.step_time_s, prediction.peak_memory_bytes, notes
