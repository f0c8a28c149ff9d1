"""`meshwright execute --virtual`: the result as text and as a document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.cli.tables import facts, plain_table
from simulator.quantities import interval_text, percent_text, seconds_text

if TYPE_CHECKING:
    from planner.cli.terminal import Terminal
    from planner.execution.virtual.devices import VirtualOptions, VirtualReport


def run_virtually(
    terminal: Terminal, strategy: Path, processes: int | None, options: VirtualOptions, out: Path | None
) -> None:
    """Run a strategy file on virtual devices, show what came of it and write it."""
    from planner.execution.launch.starting import check_processes
    from planner.execution.virtual.devices import run_virtual
    from planner.plans.file import read_plan

    plan = read_plan(strategy)
    check_processes(plan, processes)
    with terminal.working(f"running {strategy} on {plan.devices} virtual devices"):
        report = run_virtual(plan, options)
    terminal.result(asdict(report), f"{report.measured_step_time_s!r}", lambda: virtual_report(report, out), out)


def virtual_report(report: VirtualReport, out: Path | None) -> Iterable[RenderableType]:
    """Everything that is printed."""
    yield Text(f"{report.steps} steps on {report.processes} virtual devices", style="bold")
    names = ("", "simulated", "measured", "difference")
    table = plain_table(*((name, "number" if name else "text") for name in names))
    span = interval_text(min(report.step_times_s), max(report.step_times_s))
    table.add_row(
        "step time",
        seconds_text(report.predicted_step_time_s),
        f"{seconds_text(report.measured_step_time_s)} ({span})",
        f"{100 * report.error:+.1f} %",
    )
    table.add_row(
        "without this machine's delays",
        seconds_text(report.predicted_step_time_s),
        seconds_text(report.undelayed_step_time_s),
        f"{100 * report.undelayed_error:+.1f} %",
    )
    yield Padding(table, (1, 0, 1, 0))
    slow = [f"rank {rank}: {factor:.2f} × as long" for rank, factor in report.slow_ranks.items()]
    slow += [f"{level}: {percent_text(share)} of its bandwidth" for level, share in report.slow_links.items()]
    disturbed = bool(report.slow_ranks or report.slow_links)
    yield facts([
        ("slow", ", ".join(slow)),
        ("undisturbed", f"{seconds_text(report.undisturbed_step_time_s)}, simulated" if disturbed else ""),
        ("clock", f"{report.stretch:g} s for one of the devices; a message really takes "
         f"{seconds_text(report.message_s)}, a rank sends up to {report.messages:,}"),
        ("written", str(out) if out else ""),
    ])  # fmt: skip
