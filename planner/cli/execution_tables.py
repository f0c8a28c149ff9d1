"""What `meshwright execute` prints of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.cli.tables import axes_text, facts, plain_table, signed
from planner.plans.file import read_plan
from simulator.quantities import bytes_text, interval_text, percent_text, seconds_text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from planner.cli.terminal import Terminal
    from planner.execution.launch.dry_run import DryRun, MessageLine, RankLine
    from planner.execution.measuring.comparing import Comparison, ErrorRow
    from planner.execution.measuring.shoot_out import Outcome, ShootOut
    from planner.execution.options import ExecuteOptions
    from planner.execution.run import ExecutionReport
    from planner.execution.virtual.devices import VirtualOptions, VirtualReport


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


NAMED = 3
"""Rows that are named as reasons, at most."""
NEGLIGIBLE = 0.01
"""A row below this part of the step is no reason."""


def comparison_report(comparison: Comparison, trace: Path | None) -> Iterable[RenderableType]:
    """Comparison that `meshwright execute --measure` prints beneath the result."""
    yield Padding(error_table(comparison), (1, 0, 1, 0))
    whole = sum(row.measured_s for row in comparison.errors)
    recorded = (
        f"{comparison.recorded_steps} steps of {seconds_text(comparison.recorded_step_time_s)} "
        "with every instruction clocked"
    )
    yield facts([
        ("why", reasons(comparison.errors, whole)),
        ("clocks", recorded),
        ("trace", "" if trace is None else f"{trace}, for https://ui.perfetto.dev"),
    ])  # fmt: skip


def error_table(comparison: Comparison) -> Table:
    """Predicted and measured seconds of a step by class of work; they add up to the step."""
    names = ("", " ", "calls", "predicted", "measured", "without\na core", "measured\nmore", "of the\nstep")
    table = plain_table(*((name, "number" if name.strip() else "text") for name in names))
    whole = sum(row.measured_s for row in comparison.errors) or 1.0
    kind = ""
    for row in comparison.errors:
        table.add_row(
            row.kind if row.kind != kind else "",
            row.name,
            f"{row.calls:,.0f}" if row.calls else "",
            seconds_text(row.predicted_s),
            seconds_text(row.measured_s),
            seconds_text(row.without_core_s) if row.without_core_s >= NEGLIGIBLE * whole else "",
            signed(row.difference_s, seconds_text),
            _signed_percent(row.difference_s / whole),
        )
        kind = row.kind
    predicted = sum(row.predicted_s for row in comparison.errors)
    more = whole - predicted
    table.add_row("step", "", "", seconds_text(predicted), seconds_text(whole), "", signed(more, seconds_text),
                  _signed_percent(more / whole), style="bold")  # fmt: skip
    return table


def reasons(errors: Iterable[ErrorRow], measured_s: float) -> str:
    """In words: which classes of work took longer, and which shorter, than was predicted."""
    ranked = sorted(errors, key=lambda row: -abs(row.difference_s))
    named = [row for row in ranked if abs(row.difference_s) >= NEGLIGIBLE * measured_s][:NAMED]
    if not named:
        return "every class of work took what was predicted, within 1 % of the step"
    parts = [
        f"{row.name} took {seconds_text(abs(row.difference_s))} {'longer' if row.difference_s > 0 else 'less'} "
        f"({percent_text(abs(row.difference_s) / measured_s)} of the step)"
        for row in named
    ]
    return "; ".join(parts)


def _signed_percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


SHOWN_RANKS = 64
SHOWN_PASSES = 12
SHOWN_MEMBERS = 8


def dry_run_report(found: DryRun) -> Iterable[RenderableType]:
    """Everything that a dry run prints: the job, then rank after rank."""
    yield Text(
        f"would train steps {found.first_step} to {found.steps - 1} on {found.processes} processes ({found.backend}), "
        f"{found.precision}, {found.data}, {found.micro_batches} micro-batches a step",
        style="bold",
    )
    time, memory = found.predicted_step_time_s, found.predicted_peak_memory_bytes
    pairs = [
        ("step time", "" if time is None else f"{seconds_text(time)} predicted"),
        ("peak memory", "" if memory is None else f"{bytes_text(memory)} predicted"),
        ("refused here", found.refused or ""),
        *(("note", note) for note in found.notes),
    ]
    yield facts(pairs)
    for line in found.ranks[:SHOWN_RANKS]:
        yield from _rank(line)
    if len(found.ranks) > SHOWN_RANKS:
        yield Text(f"… and {len(found.ranks) - SHOWN_RANKS} more ranks; --json has all of them")


def _rank(line: RankLine) -> Iterator[RenderableType]:
    place = ", ".join(f"{axis} {at}" for axis, at in line.place.items())
    yield Text(f"\nrank {line.rank}" + (f" ({place})" if place else ""), style="bold")
    pairs = [
        ("stages", ", ".join(map(str, line.stages))),
        ("passes", _passes(line.passes)),
        ("holds", f"{line.parameters} parameters, {bytes_text(line.parameter_bytes)}"),
        ("loads", ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in line.inputs.items())),
    ]
    pairs += [(collective, _message(one)) for collective, ones in groupby(line.messages, _kind) for one in ones]
    yield facts(pairs)


def _kind(message: MessageLine) -> str:
    return message.collective


def _message(message: MessageLine) -> str:
    members = ", ".join(map(str, message.group[:SHOWN_MEMBERS]))
    rest = f", … ({len(message.group)} ranks)" if len(message.group) > SHOWN_MEMBERS else ""
    calls = f"{message.count} time{'s' if message.count > 1 else ''} a step"
    return f"{calls}, {bytes_text(message.total_bytes)} in all, {message.axis}: ranks {members}{rest}"


def _passes(passes: tuple[str, ...]) -> str:
    shown = " ".join(passes[:SHOWN_PASSES])
    return shown + (f" … ({len(passes)})" if len(passes) > SHOWN_PASSES else "")


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


def run_shoot_out(terminal: Terminal, strategy: Path, top: int, options: ExecuteOptions, out: Path | None) -> None:
    """Run the best plans, show what came of them and write it."""
    from planner.execution.measuring.shoot_out import shoot_out
    from simulator.errors import ExecutionError

    with terminal.working(f"running the best {top} plans of {strategy}") as say:
        found = shoot_out(strategy, top, options, say)
    fastest = next((one.strategy for one in measured_order(found.outcomes)), "")
    terminal.result(shoot_out_document(found), fastest, lambda: shoot_out_report(found, out), out)
    if all(one.error for one in found.outcomes):
        raise ExecutionError(f"none of the {top} plans could be run; the first failed with: {found.outcomes[0].error}")


def shoot_out_document(found: ShootOut) -> dict[str, Any]:
    """The document of ``execute --top K --json``."""
    order = [one.strategy for one in measured_order(found.outcomes)]
    return {
        "steps": found.steps,
        "kendall_tau": found.kendall_tau,
        "regret": found.regret,
        "predicted_order": [one.strategy for one in found.outcomes],
        "measured_order": order,
        "plans": [asdict(one) | {"status": "failed" if one.error else "ok"} for one in found.outcomes],
        "resumed": found.resumed,
    }


def measured_order(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The plans that ran, fastest first."""
    ran = [(one.measured_step_time_s, one) for one in outcomes if one.measured_step_time_s is not None]
    return [one for _, one in sorted(ran, key=lambda pair: pair[0])]


