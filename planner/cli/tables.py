"""Pieces that what commands print has in common: readable at any width from 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from simulator.quantities import bytes_text, percent_text

if TYPE_CHECKING:
    from planner.planning.planning import Prediction
    from planner.plans.plan import Plan

Kind = Literal["text", "name", "number"]

BREAKDOWN_NAMES = {
    "compute_s": "compute",
    "exposed_communication_s": "exposed communication",
    "bubble_s": "idle",
    "optimizer_s": "optimizer",
    "host_s": "host",
}


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values, one pair a line; pairs without a value are left out."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(value))
    return table


def plain_table(*columns: tuple[str, Kind], title: str | None = None) -> Table:
    """A table without lines; a column is its heading and what its cells are.

    Where room is short, only cells of text fold. Numbers and names stay whole, since a folded one is misread or cannot
    be copied.
    """
    table = Table(
        box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0), collapse_padding=True, title=title,
        title_justify="left", title_style="bold",
    )  # fmt: skip
    for heading, kind in columns:
        table.add_column(
            heading, justify="right" if kind == "number" else "left", overflow="fold", no_wrap=kind != "text"
        )
    return table


def signed(value: float, text: Callable[[float], str]) -> str:
    """A difference, with its sign."""
    return f"{'+' if value >= 0 else '−'}{text(abs(value))}"


def mesh_text(plan: Plan) -> str:
    """Ranks with batches of their own, size of the tensor axis, and pipeline stages where there are several."""
    stages = f" × {plan.pipeline}" if plan.pipeline > 1 else ""
    return f"{plan.degree('data') * plan.degree('expert')} × {plan.degree('tensor')}{stages}"


def axes_text(plan: Plan) -> str:
    """The axes of one plan in words."""
    stages = f" × stages {plan.pipeline}" if plan.pipeline > 1 else ""
    return f"data {plan.degree('data') * plan.degree('expert')} × tensor {plan.degree('tensor')}{stages}"


def batch_text(plan: Plan) -> str:
    """Samples of a micro-batch on one data-parallel rank times micro-batches."""
    return f"{plan.micro_batch} × {plan.micro_batches}"


def memory_text(prediction: Prediction) -> str:
    """Peak memory against the device's."""
    return f"{bytes_text(prediction.peak_memory_bytes)} of {bytes_text(prediction.device_memory_bytes)}"


def memory_kinds_text(kinds: Mapping[str, int]) -> str:
    """What stands in memory at the peak, largest first."""
    ordered = sorted(((size, str(kind)) for kind, size in kinds.items() if size), key=lambda item: (-item[0], item[1]))
    return ", ".join(f"{kind.replace('_', ' ')} {bytes_text(size)}" for size, kind in ordered) or "empty"


def breakdown_text(breakdown: Mapping[str, float], whole: float) -> str:
    """Where the time of a step goes, in per cent."""
    return ", ".join(
        f"{BREAKDOWN_NAMES.get(part, part)} {percent_text(seconds / (whole or 1.0))}"
        for part, seconds in breakdown.items()
    )
