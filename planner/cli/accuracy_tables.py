"""How far off predictions are, as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from planner.cli.tables import plain_table
from planner.published.metrics import Accuracy, AccuracyResult, Metrics
from simulator.quantities import percent_text

_SOURCE_WIDTH = 34
_NOTHING = "–"


def accuracy_report(result: AccuracyResult, predictions: str | None) -> Iterable[RenderableType]:
    """Everything `meshwright validate` prints for people."""
    skipped = sum(row.status == "skipped" for row in result.fitted.rows)
    wrong = sum(row.status == "error" for row in result.fitted.rows)
    rows = len(result.fitted.rows)
    yield Text(f"{rows} rows: {rows - skipped - wrong} predicted, {skipped} skipped, {wrong} in error", style="bold")
    unread = sum(bool(row.not_read) for row in result.fitted.rows)
    if unread:
        yield Text(
            f"{unread} rows have words that are not read, and one prediction for several times: see their reasons"
        )
    yield from _accuracy_tables(result.fitted)
    if result.left_out is not None:
        yield Text("\nleaving one source out: each source predicted by a fit that never saw it", style="bold")
        yield from _accuracy_tables(result.left_out)
    if predictions:
        yield Text(f"\nwritten {predictions}")


def _accuracy_tables(accuracy: Accuracy) -> Iterable[RenderableType]:
    parts = {"all": accuracy.overall, **accuracy.by_source}
    yield Text("\ntime of a step", style="bold")
    yield _time_table(parts)
    yield Text("\nmemory, and choosing among a workload's plans", style="bold")
    yield _other_table(parts)


def _time_table(parts: Mapping[str, Metrics]) -> Table:
    table = _table(
        "rows", "with a\nprediction", "timed", "mean\nerror", "\nmedian", "\np90", "\nmax", "\nbias", "inside\ninterval"
    )
    for name, figures in parts.items():
        table.add_row(
            name,
            str(figures.rows),
            percent_text(figures.coverage),
            str(figures.timed),
            *(_share(value) for value in (figures.time_mean, figures.time_median, figures.time_p90, figures.time_max)),
            _signed(figures.time_bias),
            _share(figures.inside_interval),
        )
    return table


def _other_table(parts: Mapping[str, Metrics]) -> Table:
    table = _table(
        "memory\nrows",
        "mean\nerror",
        "\nbias",
        "out of\nmemory",
        "\nrecall",
        "\nprecision",
        "work-\nloads",
        "Kendall\ntau",
        "\nregret",
    )
    for name, figures in parts.items():
        if not (figures.memory_rows or figures.oom_rows or figures.workloads):
            continue
        table.add_row(
            name,
            str(figures.memory_rows),
            _share(figures.memory_mean),
            _signed(figures.memory_bias),
            str(figures.oom_rows),
            _share(figures.oom_recall),
            _share(figures.oom_precision),
            str(figures.workloads),
            _NOTHING if figures.kendall_tau is None else f"{figures.kendall_tau:.2f}",
            _share(figures.regret),
        )
    return table


def _table(*headings: str) -> Table:
    table = plain_table()
    table.add_column("\nsource", max_width=_SOURCE_WIDTH, overflow="fold")
    for heading in headings:
        table.add_column(heading if "\n" in heading else f"\n{heading}", justify="right", no_wrap=True)
    return table


def _share(value: float | None) -> str:
    return _NOTHING if value is None else percent_text(value)


def _signed(value: float | None) -> str:
    return _NOTHING if value is None else f"{'+' if value > 0 else '−' if value < 0 else ''}{percent_text(abs(value))}"
