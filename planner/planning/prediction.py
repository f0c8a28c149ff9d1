"""What a plan is predicted to do on a cluster: its passes are lowered and simulated, for any number of stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from pathlib import Path

import numpy as np

from planner.cost.memory.figures import probability_to_fit
from planner.cost.software import uncertainty_of
from planner.cost.work import trained_dtype
from planner.graph.experts import experts_of
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.mixed_pipeline import lower_mixed
from planner.planning.software_memory import host_memory_bytes, software_memory
from planner.planning.start_time import start_s
from planner.plans.plan import Plan
from planner.plans.request import PRECISIONS
from simulator import fast_engine
from simulator.errors import InputError
from simulator.hardware import ORDER, Hardware
from simulator.launches import SAMPLE, fixed_time, waiting_for_samples
from simulator.mixed_cluster import MixedCluster
from simulator.pipeline_memory import RankMemory, pipeline_memory
from simulator.pipeline_operators import STREAMS, action_variants, operator_table, per_rank, task_actions
from simulator.pipeline_passes import OperatorResult, period_s, simulate_operators
from simulator.pipeline_trace import action_times, write_pipeline_trace
from simulator.program import Collective
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text
from simulator.schedules import ActionKind, Schedule
from simulator.task_table import Engine, FloatArray, IntArray, TaskTable

HOST = "host_s"
"""Part of a step in which devices wait for what the host does once for a step and once for a micro-batch."""
ROUNDING = 1e-12
"""Part of a step by which equal sums may differ."""
OPERATORS = 10
"""Operators that are listed of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Predicted time, throughput and memory of one optimizer step.

    ``mfu`` is the share of the devices' peak that the network's own floating point operations reach;
    ``breakdown`` adds up to the step time (the mean of all pipeline ranks); ``memory_at_peak`` to the peak, which is
    that of pipeline rank ``peak_rank``. Where the plan names software, and `planner.planning.software_memory` describes
    the plan, memory is what that software reserves, and ``memory_figures`` what tools show of it, by the names of
    `planner.cost.memory.figures.MemoryFigure`; else it is that of live tensors. ``p_fits`` is how probable it is that
    a device has as much, by the errors of such predictions. ``host_memory_bytes`` is what a node's host holds of the
    ``host_limit_bytes`` that it has. ``analytic`` are the parts of the closed form that the search minimised, where it
    did. ``start_s`` passes once, before the first step.

    Examples
    --------
    >>> import meshwright as mw
    >>> found = mw.plan("zoo:mlp", hardware="dgx-a100", devices=8, global_batch=512, top=1).prediction
    >>> found.fits, found.interval_s[0] < found.step_time_s < found.interval_s[1]
    (True, True)
    >>> abs(sum(found.breakdown.values()) / found.step_time_s - 1) < 1e-6
    True
    """

    step_time_s: float
    interval_s: tuple[float, float]
    label: str
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float
    peak_memory_bytes: int
    device_memory_bytes: int
    memory_at_peak: Mapping[str, int]
    breakdown: Mapping[str, float]
    peak_rank: int = 0
    p_fits: float = 1.0
    host_memory_bytes: int = 0
    host_limit_bytes: float = inf
    software: str = ""
    memory_figures: Mapping[str, float] = field(default_factory=dict)
    analytic: Mapping[str, float] = field(default_factory=dict)
    start_s: float = 0.0

    def __repr__(self) -> str:
        tokens = self.tokens_per_s is not None
        speed = rate_text(self.tokens_per_s or 0.0, "tokens") if tokens else rate_text(self.samples_per_s, "samples")
        parts = ", ".join(f"{name} {seconds_text(value)}" for name, value in self.breakdown.items() if value)
        return (
            f"step {seconds_text(self.step_time_s)}, 90 % interval {interval_text(*self.interval_s)} ({self.label})\n"
            f"{parts.replace('_s ', ' ').replace('_', ' ')}\n"
            f"{speed}, MFU {percent_text(self.mfu)}, memory {bytes_text(self.peak_memory_bytes)} of "
            f"{bytes_text(self.device_memory_bytes)}"
        )

    @property
    def host_fits(self) -> bool:
        """Whether the host of a node holds what is moved there."""
        return self.host_memory_bytes <= self.host_limit_bytes

    @property
    def fits(self) -> bool:
        """Whether devices and hosts hold the plan."""
        return self.peak_memory_bytes <= self.device_memory_bytes and self.host_fits


def check_products(hardware: Hardware, dtype: str) -> None:
    """Raise InputError where matrix products are to be in 8 or 4 bits and the device has none.

    Tensors are wider than that: timing products as wider ones would plan casts for nothing.
    """
    for bits, kind, other in (("8", "float8", "dgx-h100"), ("4", "float4", "dgx-b200")):
        if dtype.startswith(kind) and not hardware.peak_dtype(dtype).startswith(kind):
            raise InputError(
                f"precision fp{bits}: {hardware.device_name} (profile {hardware.name}) has no {kind} peak, and "
                f"fp{bits} needs matrix products in {bits} bits; use --precision bf16, or a device that has them, such "
                f"as --hw {other}"
            )


def hardware_notes(hardware: Hardware, dtype: str) -> tuple[str, ...]:
    """Return the notes for a user: products in `dtype` timed as wider ones, and the order of the devices."""
    used, order = hardware.peak_dtype(dtype), tuple(row.source for row in hardware.rows if row.field == ORDER)
    if used == dtype:
        return order
    usual = next(name for name, known in PRECISIONS.items() if known == hardware.default_precision)
    return (f"{hardware.device_name} has no {dtype} peak: timed as {used}; plan with --precision {usual}", *order)


def with_host(analytic: Mapping[str, float], found: Prediction) -> dict[str, float]:
    """The parts of a closed form with what the host adds to the prediction, which no search can change much."""
    return {**analytic, **{part: seconds for part, seconds in found.breakdown.items() if part == HOST}}


def computed_dtype(graph: OperatorGraph) -> str:
    """Type that matrix products compute in: the narrowest of any."""
    return next((n.product_dtype for n in graph.nodes if n.product_dtype), trained_dtype(graph))


def without_rounding(parts: Mapping[str, float], step_time_s: float) -> dict[str, float]:
    """Parts of a step, in seconds, that are nothing where sums in another order leave them below zero.

    What lies further below is an error, which shows.
    """
    return {name: 0.0 if -ROUNDING * step_time_s < seconds < 0 else seconds for name, seconds in parts.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """All calls of one collective on one mesh axis in a step; seconds count whether hidden or not."""

    collective: Collective
    axis: str
    calls: int
    payload_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTotal:
    """All calls of one operator in a step."""

    name: str
    kernel: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedPlan:
    """A prediction with what was simulated for it; ``memory`` is that of each pipeline rank."""

    prediction: Prediction
    lowered: LoweredPipeline
    result: OperatorResult
    memory: tuple[RankMemory, ...]

    @cached_property
    def collectives(self) -> tuple[CollectiveTotal, ...]:
        """Calls of every collective on every axis, on all pipeline ranks."""
        calls, seconds, tasks = *self._calls, self.lowered.work.tasks
        numbers: dict[tuple[str, Collective], list[int]] = {}
        for number, task in enumerate(tasks):
            if task.collective is not None and calls[number]:
                numbers.setdefault((task.axis, task.collective), []).append(number)
        return tuple(
            CollectiveTotal(
                collective=collective,
                axis=axis,
                calls=round(calls[members].sum()),
                payload_bytes=float(sum(calls[n] * tasks[n].payload_bytes for n in members)),
                seconds=float(seconds[members].sum()),
            )
            for (axis, collective), members in sorted(numbers.items())
        )

    @cached_property
    def operators(self) -> tuple[OperatorTotal, ...]:
        """The operators that take most time on all pipeline ranks, longest first; equal layers count together.

        The index of a layer is written ``*`` in the name.
        """
        calls, seconds = self._calls
        numbers: dict[tuple[str, str], list[int]] = {}
        for number, task in enumerate(self.lowered.work.tasks):
            if task.collective is None and calls[number]:
                name = re.sub(r"(?<=\.)\d+(?=\.)", "*", task.name)
                numbers.setdefault((name, task.kernel.value), []).append(number)
        totals = [
            OperatorTotal(
                name=name, kernel=kernel, calls=round(calls[members].sum()), seconds=float(seconds[members].sum())
            )
            for (name, kernel), members in numbers.items()
        ]
        return tuple(sorted(totals, key=lambda total: (-total.seconds, total.name, total.kernel))[:OPERATORS])

    @cached_property
    def work_s(self) -> float:
        """Seconds of all tasks on all pipeline ranks, hidden or not."""
        return float(self._calls[1].sum())

    @cached_property
    def _calls(self) -> tuple[FloatArray, FloatArray]:
        """(tasks,), (tasks,) how often each task runs in a step on all pipeline ranks, and for how many seconds."""
        work = self.lowered.work
        calls = work.counts(self.lowered.schedule)
        return calls, calls * work.seconds


def step_overhead_s(plan: Plan, hardware: Hardware, step_s: float) -> float:
    """Seconds that a step waits for its host.

    The host does something once for a step and for each micro-batch: published whole steps of language networks say how
    long; those of other networks have next to none. It also prepares samples while the step of `step_s` runs.
    """
    if plan.sequence_length is not None:
        return fixed_time(hardware, plan.micro_batches)
    samples = plan.micro_batch * plan.micro_batches
    return waiting_for_samples(hardware, plan.devices, samples, step_s) if SAMPLE in hardware.training else 0.0


def simulate_plan(
    plan: Plan,
    graph: OperatorGraph,
    hardware: Hardware,
    schedule: Schedule | None = None,
    engine: Engine | None = None,
    cluster: MixedCluster | None = None,
) -> SimulatedPlan:
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
    at_peak = {str(kind): size for kind, size in memory[peak].at_peak.items()}
    held = software_memory(plan, graph, hardware)
    if held is not None:
        at_peak, peak = held.fullest.by_kind(), held.stages.index(held.fullest)
    by_kind = {kind: int(size) for kind, size in at_peak.items()}
    needed, limit = sum(by_kind.values()), int(hardware.device_memory_bytes)
    language, experts = plan.sequence_length is not None, experts_of(graph) > 0
    uncertainty = uncertainty_of(hardware, plan.software, language=language, experts=experts)
    parts = breakdown(lowered, result)
    fixed_s = step_overhead_s(plan, hardware, result.step_time_s)
    step = result.step_time_s + fixed_s
    samples = plan.global_batch / step
    dtype = computed_dtype(graph)
    if cluster is None:
        peak_flops = hardware.peak(dtype) * plan.devices
    else:
        peak_flops = sum(cluster.nodes[cluster.node_of(device)].peak(dtype) for device in range(plan.devices))
    prediction = Prediction(
        step_time_s=step,
        interval_s=(step * (1 - uncertainty.low), step * (1 + uncertainty.high)),
        label=uncertainty.label,
        samples_per_s=samples,
        tokens_per_s=None if plan.sequence_length is None else samples * plan.sequence_length,
        mfu=lowered.flops * plan.micro_batches / (step * peak_flops),
        peak_memory_bytes=needed,
        device_memory_bytes=limit,
        memory_at_peak=by_kind,
        breakdown={**parts, HOST: fixed_s} if fixed_s else parts,
        peak_rank=peak,
        p_fits=probability_to_fit(needed, limit, "tensors" if held is None else "software"),
        host_memory_bytes=host_memory_bytes(plan, graph, hardware.devices_per_node),
        host_limit_bytes=hardware.host_memory_bytes,
        software=plan.software,
        memory_figures={} if held is None else {str(kind): value for kind, value in held.figures().items()},
        start_s=start_s(plan, graph, hardware),
    )
    return SimulatedPlan(prediction=prediction, lowered=lowered, result=result, memory=memory)


def predict_plan(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Prediction:
    """Predict any plan; `graph` is the network, folded, at the plan's precision and any batch.

    Raises
    ------
    StrategyError
        The plan says something its network or schedule makes impossible.
    """
    return simulate_plan(plan, graph, hardware).prediction


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


def operator_run(found: SimulatedPlan) -> OperatorRun:
    """Run the step of a prediction once more, for when each task starts and ends."""
    schedule, costs = found.lowered.schedule, found.lowered.costs
    table, actions = operator_table(schedule, costs), task_actions(schedule, costs)
    times = fast_engine.run(table)
    memory = pipeline_memory(schedule, *action_times(schedule, table, times, actions), found.lowered.sizes)
    return OperatorRun(table=table, times=times, actions=actions, memory=memory)


def write_trace(found: SimulatedPlan, plan: Plan, path: str | Path) -> Path:
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
    tasks, seconds = found.lowered.work.tasks, found.lowered.work.seconds
    inside = (
        (operator, [(tasks[n], float(seconds[n])) for n in numbers]) for operator, numbers in operator_tasks(found, run)
    )
    return write_pipeline_trace(
        path, schedule, run.table, run.times, run.actions, run.memory, inside, description=description
    )


def operator_tasks(found: SimulatedPlan, run: OperatorRun) -> Iterator[tuple[int, Sequence[int]]]:
    """Tasks of `run` that are operators of passes, each with the numbers of what it runs; without pairs of passes."""
    schedule, lowered = found.lowered.schedule, found.lowered
    inside = np.flatnonzero((run.actions >= 0) & (run.table.label < STREAMS))
    order = inside[np.argsort(run.actions[inside], kind="stable")]
    first, last = (np.searchsorted(run.actions[order], np.arange(schedule.size), side) for side in ("left", "right"))
    variants, known = action_variants(schedule), dict[tuple[ActionKind, int, int], list[Sequence[int]]]()
    for action in schedule.leaders[~schedule.paired[schedule.leaders]].tolist():
        key = ActionKind(int(schedule.kind[action])), int(schedule.stage[action]), int(variants[action])
        if key not in known:
            one, rows = lowered.work.of_pass(*key), known.setdefault(key, [()] * (last[action] - first[action]))
            for row, numbers in zip(one.rows.tolist(), one.tasks, strict=True):
                rows[row] = numbers
        yield from zip(order[first[action] : last[action]].tolist(), known[key], strict=True)


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
    # A stage alone waits for nothing but messages.
    exposed = np.minimum(exposed, idle) if schedule.ranks > 1 else idle
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
