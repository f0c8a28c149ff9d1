"""Predict training runs: step time by simulation of the schedule, an interval, and the memory that decides.

Transformers are timed together, as columns (`work`, `step`); a run with pipeline stages is then simulated, action by
action, with the stage times found. Other networks go layer by layer (`layered_work`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.memory.device import peak_memory
from planner.cost.software_file import SoftwareFile, shipped_software
from planner.cost.training_run import LayeredNetwork, RunPrediction, TrainingRun, TransformerShape
from planner.published.estimate.coefficients import gather, interval_key
from planner.published.estimate.columns import FloatArray, stage_layers
from planner.published.estimate.layered_work import parameters_of, predict_layered
from planner.published.estimate.step import Coefficients, StageTimes, Step, stage_times, step_times
from planner.published.estimate.work import work_of
from simulator.errors import InputError, ProgramError
from simulator.pipeline import PipelineCosts, simulate_pipeline
from simulator.schedules import SCHEDULES, Schedule, make_schedule

_MANY_ACTIONS = 2_000_000  # a schedule beyond is timed in closed form


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds of one step and what they are made of."""

    step_time_s: float
    breakdown: dict[str, float]


def predict_runs(
    runs: Sequence[TrainingRun], software: SoftwareFile | None = None, *, simulate: bool = True
) -> list[RunPrediction]:
    """Predict every run, in order.

    Parameters
    ----------
    software
        Coefficients and intervals; by default those that come with the package.
    simulate
        Simulate pipelines; otherwise their closed form counts.
    """
    software = software or shipped_software()
    times: list[_Times | None] = [None] * len(runs)
    transformers = [index for index, run in enumerate(runs) if isinstance(run.network, TransformerShape)]
    found = transformer_times([runs[index] for index in transformers], software, simulate=simulate)
    for index, time in zip(transformers, found, strict=True):
        times[index] = time
    for index, run in enumerate(runs):
        if isinstance(run.network, LayeredNetwork):
            estimate = predict_layered(run, parameters_of(software.layered, run))
            times[index] = _Times(step_time_s=estimate.step_time_s, breakdown=estimate.breakdown)
    return [_prediction(run, time, software) for run, time in zip(runs, times, strict=True) if time is not None]


def _prediction(run: TrainingRun, times: _Times, software: SoftwareFile) -> RunPrediction:
    interval, label = software.interval(*interval_key(run))
    memory = peak_memory(run)
    return RunPrediction(
        step_time_s=times.step_time_s,
        interval_s=(times.step_time_s * interval.low, times.step_time_s * interval.high),
        label=label,
        peak_memory_bytes=memory.reserved_bytes,
        fits=memory.fits,
        breakdown=times.breakdown,
        memory=memory.fullest.components(),
        memory_figures={str(kind): value for kind, value in memory.figures().items()},
    )


def transformer_times(runs: Sequence[TrainingRun], software: SoftwareFile, *, simulate: bool) -> list[_Times]:
    """Step times of transformers."""
    if not runs:
        return []
    work = work_of(runs)
    coefficients = gather(software.coefficients, runs)
    step = step_times(work, coefficients)
    stage = stage_times(work, coefficients)
    return [_times(index, run, step, stage, coefficients, simulate=simulate) for index, run in enumerate(runs)]


def _times(index: int, run: TrainingRun, step: Step, stage: StageTimes, k: Coefficients, *, simulate: bool) -> _Times:
    total = float(step.step_time_s[index])
    bubble = float(step.bubble_s[index])
    schedule = pipeline_schedule(run) if simulate else None
    if schedule is not None:
        slower = float(step.slower[index])
        passes = total / slower - float(step.rest_s[index])
        simulated = simulate_pipeline(schedule, pipeline_costs(index, run, schedule, stage, k)).step_time_s
        bubble += simulated - passes
        total += (simulated - passes) * slower
    compute, exposed = float(step.compute_s[index]), float(step.exposed_communication_s[index])
    optimizer = float(step.optimizer_s[index])
    if bubble < 0:
        # The simulation found less waiting than the closed form has in what it calls exposed.
        shrunk = 1 + bubble / (compute + exposed)
        compute, exposed, bubble = compute * shrunk, exposed * shrunk, 0.0
    return _Times(
        step_time_s=total,
        breakdown={
            "compute_s": compute,
            "exposed_communication_s": exposed,
            "bubble_s": bubble,
            "optimizer_s": optimizer,
            "overhead_s": total - compute - exposed - bubble - optimizer,
        },
    )


def pipeline_schedule(run: TrainingRun) -> Schedule | None:
    """Schedule of a run with pipeline stages; None where there are none, or none of the generators has it."""
    setup = run.setup
    name = setup.schedule.replace("-", "_")
    actions = 2 * setup.pp * setup.vpp * setup.micro_batches
    if setup.pp == 1 or name not in SCHEDULES or actions > _MANY_ACTIONS:
        return None
    if name in ("1f1b", "gpipe") and setup.vpp > 1:
        name = "interleaved_1f1b"
    try:
        return make_schedule(name, setup.pp, setup.micro_batches, setup.vpp if name == "interleaved_1f1b" else None)
    except (InputError, ProgramError):
        return None


def pipeline_costs(
    index: int, run: TrainingRun, schedule: Schedule, stage: StageTimes, k: Coefficients
) -> PipelineCosts:
    """Times of every stage of a run: its layers, the embedding in the first and the head in the last.

    DualPipe runs two copies of the network, whose stages lie on the ranks in opposite order.
    """
    setup, network = run.setup, run.network
    assert isinstance(network, TransformerShape)

    def one(values: FloatArray | float) -> float:
        return float(np.broadcast_to(values, (len(stage.send),))[index])

    copies = 2 if schedule.name == "dualpipe" else 1
    stages = schedule.stages // copies
    layers = stage_layers(network, stages, setup.layers_per_stage)
    overhead = one(k.micro_batch_overhead_s) / 2
    forward = layers * one(stage.layer_forward)
    backward = layers * one(stage.layer_backward)
    forward[0] += one(stage.first_forward)
    backward[0] += one(stage.first_backward)
    forward[-1] += one(stage.last_forward) + overhead
    backward[-1] += one(stage.last_backward) + overhead
    weight = layers * one(stage.layer_weight_gradient)
    weight[-1] += one(stage.last_weight_gradient)
    communication = np.tile(layers * one(stage.layer_communication), copies)
    return PipelineCosts(
        forward_s=np.tile(forward, copies),
        backward_s=np.tile(backward, copies),
        input_gradient_s=np.tile(backward - weight, copies),
        weight_gradient_s=np.tile(weight, copies),
        forward_communication_s=communication,
        backward_communication_s=communication,
        send_s=one(stage.send) * one(k.pipeline_exposed),
        overlap_sends=False,
    )
