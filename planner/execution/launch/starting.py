"""From a plan and what is asked of it to a job that may start, or the reason why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from planner.cost.software import machine_of
from planner.execution.checkpoints.options import check_verifiable, checkpoints, digest_of, find_beginning
from planner.execution.data.samples import check_dataset, open_dataset
from planner.execution.job import Job, check_precision, input_specs
from planner.execution.memory import free_memory, least_free_memory
from planner.execution.optimizers import hyperparameters
from planner.execution.reference import check_comparable
from planner.execution.worker import begin_together, train
from planner.lowering.checked import checked_graph
from planner.planning.loading import lower_to_run, naming
from planner.planning.prediction import Prediction, simulate_plan
from planner.plans.plan import Plan
from simulator.calibration.launch import ask_process
from simulator.calibration.machine import BACKENDS, count_devices
from simulator.errors import InfeasibleError, InputError, ProfileError, UnsupportedError
from simulator.profiles import load_profile
from simulator.program import BufferKind
from simulator.torch_versions import untried_torch

if TYPE_CHECKING:
    from planner.execution.launch.membership import Membership
    from planner.execution.options import ExecuteOptions

WARM_UP_STEPS = 2
RECORDED_STEPS = 5
GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job with what is known of it before it starts.

    ``predicted_step_time_s`` is what measured steps are held against: the time after which the next one follows, or,
    where each begins behind a barrier, ``predicted_length_s``, from the start of the first rank to the end of the last.
    ``calibrated_pace_s`` is that of the plan's profile, if it has one. ``predicted_peak_bytes`` is of the plan's own
    hardware; ``predicted_tensor_bytes`` leaves out what its drivers and its allocator hold. None where the plan's
    profile cannot be read, which ``notes`` say.
    """

    job: Job
    precision: str
    data: str
    predicted_step_time_s: float | None
    predicted_length_s: float | None
    predicted_peak_bytes: int | None
    predicted_tensor_bytes: int | None
    calibrated_pace_s: float | None
    notes: tuple[str, ...]


def prepare(plan: Plan, options: ExecuteOptions, membership: Membership | None, say: Callable[[str], None]) -> Prepared:
    """Lower a plan and make the job of all ranks.

    Raises
    ------
    InputError
        The plan, the data or the checkpoint to resume from do not fit the network or each other.
    """
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
    for note in begin.notes:
        say(note)
    check_verifiable(begin, plan, options.verify)
    constants = hyperparameters(plan.optimizer, begin.learning_rate, plan.global_batch)
    record = begin.record(plan, constants.learning_rate, precision)
    orders = checkpoints(options.save, options.save_every, begin, record)
    say("lowering the plan")
    lowered = lower_to_run(plan, options.strategy, precision=precision)
    dataset = open_dataset(begin.data, input_specs(lowered), begin.seed)
    check_dataset(dataset, input_specs(lowered))
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
        checkpoints=orders,
        recorded_steps=RECORDED_STEPS if options.measure or options.trace is not None else 0,
    )
    prediction, length_s, notes = _prediction(plan)
    calibrated = _calibrated_pace(plan)
    job = replace(job, times_pace=calibrated is not None)
    at_once = begin_together(job.device_type, wanted=job.times_pace)
    peak = None if prediction is None else prediction.peak_memory_bytes
    return Prepared(
        job=job,
        precision=precision,
        data=dataset.description,
        predicted_step_time_s=length_s if at_once or prediction is None else prediction.step_time_s,
        predicted_length_s=length_s,
        predicted_peak_bytes=peak,
        predicted_tensor_bytes=None if prediction is None or peak is None else peak - _of_drivers(prediction),
        calibrated_pace_s=calibrated,
        notes=(*notes, *untried_torch()),
    )


def _calibrated_pace(plan: Plan) -> float | None:
    """What typical kernels took on the plan's hardware when it was calibrated; None where its profile does not say."""
    try:
        conditions = load_profile(plan.hardware).conditions
    except ProfileError:
        return None
    return None if conditions is None else conditions.pace_s(plan.devices)


def _of_drivers(prediction: Prediction) -> int:
    held = (BufferKind.CONTEXT, BufferKind.ALLOCATOR_SLACK)
    return sum(prediction.memory_at_peak.get(kind.value, 0) for kind in held)


