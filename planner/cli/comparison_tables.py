"""Why a prediction was off, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table

from planner.cli.tables import facts, plain_table, signed
from simulator.quantities import percent_text, seconds_text

if TYPE_CHECKING:
    from planner.execution.measuring.comparing import Comparison, ErrorRow

NAMED = 3
"""So many rows are named as the reasons."""
NEGLIGIBLE = 0.01
"""A row below this part of the step is no reason."""


def comparison_report(comparison: Comparison, trace: Path | None) -> Iterable[RenderableType]:
    """What `meshwright execute --measure` prints beneath the result."""
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
