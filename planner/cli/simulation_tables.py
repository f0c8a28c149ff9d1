"""What `meshwright simulate` prints of a plan with one stage."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.cli.tables import (
    axes_text,
    batch_text,
    breakdown_text,
    facts,
    memory_kinds_text,
    memory_text,
    plain_table,
    throughput,
)
from simulator.quantities import bytes_text, interval_text, percent_text, rate_text, seconds_text

if TYPE_CHECKING:
    from planner.planning.planning import Prediction
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware
    from simulator.program import Program
    from simulator.timeline import Timeline


def simulation_report(
    plan: Plan, hardware: Hardware, prediction: Prediction, timeline: Timeline, program: Program, trace: Path | None
) -> Iterable[RenderableType]:
    """Everything `meshwright simulate` prints."""
    from simulator.timeline import top_operators

    yield Text(f"{plan.network} on {plan.devices} × {hardware.device_name} ({hardware.name})", style="bold")
    yield facts(
        [
            ("plan", f"{axes_text(plan)}, micro-batch {batch_text(plan)}"),
            (
                "step time",
                f"{seconds_text(timeline.step_time_s)} ({interval_text(*prediction.interval_s)}, {prediction.label})",
            ),
            ("throughput", f"{rate_text(*throughput(prediction))}, MFU {percent_text(prediction.mfu)}"),
            ("time", breakdown_text(timeline.breakdown, timeline.step_time_s)),
            ("peak memory", memory_text(prediction)),
            ("memory", memory_kinds_text(prediction.memory_at_peak)),
        ]
    )
    numbers = (("calls", "right"), ("time", "right"), ("share", "right"))
    operators = plain_table(("operator", ""), ("kernel", ""), *numbers)
    operators.columns[0].no_wrap, operators.columns[0].overflow = False, "fold"
    for total in top_operators(timeline, program):
        operators.add_row(
            Text(total.name), total.kernel, str(total.calls), seconds_text(total.seconds), percent_text(total.share)
        )
    yield Padding(operators, (1, 0, 0, 0))
    if timeline.collectives:
        collectives = plain_table(
            ("collective", ""), ("axis", ""), ("calls", "right"), ("payload", "right"), ("time", "right")
        )
        for message in timeline.collectives:
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
