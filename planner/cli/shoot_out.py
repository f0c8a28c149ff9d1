"""`meshwright execute --top K`: the result as text and as a document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.cli.tables import axes_text, facts, plain_table
from planner.plans.file import read_plan
from simulator.quantities import interval_text, percent_text, seconds_text

if TYPE_CHECKING:
    from planner.cli.terminal import Terminal
    from planner.execution.measuring.shoot_out import Outcome, ShootOut
    from planner.execution.options import ExecuteOptions


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
