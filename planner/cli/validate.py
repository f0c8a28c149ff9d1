"""`meshwright validate`."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import check_out, option, tells
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.published.metrics import AccuracyResult, Metrics, ScoredRow
    from planner.published.reading import MeasuredRow

_SHOWN_FAULTS = 20


@tells
def validate(
    terminal: Terminal,
    measurements: Annotated[list[Path], typer.Argument(metavar="MEASUREMENTS.csv...", help="Measured training runs.")],
    out: Annotated[Path | None, option("--out", "The predictions, one row each.", "FILE")] = None,
    report: Annotated[Path | None, option("--report", "A page of figures and pictures, in this folder.", "DIR")] = None,
    leave_one_source_out: Annotated[
        bool,
        option(
            "--leave-one-source-out",
            "Fit anew without each source, too, and predict it by that fit: what strangers can expect. Minutes.",
        ),
    ] = False,
    commands: Annotated[
        Path | None, option("--commands", "The command `meshwright plan …` of every row, one row each.", "FILE")
    ] = None,
) -> None:
    """Predict measured runs from their configurations alone, and say how far off the predictions are.

    \b
    Example:
      meshwright validate runs.csv --out predictions.csv
    The command of every row that gives the same prediction, alone
      meshwright validate runs.csv --commands commands.csv
    The accuracy report: index.html, its figures as metrics.json, and predictions.csv
      meshwright validate measurements/*.csv --leave-one-source-out --report accuracy

    Every row gets a status: ok, skipped (the reason says which fact is missing) or error (the row is wrong: the
    reason names file, line and column).
    """
    from planner.published.metrics import AccuracyResult, accuracy_of
    from planner.published.predictions import prediction_lines
    from planner.published.reading import read_measurements
    from simulator.whole_file import write_whole

    if out is not None:
        check_out("--out", out, measurements)
    rows = [row for path in measurements for row in read_measurements(path)]
    if report is not None:
        _check_folder(report)
        check_out("--report", report / "predictions.csv", measurements)
    if commands is not None:
        check_out("--commands", commands, measurements)
    scored = _planned(terminal, rows, commands)
    if out is not None:
        write_whole(out, prediction_lines(scored))
    _report_faults(terminal, rows)
    left_out = accuracy_of(_left_out(terminal, rows)) if leave_one_source_out else None
    result = AccuracyResult(fitted=accuracy_of(scored), left_out=left_out)
    if report is not None:
        _write_report(terminal, report, result, measurements)
    _show(terminal, result, out, report)


def _planned(terminal: Terminal, rows: list[MeasuredRow], commands: Path | None) -> list[ScoredRow]:
    """Every row predicted by its pinned plan, whose commands are written into a file where one is named."""
    from planner.published.planned import command_lines, predict_planned
    from planner.published.predictions import score
    from simulator.whole_file import write_whole

    runs = [row.run for row in rows if row.run is not None]
    with terminal.counting("planning", len(runs)) as advance:
        outcomes = predict_planned(runs, _steps(advance))
    if commands is not None:
        write_whole(commands, command_lines(rows, outcomes, commands))
    return score(rows, outcomes)


def _left_out(terminal: Terminal, rows: list[MeasuredRow]) -> list[ScoredRow]:
    """Every row predicted by its pinned plan, with the coefficients that the other sources give."""
    from planner.published.calibrating import left_out_files, planned_folds
    from planner.published.planned import predict_planned
    from planner.published.predictions import score

    known = [row for row in rows if row.run is not None]
    with terminal.working("planning what the fits learn from"):
        files = left_out_files(known, planned_folds(known))
    runs = [row.run for row in known if row.run is not None]
    with terminal.counting("planning without a source", len(runs)) as advance:
        return score(rows, predict_planned(runs, _steps(advance), software=files))


def _steps(advance: Callable[[], None]) -> Callable[[int], None]:
    def steps(count: int) -> None:
        for _ in range(count):
            advance()

    return steps


def _check_folder(folder: Path) -> None:
    """Say before the work begins that a report cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--report {str(folder)!r}: {error.strerror or error}; name a folder to write into") from error


def _write_report(terminal: Terminal, folder: Path, result: AccuracyResult, measurements: list[Path]) -> None:
    from reports.accuracy_page import write_accuracy_report

    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    with terminal.working("drawing the report"):
        command = _command(measurements, folder, left_out=result.left_out is not None)
        write_accuracy_report(folder, result, command=command, date=date)


def _command(measurements: list[Path], folder: Path, *, left_out: bool) -> str:
    """The command that makes a report; a folder whose CSV files are all named is written with a star.

    A report is read on other machines: of what lies outside the current folder the last name alone is written.
    """
    here = Path.cwd()

    def shown(path: Path) -> str:
        whole = path.resolve()
        return shlex.quote(str(whole.relative_to(here)) if whole.is_relative_to(here) else whole.name)

    names: list[str] = []
    for parent in dict.fromkeys(path.parent for path in measurements):
        inside = [path for path in measurements if path.parent == parent]
        whole = len(inside) > 1 and {path.name for path in inside} == {path.name for path in parent.glob("*.csv")}
        names += [f"{shown(parent)}/*.csv"] if whole else [shown(path) for path in inside]
    option = " --leave-one-source-out" if left_out else ""
    return f"meshwright validate {' '.join(names)}{option} --report {shown(folder)}"


def _report_faults(terminal: Terminal, rows: list[MeasuredRow]) -> None:
    """Say on stderr which rows are wrong; a collection in which every row is wrong is bad input."""
    faults = [row.fault for row in rows if row.fault]
    if len(faults) == len(rows):
        raise InputError("no row can be read: " + faults[0])
    for fault in faults[:_SHOWN_FAULTS]:
        terminal.note(f"meshwright: {fault}")
    if len(faults) > _SHOWN_FAULTS:
        terminal.note(f"meshwright: and {len(faults) - _SHOWN_FAULTS} rows more that are wrong")


def _show(terminal: Terminal, result: AccuracyResult, out: Path | None, report: Path | None) -> None:
    if terminal.json:
        terminal.document({**accuracy_document(result, out), "report": None if report is None else str(report)})
    elif terminal.quiet:
        for path in (out, report):
            if path is not None:
                terminal.line(str(path))
    else:
        from planner.cli.catalogue_tables import accuracy_report

        written = ", ".join(str(path) for path in (out, report) if path is not None)
        terminal.show(*accuracy_report(result, written or None))


def accuracy_document(result: AccuracyResult, out: Path | None) -> dict[str, Any]:
    """The figures, and every row, as plain data."""
    document: dict[str, Any] = {
        "rows": [_row_document(row) for row in result.fitted.rows],
        "all": _metrics_document(result.fitted.overall),
        "by_source": {name: _metrics_document(figures) for name, figures in result.fitted.by_source.items()},
        "by_group": {name: _metrics_document(figures) for name, figures in result.fitted.by_group.items()},
        "out": None if out is None else str(out),
    }
    if result.left_out is not None:
        document["leave_one_source_out"] = {
            "all": _metrics_document(result.left_out.overall),
            "by_source": {name: _metrics_document(figures) for name, figures in result.left_out.by_source.items()},
            "by_group": {name: _metrics_document(figures) for name, figures in result.left_out.by_group.items()},
        }
    return document


def _metrics_document(metrics: Metrics) -> dict[str, Any]:
    return {"coverage": metrics.coverage, **asdict(metrics)}


def _row_document(row: ScoredRow) -> dict[str, Any]:
    low, high = row.interval_s or (None, None)
    memory = row.predicted_memory_bytes
    return {
        "row_id": row.row_id,
        "status": row.status,
        "predicted_step_time_s": row.predicted_step_time_s,
        "interval_low_s": low,
        "interval_high_s": high,
        "predicted_peak_memory_gib": None if memory is None else memory / 2**30,
        "predicted_outcome": row.predicted_outcome,
        "label": row.label,
        "reason": row.reason,
        "not_read": list(row.not_read),
        "measured_step_time_s": row.measured_step_time_s,
    }
