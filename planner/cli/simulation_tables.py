"""What `meshwright simulate` prints."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
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
    plain_table,
)
from planner.planning.summary import throughput
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from planner.planning.prediction import SimulatedPlan
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware


def simulation_report(
    plan: Plan, hardware: Hardware, found: SimulatedPlan, trace: Path | None
) -> Iterable[RenderableType]:
    """Everything `meshwright simulate` prints."""
    prediction, pipeline, peak_rank = found.prediction, "", ""
    if plan.pipeline * plan.virtual > 1:
        chunks = f", {plan.virtual} chunks each" if plan.virtual > 1 else ""
        pipeline = f"{plan.pipeline} ranks{chunks}, {found.lowered.schedule.name}"
        peak_rank = f", on pipeline rank {prediction.peak_rank}"
    step_time, interval = seconds_text(prediction.step_time_s), interval_text(*prediction.interval_s)
    yield Text(f"{plan.network} on {hardware.devices_text(plan.devices)} ({hardware.name})", style="bold")
    yield facts(
        [
            ("plan", f"{axes_text(plan)}, micro-batch {batch_text(plan)}"),
            ("pipeline", pipeline),
            ("step time", f"{step_time} ({interval}, {prediction.label})"),
            ("throughput", f"{rate_text(*throughput(prediction))}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(prediction.breakdown, prediction.step_time_s)),
            ("peak memory", f"{memory_text(prediction)}{peak_rank}"),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    if pipeline:
        yield Padding(_ranks(plan, found), (1, 0, 0, 0))
    operators = plain_table(
        ("operator", "text"), ("kernel", "text"), ("calls", "number"), ("time", "number"), ("share", "number")
    )
    for total in found.operators:
        name, share = _operator_text(total.name), percent_text(total.seconds / (found.work_s or 1.0))
        operators.add_row(Text(name), total.kernel, str(total.calls), seconds_text(total.seconds), share)
    yield Padding(operators, (1, 0, 0, 0))
    if found.collectives:
        collectives = plain_table(
            ("collective", "text"), ("axis", "text"), ("calls", "number"), ("payload", "number"), ("time", "number")
        )
        for message in found.collectives:
            collectives.add_row(
                str(message.collective),
                message.axis,
                str(message.calls),
                bytes_text(message.payload_bytes),
                seconds_text(message.seconds),
            )
        yield Padding(collectives, (1, 0, 0, 0))
    if trace is not None:
        yield Padding(facts([("written", str(trace))]), (1, 0, 0, 0))


def _operator_text(name: str) -> str:
    """The name of an operator; attention is captured on the host, and runs on the devices."""
    return name.replace("_scaled_dot_product_", "").replace("_for_cpu", "")


def _ranks(plan: Plan, found: SimulatedPlan) -> Table:
    """What every pipeline rank holds, and how long it works."""
    names = ("rank", "units", "computes", "idle", "peak memory")
    ranks = plain_table(*((name, "text" if name == "units" else "number") for name in names))
    for rank, memory in enumerate(found.memory):
        held = (f"{c.first} to {c.last}" if c.first != c.last else c.first for c in plan.chunks if c.rank == rank)
        ranks.add_row(
            str(rank),
            Text(", ".join(held)),
            seconds_text(float(found.result.compute_s[rank])),
            percent_text(float(found.result.bubble_s[rank]) / found.prediction.step_time_s),
            bytes_text(memory.peak_bytes),
        )
    return ranks