def shoot_out_report(found: ShootOut, out: Path | None) -> Iterable[RenderableType]:
    """Everything that is printed."""
    yield Text(f"{len(found.outcomes)} plans, {found.steps} steps each, predicted best first", style="bold")
    names = ("", "plan", "predicted", "measured", "difference", "measured\nrank")
    table = plain_table(*((name, "text" if name in ("", "plan") else "number") for name in names))
    order = [one.strategy for one in measured_order(found.outcomes)]
    for number, one in enumerate(found.outcomes, 1):
        predicted, measured = one.predicted_step_time_s, one.measured_step_time_s
        text = "failed"
        if measured is not None and one.measured_p10_s is not None and one.measured_p90_s is not None:
            text = f"{seconds_text(measured)} ({interval_text(one.measured_p10_s, one.measured_p90_s)})"
        table.add_row(
            str(number),
            axes_text(read_plan(one.strategy)),
            "" if predicted is None else seconds_text(predicted),
            text,
            "" if predicted is None or measured is None else f"{100 * (predicted / measured - 1):+.1f} %",
            str(order.index(one.strategy) + 1) if one.strategy in order else "",
        )
    yield Padding(table, (1, 0, 1, 0))
    resumed = f"{found.resumed} plan{'s' * (found.resumed > 1)} from the interrupted run"
    yield facts([
        ("Kendall tau", "" if found.kendall_tau is None else f"{found.kendall_tau:.2f}"),
        ("regret", "" if found.regret is None else f"{percent_text(found.regret)}: the plan predicted best over the "
         "fastest"),
        *((f"failed: {one.strategy}", one.error) for one in found.outcomes if one.error),
        ("resumed", resumed if found.resumed else ""),
        ("written", str(out) if out else ""),
    ])  # fmt: skip