def check_options(plan: Plan, options: ExecuteOptions, membership: Membership | None) -> None:
    """Check what was asked for against the plan; nothing has been lowered yet.

    Raises
    ------
    InputError
        Something does not fit.
    """
    size = plan.devices
    if membership is not None and membership.world_size != size:
        raise InputError(
            f"{membership.launcher} started {membership.world_size} processes, the plan is for {size} devices; "
            f"start {size} processes or plan for --devices {membership.world_size}"
        )
    check_processes(plan, options.processes)
    if plan.attention in ("flash", "vendor"):
        raise InputError(
            f"the plan is for attention {plan.attention}, and torch takes the fused kernel of its choice; plan again "
            "with --attention flash2, fused_softmax or unfused, or without"
        )
    if plan.tensor_overlap:
        raise InputError(
            "the plan has messages of tensor ranks beside parts of products, and products run whole here; plan "
            "again with --pin tensor_overlap=false"
        )
    if plan.expert_overlap:
        raise InputError(
            "the plan has tokens travel beside another micro-batch, and micro-batches run one after the other here; "
            "plan again with --pin expert_overlap=false"
        )
    if plan.sent_once:
        raise InputError(
            "the plan has each token travel once to a node for all of its experts there, and it travels once for each "
            "of them here; plan again with --pin expert_messages=tokens"
        )
    if options.verify:
        check_comparable(plan)
    if options.steps < 1:
        raise InputError(f"--steps {options.steps} is less than 1; train at least one step")
    if not options.timeout_s > 0:
        raise InputError(f"a timeout of {options.timeout_s} s is not positive; give seconds, such as 60")
    if options.device is not None and options.device not in BACKENDS:
        raise InputError(f"device {options.device!r} is not one of {', '.join(BACKENDS)}; choose one of them")
    if not options.join_timeout_s > 0:
        raise InputError(f"a join timeout of {options.join_timeout_s} s is not positive; give seconds, such as 300")


def check_processes(plan: Plan, processes: int | None) -> None:
    """Raise InputError where another number of `processes` is asked for than the plan has devices."""
    if processes is not None and processes != plan.devices:
        raise InputError(
            f"--processes {processes} differs from the plan's {plan.devices} devices; "
            f"use --processes {plan.devices} or plan for --devices {processes}"
        )


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
    for device in ("cuda", "npu"):
        try:
            if count_devices(device) >= processes:
                return device
        except UnsupportedError:
            continue
    return "cpu"


def check_host(plan: Plan, options: ExecuteOptions, prepared: Prepared, membership: Membership | None) -> None:
    """Check that this machine has the devices, the backend and the memory for its part of a job.

    Raises
    ------
    InputError
        It has not the devices, or torch not the backend.
    InfeasibleError
        The prediction exceeds its memory, and ``options.force`` does not say to try it.
    """
    device = prepared.job.device_type
    if device != "cpu":
        _check_accelerators(device, plan.devices, membership)
    if not dist.is_backend_available(BACKENDS[device]):
        raise InputError(
            f"--device {device} needs the backend {BACKENDS[device]}, which this torch ({torch.__version__}) was built "
            "without; install a torch that has it or use --device cpu"
        )
    if not options.force:
        _check_memory(plan, prepared, membership)


def _free_memory(device: str, processes: int, membership: Membership | None) -> int | None:
    """Free memory for each process; a launcher that will not compute leaves no context on its devices."""
    if membership is not None or device == "cpu":
        return free_memory(device, 0 if membership is None else membership.local_rank)
    return ask_process(least_free_memory, (device, processes), train.__module__)


def _check_memory(plan: Plan, prepared: Prepared, membership: Membership | None) -> None:
    needed, device = prepared.predicted_tensor_bytes, prepared.job.device_type
    if needed is None:
        return
    free = _free_memory(device, plan.devices, membership)
    if free is None:
        return
    sharing = 1
    if device == "cpu":
        sharing = plan.devices if membership is None else membership.local_size
    if needed * sharing > free:
        each = f"{sharing} processes of {needed / GIGABYTE:.3g} GB" if sharing > 1 else f"{needed / GIGABYTE:.3g} GB"
        place = "on this machine" if device == "cpu" else f"on its {device} device"
        raise InfeasibleError(
            f"the step is predicted to need {each} at its peak, but there are {free / GIGABYTE:.3g} GB free {place}; "
            "plan for more devices, with --pin optimizer_sharding=zero3 or --pin recompute=full, or start it anyway "
            "with --force"
        )


def _prediction(plan: Plan) -> tuple[Prediction | None, float | None, tuple[str, ...]]:
    """Predict a step on the plan's hardware, and its length; with notes where something is missing."""
    try:
        hardware = machine_of(plan, software=False)
    except ProfileError as error:
        return None, None, (f"no prediction: {error}, and correct hardware.profile in the strategy file",)
    notes: tuple[str, ...] = ()
    if load_profile(plan.hardware).hash != plan.hardware_hash:
        notes = (f"profile {plan.hardware} has changed since the plan was made",)
    if plan.software:
        notes = (*notes, f"the plan was made for {plan.software}, the step is predicted as torch runs it")
    plan = replace(plan, software="")
    found = simulate_plan(plan, checked_graph(plan), hardware)
    return found.prediction, found.result.length_s, notes
