"""What `meshwright execute` prints of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.text import Text

from planner.cli.tables import (
    facts,
    plain_table,
)
from simulator.quantities import bytes_text, interval_text, seconds_text

if TYPE_CHECKING:
    from planner.execution.run import ExecutionReport


def execution_report(report: ExecutionReport, out: Path | None) -> Iterable[RenderableType]:
    """Everything `meshwright execute` prints."""
    time, predicted = report.measured_step_time_s, report.predicted_step_time_s
    yield Text(
        f"{report.steps} steps on {report.processes} processes ({report.backend}, {report.launcher}), "
        f"{report.precision}, {report.data}",
        style="bold",
    )
    table = plain_table(("", "text"), ("predicted", "number"), ("measured", "number"), ("difference", "number"))
    table.add_row(
        "step time",
        "" if predicted is None else seconds_text(predicted),
        f"{seconds_text(time.median)} ({interval_text(time.p10, time.p90)})",
        "" if report.error is None else f"{100 * report.error:+.1f} %",
    )
    at_this_speed, speed = report.predicted_at_this_speed_s, report.machine_speed
    if at_this_speed is not None and speed is not None and report.error_at_this_speed is not None:
        table.add_row(
            f"at this speed ({speed:.0%})",
            seconds_text(at_this_speed),
            "",
            f"{100 * report.error_at_this_speed:+.1f} %",
        )
    memory, measured = report.predicted_peak_memory_bytes, report.measured_peak_memory_bytes
    table.add_row(
        "peak memory",
        "" if memory is None else bytes_text(memory),
        bytes_text(measured),
        f"{100 * (memory / measured - 1):+.1f} %" if memory is not None and measured else "",
    )
    yield table
    pairs = [("losses", f"{report.losses[0]:.6g} at the first step, {report.losses[-1]:.6g} at the last")]
    if report.max_loss_difference is not None:
        pairs.append(
            (
                "verified",
                f"equal to one process within {report.max_loss_difference:.2g} (allowed {report.tolerance:.2g})",
            )
        )
    pairs.append(("memory", report.measured_memory_method))
    pairs += [("note", note) for note in report.notes]
    pairs.append(("written", str(out) if out else ""))
    yield facts(pairs)
