"""Tables of built-in networks and hardware profiles, of calibrations, and of the accuracy of predictions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.cli.tables import facts, plain_table
from simulator.quantities import bytes_text, percent_text, rate_text

if TYPE_CHECKING:
    from planner.networks import NetworkSummary
    from planner.published.metrics import Accuracy, AccuracyResult, Metrics
    from simulator.calibration.fit_profiles import ProfileFit
    from simulator.calibration.from_run import Corrected
    from simulator.hardware import Hardware


def network_table(networks: Sequence[NetworkSummary]) -> Table:
    """The built-in networks."""
    table = plain_table(
        ("network", "name"), ("family", "name"), ("parameters", "number"), ("batch", "number"), ("sequence", "number"),
        ("what it is", "text"),
    )  # fmt: skip
    for network in networks:
        table.add_row(
            network.spec,
            network.family,
            count_text(network.parameters),
            str(network.default_global_batch),
            str(network.default_sequence_length or ""),
            network.description,
        )
    return table


def count_text(count: int) -> str:
    """A count with three figures, such as ``25.6 M``; ``B`` is 10⁹."""
    return rate_text(float(count), "").removesuffix("/s").strip().replace("G", "B")


def profile_table(profiles: Sequence[Hardware]) -> Table:
    """The built-in profiles."""
    table = plain_table(
        ("profile", "name"),
        ("memory", "number"),
        ("per\nnode", "number"),
        ("at\nmost", "number"),
        ("what it is", "text"),
    )
    for hardware in profiles:
        table.add_row(
            hardware.name,
            bytes_text(hardware.device_memory_bytes),
            str(hardware.devices_per_node),
            str(hardware.max_devices),
            hardware.description.partition(". ")[0].removesuffix("."),
        )
    return table


def profile_details(hardware: Hardware) -> Iterable[RenderableType]:
    """Every number of a profile with its source."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    yield Text(f"hash {hardware.hash}")
    yield _sources_table((row.field, row.value, row.source) for row in hardware.rows)


def _sources_table(rows: Iterable[tuple[str, str, str]]) -> Table:
    """Numbers with their sources; what a source says several times it says once here."""
    table = plain_table(("field", "text"), ("value", "text"), ("source", "text"))
    for field, value, source in rows:
        table.add_row(Text(field), Text(value), Text("; ".join(dict.fromkeys(source.split("; ")))))
    return table


def software_table(found: Sequence[dict[str, Any]]) -> Table:
    """The software that plans are predicted for."""
    table = plain_table(("software", "name"), ("usual for", "text"), ("what it is", "text"))
    for one in found:
        usual = "; ".join(f"{family}: {', '.join(kinds)}" for family, kinds in one["usual_for"].items())
        table.add_row(one["name"], usual, one["title"])
    return table


def software_details(found: dict[str, Any], rows: Sequence[dict[str, str]]) -> Iterable[RenderableType]:
    """Every number of software with its source."""
    yield Text(f"{found['name']}: {found['title']}", style="bold")
    yield _sources_table((row["field"], row["value"], row["source"]) for row in rows)


def calibration_report(hardware: Hardware, path: str) -> Iterable[RenderableType]:
    """Summary of what `meshwright calibrate` measured."""
    yield Text(f"{hardware.name}: {hardware.description}", style="bold")
    peaks = ", ".join(
        f"{dtype} {rate_text(flops, '').removesuffix(' /s')}FLOP/s"
        for dtype, flops in sorted(hardware.peak_flops.items(), reverse=True)
    )
    spread = hardware.uncertainty
    yield facts(
        [
            ("peak", peaks),
            ("memory", f"{bytes_text(hardware.device_memory_bytes)} at {bytes_text(hardware.memory_bandwidth)}/s"),
            (
                "collectives",
                ", ".join(f"{table.collective} × {table.group_size}" for table in hardware.collective_tables),
            ),
            (
                "slow-down",
                ", ".join(f"{n} process{'es' * (n > 1)} {factor:.2f}" for n, factor in hardware.slowdown_table),
            ),
            ("interval", f"−{percent_text(spread.low)} to +{percent_text(spread.high)} ({spread.label})"),
            ("warning", hardware.conditions.warning if hardware.conditions else ""),
            ("written", path),
        ]
    )


