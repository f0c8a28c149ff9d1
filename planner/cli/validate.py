"""`meshwright validate`."""

from __future__ import annotations

import datetime as dt
import shlex
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, check_out
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.published.predictions import Predictor
    from planner.published.reading import MeasuredRow
    from planner.published.results import AccuracyResult, Metrics, ScoredRow

_SHOWN_FAULTS = 20


class PredictorPath(StrEnum):
    """Which code predicts the rows."""

    ESTIMATE = "estimate"
    PLAN = "plan"
    BOTH = "both"


def validate(
    measurements: Annotated[list[Path], typer.Argument(metavar="MEASUREMENTS.csv...", help="Measured training runs.")],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The predictions, one row each.")] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="A page of figures and pictures, in this folder.")
    ] = None,
    leave_one_source_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-source-out",
            help="Fit anew without each source, too, and predict it by that fit: what strangers can expect. Minutes.",
        ),
    ] = False,
    commands: Annotated[
        Path | None,
        typer.Option("--commands", metavar="FILE", help="The command `meshwright plan …` of every row, one row each."),
    ] = None,
    path: Annotated[
        PredictorPath | None,
        typer.Option(
            "--path",
            help="What predicts: formulas fitted to the rows (estimate), the plan of each row, pinned whole (plan), or "
            "both, side by side. Default: estimate, with --commands plan.",
        ),
    ] = None,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
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
    from planner.published.metrics import accuracy_of
    from planner.published.predictions import prediction_lines
    from planner.published.reading import read_measurements
    from planner.published.results import AccuracyResult
    from simulator.whole_file import write_whole

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    if out is not None:
        check_out("--out", out, measurements)
    rows = [row for path in measurements for row in read_measurements(path)]
    if report is not None:
        _check_folder(report)
        check_out("--report", report / "predictions.csv", measurements)
    path = path or (PredictorPath.ESTIMATE if commands is None else PredictorPath.PLAN)
    if commands is not None:
        if path is PredictorPath.ESTIMATE:
            raise InputError(
                "--commands gives the commands of pinned plans, and --path estimate predicts by formulas; "
                "leave out --path, or use --path both"
            )
        check_out("--commands", commands, measurements)
    if leave_one_source_out and path is PredictorPath.PLAN:
        raise InputError("--leave-one-source-out fits the formulas anew, and --path plan uses none; use --path both")
    scored = _estimated(terminal, rows) if path is not PredictorPath.PLAN else []
    planned = _planned(terminal, rows, commands) if path is not PredictorPath.ESTIMATE else []
    if out is not None:
        write_whole(out, prediction_lines(scored or planned, planned if scored else ()))
    _report_faults(terminal, rows)
    left_out = accuracy_of(_left_out(terminal, rows)) if leave_one_source_out else None
    result = AccuracyResult(
        fitted=accuracy_of(scored or planned),
        left_out=left_out,
        planned=accuracy_of(planned) if scored and planned else None,
    )
    if report is not None:
        _write_report(terminal, report, result, measurements)
    _show(terminal, result, out, report)


def _predictor() -> Predictor:
    from planner.cost.software_file import shipped_software
    from planner.published.estimate.predict import predict_runs

    return partial(predict_runs, software=shipped_software())


def _estimated(terminal: Terminal, rows: list[MeasuredRow]) -> list[ScoredRow]:
    """Every row predicted by the fitted formulas."""
    from planner.published.predictions import score

    with terminal.counting("predicting", len(rows)) as advance:
        return score(rows, _predictor(), _steps(advance))


def _planned(terminal: Terminal, rows: list[MeasuredRow], commands: Path | None) -> list[ScoredRow]:
    """Every row predicted by its pinned plan, whose commands are written into a file where one is named."""
    from planner.published.commands import command_lines
    from planner.published.planned import predict_planned
    from planner.published.predictions import score
    from simulator.whole_file import write_whole

    runs = [row.run for row in rows if row.run is not None]
    with terminal.counting("planning", len(runs)) as advance:
        outcomes = predict_planned(runs, _steps(advance))
    if commands is not None:
        write_whole(commands, command_lines(rows, outcomes, commands))
    return score(rows, lambda _: outcomes, whole=True)


def _left_out(terminal: Terminal, rows: list[MeasuredRow]) -> list[ScoredRow]:
    """Every row predicted by the fit without its source."""
    from planner.cost.software_file import shipped_software
    from planner.published.calibrating import held_out_predictions
    from planner.published.predictions import score

    sources = {row.source for row in rows if row.run is not None}
    with terminal.counting("fitting without a source", len(sources)) as advance:
        known = {id(run): prediction for run, prediction in held_out_predictions(rows, shipped_software(), advance)}
    return score(rows, lambda runs: [known[id(run)] for run in runs])


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
    """The command that makes a report; a folder whose CSV files are all named is written with a star."""
    names: list[str] = []
    for parent in dict.fromkeys(path.parent for path in measurements):
        inside = [path for path in measurements if path.parent == parent]
        whole = len(inside) > 1 and {path.name for path in inside} == {path.name for path in parent.glob("*.csv")}
        names += [shlex.quote(str(parent)) + "/*.csv"] if whole else [shlex.quote(str(path)) for path in inside]
    option = " --leave-one-source-out" if left_out else ""
    return f"meshwright validate {' '.join(names)}{option} --report {shlex.quote(str(folder))}"


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
        from planner.cli.accuracy_tables import accuracy_report

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
    for name, accuracy in (("leave_one_source_out", result.left_out), ("plan", result.planned)):
        if accuracy is not None:
            document[name] = {
                "all": _metrics_document(accuracy.overall),
                "by_source": {name: _metrics_document(figures) for name, figures in accuracy.by_source.items()},
                "by_group": {name: _metrics_document(figures) for name, figures in accuracy.by_group.items()},
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
        "measured_step_time_s": row.measured_step_time_s,
    }
