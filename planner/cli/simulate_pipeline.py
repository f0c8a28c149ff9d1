"""`meshwright simulate` on a plan with pipeline stages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.terminal import Terminal

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.cli.simulate import Simulation
    from planner.lowering.pipeline import PassTasks
    from planner.planning.goodput import PlanGoodput, StraggledStep
    from planner.planning.pipeline_prediction import PipelinePrediction
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware
    from simulator.schedules import Schedule

_SHOWN = 10


def simulate_pipeline_plan(terminal: Terminal, asked: Simulation, schedule_file: Path | None) -> None:
    """Simulate one step of a pipeline and print what it does, with what was asked of slow ranks and failures.

    ``schedule_file`` orders the passes of each rank instead of the plan's schedule.
    """
    from planner.cli.reliability import reliability_document, reliability_report
    from planner.planning.loading import predict_pipeline_strategy
    from planner.planning.pipeline_prediction import write_trace
    from simulator import engine as reference
    from simulator.schedules.exchange import parse_schedule_csv

    plan, hardware = asked.plan, asked.hardware
    schedule = None if schedule_file is None else parse_schedule_csv(schedule_file)
    with terminal.working(f"simulating {plan.network} on {plan.devices} devices"):
        run = reference.run if asked.engine == "reference" else None
        found = predict_pipeline_strategy(plan, asked.strategy, hardware, schedule, run, asked.cluster)
        if asked.trace is not None:
            write_trace(found, plan, asked.trace)
        straggled, kept = _reliability(asked, found, schedule)
    prediction = found.prediction
    document = _document(asked, found) | reliability_document(prediction, straggled, kept, asked.seed)

    def report() -> Iterator[RenderableType]:
        yield from _report(plan, hardware, found, asked.trace)
        yield from reliability_report(prediction, straggled, kept, asked.seed)

    terminal.result(document, f"{prediction.step_time_s!r}", report)


def _reliability(
    asked: Simulation, found: PipelinePrediction, schedule: Schedule | None
) -> tuple[StraggledStep | None, PlanGoodput | None]:
    from planner.lowering.checked import checked_graph
    from planner.lowering.pipeline import lower_pipeline
    from planner.planning.goodput import pipeline_checkpoint_bytes
    from planner.planning.loading import naming
    from planner.planning.pipeline_stragglers import straggle_pipeline

    plan, hardware, extra = asked.plan, asked.hardware, asked.extra
    if extra.slow is None and extra.job is None:
        return None, None
    with naming(asked.strategy):
        graph = checked_graph(plan)
    straggled = kept = None
    if extra.slow is not None:
        straggled = straggle_pipeline(
            plan,
            hardware,
            lambda cluster: lower_pipeline(plan, graph, cluster, schedule),
            slow_ranks=extra.slow.ranks or 0,
            slowdown=extra.slow.factor,
            slow_links=extra.slow.links,
            seed=extra.slow.seed,
        )
    if extra.job is not None:
        size = pipeline_checkpoint_bytes(plan, graph, hardware.devices_per_node)
        kept = extra.job.goodput(size, plan.devices, hardware, found.prediction.step_time_s)
    return straggled, kept


def _operators(work: PassTasks, counts: Any) -> list[dict[str, Any]]:
    """Calls and seconds of operators on all pipeline ranks, most seconds first; layers count together."""
    totals: dict[tuple[str, str], list[float]] = {}
    for task, times, seconds in zip(work.tasks, counts.tolist(), work.seconds.tolist(), strict=True):
        if times and task.collective is None:
            key = re.sub(r"(?<=\.)\d+(?=\.)", "*", task.name), task.kernel.value
            total = totals.setdefault(key, [0.0, 0.0])
            total[0] += times
            total[1] += times * seconds
    ranked = sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))[:_SHOWN]
    return [
        {"name": name, "kernel": kernel, "calls": round(calls), "seconds": seconds}
        for (name, kernel), (calls, seconds) in ranked
    ]


def _collectives(work: PassTasks, counts: Any) -> list[dict[str, Any]]:
    totals: dict[tuple[str, str], list[float]] = {}
    for task, times, seconds in zip(work.tasks, counts.tolist(), work.seconds.tolist(), strict=True):
        if times and task.collective is not None:
            total = totals.setdefault((task.axis, task.collective.value), [0.0, 0.0, 0.0])
            total[0] += times
            total[1] += times * task.payload_bytes
            total[2] += times * seconds
    return [
        {"collective": name, "axis": axis, "calls": round(calls), "payload_bytes": payload, "seconds": seconds}
        for (axis, name), (calls, payload, seconds) in sorted(totals.items())
    ]


def _document(asked: Simulation, found: PipelinePrediction) -> dict[str, Any]:
    from planner.planning.documents import plan_document, prediction_document

    work = found.lowered.work
    counts = work.counts(found.lowered.schedule)
    return {
        "strategy_file": str(asked.strategy),
        "network": asked.plan.network,
        "hw": asked.hardware.name,
        "engine": str(asked.engine),
        "step_time_s": found.prediction.step_time_s,
        "prediction": prediction_document(found.prediction),
        "plan": plan_document(asked.plan, asked.hardware),
        "ranks": [
            {
                "rank": rank,
                "peak_memory_bytes": int(memory.peak_bytes),
                "compute_s": float(found.result.compute_s[rank]),
                "idle_s": float(found.result.bubble_s[rank]),
            }
            for rank, memory in enumerate(found.memory)
        ],
        "collectives": _collectives(work, counts),
        "operators": _operators(work, counts),
        "trace": None if asked.trace is None else str(asked.trace),
    }


def _report(plan: Plan, hardware: Hardware, found: PipelinePrediction, trace: Path | None) -> Iterable[RenderableType]:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from planner.cli.tables import (
        axes_text,
        batch_text,
        breakdown_text,
        facts,
        memory_kinds_text,
        memory_text,
        throughput,
    )
    from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text

    prediction, schedule = found.prediction, found.lowered.schedule
    yield Text(f"{plan.network} on {plan.devices} × {hardware.device_name} ({hardware.name})", style="bold")
    chunks = f", {plan.virtual} chunks each" if plan.virtual > 1 else ""
    yield facts(
        [
            ("plan", f"{axes_text(plan)}, micro-batch {batch_text(plan)}"),
            ("pipeline", f"{plan.pipeline} ranks{chunks}, {schedule.name}"),
            (
                "step time",
                f"{seconds_text(prediction.step_time_s)} ({interval_text(*prediction.interval_s)}, {prediction.label})",
            ),
            ("throughput", f"{rate_text(*throughput(prediction))}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(prediction.breakdown, prediction.step_time_s)),
            ("peak memory", f"{memory_text(prediction)}, on pipeline rank {prediction.peak_rank}"),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    ranks = Table(box=None, pad_edge=False)
    for name in ("rank", "units", "computes", "idle", "peak memory"):
        ranks.add_column(name, justify="right" if name != "units" else "left")
    for rank, memory in enumerate(found.memory):
        held = (f"{c.first} … {c.last}" if c.first != c.last else c.first for c in plan.chunks if c.rank == rank)
        ranks.add_row(
            str(rank),
            Text(", ".join(held)),
            seconds_text(float(found.result.compute_s[rank])),
            percent_text(float(found.result.bubble_s[rank]) / prediction.step_time_s),
            bytes_text(memory.peak_bytes),
        )
    yield Padding(ranks, (1, 0, 0, 0))
    if trace is not None:
        yield Padding(facts([("written", str(trace))]), (1, 0, 0, 0))
