"""What a plan with pipeline stages is predicted to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.mixed_pipeline import lower_mixed
from planner.planning.prediction import Prediction, computed_dtype, figures, without_rounding
from planner.plans.plan import Plan
from simulator import fast_engine
from simulator.following_steps import period_s
from simulator.hardware import Hardware
from simulator.mixed_cluster import MixedCluster
from simulator.pipeline import per_rank
from simulator.pipeline_memory import RankMemory, pipeline_memory
from simulator.pipeline_operators import operator_table, task_actions
from simulator.pipeline_passes import OperatorResult, simulate_operators
from simulator.pipeline_trace import action_times, write_pipeline_trace
from simulator.schedules import Schedule
from simulator.task_table import FloatArray, IntArray, TaskTable
from simulator.timeline import Engine


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelinePrediction:
    """A prediction with what was simulated for it; ``memory`` is that of each pipeline rank."""

    prediction: Prediction
    lowered: LoweredPipeline
    result: OperatorResult
    memory: tuple[RankMemory, ...]


def predict_pipeline(
    plan: Plan,
    graph: OperatorGraph,
    hardware: Hardware,
    schedule: Schedule | None = None,
    engine: Engine | None = None,
    cluster: MixedCluster | None = None,
) -> PipelinePrediction:
    """Simulate a plan pass by pass; `schedule` stands in for the plan's.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    engine : Engine, optional
        Runs the step operator by operator instead, to the same times.
    cluster : MixedCluster, optional
        Nodes of several device types that `hardware` stands for: every stage runs at the pace of its own.
    """
    if cluster is None:
        lowered = lower_pipeline(plan, graph, hardware, schedule)
    else:
        lowered = lower_mixed(plan, graph, cluster, hardware, schedule)
    result = simulate_operators(lowered.schedule, lowered.costs)
    if engine is not None:
        result = _rerun(lowered, result, engine)
    memory = rank_memory(lowered)
    peak = int(np.argmax([rank.peak_bytes for rank in memory]))
    prediction = figures(
        plan,
        hardware,
        step_time_s=result.step_time_s,
        flops=lowered.flops,
        dtype=computed_dtype(graph),
        memory={str(kind): size for kind, size in memory[peak].at_peak.items()},
        breakdown=breakdown(lowered, result),
        peak_rank=peak,
    )
    return PipelinePrediction(prediction=prediction, lowered=lowered, result=result, memory=memory)


def _rerun(lowered: LoweredPipeline, result: OperatorResult, engine: Engine) -> OperatorResult:
    """The times of the step in an engine."""
    schedule, table = lowered.schedule, operator_table(lowered.schedule, lowered.costs)
    _, ends = engine(table)
    last = np.arange(table.size - schedule.ranks, table.size)
    step = period_s(table, last, schedule.beginning_ranks, ends, engine)
    return replace(result, step_time_s=step, length_s=float(ends.max()))


@dataclass(frozen=True, kw_only=True, eq=False)
class OperatorRun:
    """A step operator by operator: tasks (T), their starts and ends in seconds, the action of each, memory of ranks."""

    table: TaskTable
    times: tuple[FloatArray, FloatArray]
    actions: IntArray
    memory: tuple[RankMemory, ...]


def operator_run(found: PipelinePrediction) -> OperatorRun:
    """Run the step of a prediction once more, for when each task starts and ends."""
    schedule, costs = found.lowered.schedule, found.lowered.costs
    table, actions = operator_table(schedule, costs), task_actions(schedule, costs)
    times = fast_engine.run(table)
    memory = pipeline_memory(schedule, *action_times(schedule, table, times, actions), found.lowered.sizes)
    return OperatorRun(table=table, times=times, actions=actions, memory=memory)


def write_trace(found: PipelinePrediction, plan: Plan, path: str | Path) -> Path:
    """Write the step of every pipeline rank for Perfetto or Chrome."""
    schedule, run = found.lowered.schedule, operator_run(found)
    description = {
        "program": plan.network,
        "schedule": schedule.name,
        "step_time_s": found.prediction.step_time_s,
        "last_rank_ends_s": found.result.length_s,
        "breakdown": dict(found.prediction.breakdown),
        "peak_memory_bytes": found.prediction.peak_memory_bytes,
        "devices": plan.devices,
        "ranks_drawn": schedule.ranks,
        "note": "one process for each pipeline rank; the devices of its stage run alike",
    }
    return write_pipeline_trace(path, schedule, run.table, run.times, run.actions, run.memory, description=description)


def rank_memory(lowered: LoweredPipeline) -> tuple[RankMemory, ...]:
    """Memory of every rank; the order of its actions alone decides, so they are taken to last equally long."""
    schedule = lowered.schedule
    turn = (np.arange(schedule.size) - schedule.offsets[schedule.action_rank]).astype(np.float64)
    second = np.flatnonzero(schedule.paired) + 1
    starts, ends = turn.copy(), turn + 1.0
    starts[second], ends[second - 1] = turn[second] - 1.0, turn[second] + 1.0
    return pipeline_memory(schedule, starts, ends, lowered.sizes)


def breakdown(lowered: LoweredPipeline, result: OperatorResult) -> dict[str, float]:
    """Seconds of a step by what ranks do, their mean: computation, communication that nothing hides, waiting, update.

    Communication counts as exposed where the kernels of a pass wait for it, and after the last action.
    """
    schedule, costs, compute = lowered.schedule, lowered.costs, result.compute_s
    if not lowered.hardware.overlaps_communication:
        return _in_turn(lowered, result)
    exposed: FloatArray = result.stall_s + result.drained_s - result.computed_s
    for ranks, seconds in costs.meetings:
        exposed[list(ranks)] += seconds
    optimizer = np.broadcast_to(np.asarray(costs.epilogue_s, dtype=np.float64), schedule.ranks)
    idle: FloatArray = result.step_time_s - compute - optimizer
    exposed = np.minimum(exposed, idle)
    parts = {
        "compute_s": float(compute.mean()),
        "exposed_communication_s": float(exposed.mean()),
        "bubble_s": float(result.step_time_s - compute.mean() - exposed.mean() - optimizer.mean()),
        "optimizer_s": float(optimizer.mean()),
    }
    return without_rounding(parts, result.step_time_s)


def _in_turn(lowered: LoweredPipeline, result: OperatorResult) -> dict[str, float]:
    """`breakdown` where messages take turns with kernels; those between stages count as waiting, as where they hide."""
    schedule, work, costs = lowered.schedule, lowered.work, lowered.costs
    taken = result.compute_s + per_rank(schedule, costs.prologue_s) + per_rank(schedule, costs.epilogue_s)
    updates = sum(times * float(work.seconds[number]) for rank in work.updates for number, times in rank)
    sent = work.seconds * [task.collective is not None for task in work.tasks]
    inside, optimizer = float(work.in_passes(schedule) @ sent) / schedule.ranks, updates / schedule.ranks
    met = sum(len(ranks) * seconds for ranks, seconds in costs.meetings) / schedule.ranks
    parts = {
        "compute_s": float(taken.mean()) - inside - optimizer,
        "exposed_communication_s": inside + met,
        "bubble_s": float(result.step_time_s - taken.mean()) - met,
        "optimizer_s": optimizer,
    }
    return without_rounding(parts, result.step_time_s)