def fitted_report(fit: ProfileFit, path: str) -> Iterable[RenderableType]:
    """Numbers that `meshwright calibrate --from-measurements` fitted for one profile."""
    yield Text(f"{fit.profile}: {len(fit.fields)} numbers written to {path}", style="bold")
    table = plain_table(
        ("fit", "text"), ("rows", "number"), ("median error", "number"), ("p90", "number"), ("before", "number")
    )
    for part in fit.fits:
        before = " / ".join(percent_text(error) for error in part.errors_before or ())
        median, tail = part.errors
        table.add_row(part.name, str(len(part.ratios)), percent_text(median), percent_text(tail), before)
    yield table


def correction_report(found: Corrected) -> Iterable[RenderableType]:
    """Everything `meshwright calibrate --from-run` prints."""
    yield Text(f"corrected by {' and '.join(found.runs)}", style="bold")
    names = ("", "sizes", "fixed cost", "the rest", "error before", "after")
    table = plain_table(*((name, "number" if name else "text") for name in names))
    for one in found.corrections:
        table.add_row(
            one.name,
            str(one.rows),
            "" if one.fixed is None else f"× {one.fixed:.2f}",
            f"× {one.rest:.2f}",
            percent_text(one.before),
            percent_text(one.after),
        )
    yield Padding(table, (1, 0, 1, 0))
    yield facts([("written", str(found.path))])


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
    yield _table(parts, _TIMES)
    yield Text("\nmemory, and choosing among a workload's plans", style="bold")
    others = {name: one for name, one in parts.items() if one.memory_rows or one.oom_rows or one.workloads}
    yield _table(others, _OTHERS)


_TIMES: Mapping[str, Callable[[Metrics], str]] = {
    "rows": lambda one: str(one.rows),
    "with a\nprediction": lambda one: percent_text(one.coverage),
    "timed": lambda one: str(one.timed),
    "mean\nerror": lambda one: _share(one.time_mean),
    "\nmedian": lambda one: _share(one.time_median),
    "\np90": lambda one: _share(one.time_p90),
    "\nmax": lambda one: _share(one.time_max),
    "\nbias": lambda one: _signed(one.time_bias),
    "inside\ninterval": lambda one: _share(one.inside_interval),
}
_OTHERS: Mapping[str, Callable[[Metrics], str]] = {
    "memory\nrows": lambda one: str(one.memory_rows),
    "mean\nerror": lambda one: _share(one.memory_mean),
    "\nbias": lambda one: _signed(one.memory_bias),
    "out of\nmemory": lambda one: str(one.oom_rows),
    "\nrecall": lambda one: _share(one.oom_recall),
    "\nprecision": lambda one: _share(one.oom_precision),
    "work-\nloads": lambda one: str(one.workloads),
    "Kendall\ntau": lambda one: _NOTHING if one.kendall_tau is None else f"{one.kendall_tau:.2f}",
    "\nregret": lambda one: _share(one.regret),
}


def _table(parts: Mapping[str, Metrics], columns: Mapping[str, Callable[[Metrics], str]]) -> Table:
    table = plain_table()
    table.add_column("\nsource", max_width=_SOURCE_WIDTH, overflow="fold")
    for heading in columns:
        table.add_column(heading if "\n" in heading else f"\n{heading}", justify="right", no_wrap=True)
    for name, figures in parts.items():
        table.add_row(name, *(cell(figures) for cell in columns.values()))
    return table


def _share(value: float | None) -> str:
    return _NOTHING if value is None else percent_text(value)


def _signed(value: float | None) -> str:
    return _NOTHING if value is None else f"{'+' if value > 0 else '−' if value < 0 else ''}{percent_text(abs(value))}"
