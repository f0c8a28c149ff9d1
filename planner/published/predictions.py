"""Measured rows beside their predictions, and the file of predictions that `meshwright validate` writes."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from planner.cost.memory.device import training_memory
from planner.cost.memory.figures import MemoryEstimate
from planner.cost.stacks import Stack
from planner.cost.training_run import Recompute, RunPrediction, TrainingRun, TransformerShape
from planner.published.aims import group_of
from planner.published.memory_doubts import APART, measured_apart, memory_doubt
from planner.published.memory_kinds import figure_of
from planner.published.reading import MeasuredRow
from planner.published.results import ScoredRow
from planner.published.source_rules import CHOSEN_TO_FIT
from simulator.errors import MeshwrightError

Predictor = Callable[[Sequence[TrainingRun]], Sequence[RunPrediction | MeshwrightError]]
"""Predicts runs; an error in place of a prediction says why one run has none."""
OK, SKIPPED, ERROR = "ok", "skipped", "error"
COLUMNS = (
    "row_id", "status", "predicted_step_time_s", "interval_low_s", "interval_high_s", "predicted_peak_memory_gib",
    "predicted_outcome", "label", "reason",
)  # fmt: skip
RECOMPUTED = "memory with full recomputation, without which it does not fit"
_GIB = 2**30
_CHUNK = 512
_TUNED_STACKS = (Stack.TRANSFORMER_ENGINE, Stack.EAGER, Stack.COMPILED, Stack.MINDSPEED, Stack.MINDSPORE)
"""Software whose published figures are of runs that were tuned until they fitted."""


def score(
    rows: Sequence[MeasuredRow],
    predict: Predictor,
    advance: Callable[[int], None] | None = None,
    *,
    whole: bool = False,
) -> list[ScoredRow]:
    """Predict every row that has a run; one row each, in order. `advance` is told how many rows were done.

    A `whole` predictor gets all runs at once, and says itself which of them need recomputation to fit.
    """
    scored: list[ScoredRow] = []
    size = max(1, len(rows)) if whole else _CHUNK
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        outcomes = iter(predict_each([row.run for row in chunk if row.run is not None], predict))
        scored.extend(_scored(row, next(outcomes) if row.run is not None else None, whole) for row in chunk)
        if advance is not None:
            advance(len(chunk))
    apart = measured_apart(rows)
    return [
        replace(row, memory_doubt=APART) if (row.source, row.row_id) in apart and not row.memory_doubt else row
        for row in scored
    ]


def predict_each(runs: Sequence[TrainingRun], predict: Predictor) -> list[RunPrediction | Exception]:
    """A prediction of each run, or why it has none; a run that fails does not take the others with it."""
    if not runs:
        return []
    try:
        return [p if isinstance(p, MeshwrightError) else _finite(p) for p in predict(runs)]
    except (MeshwrightError, ArithmeticError, LookupError, ValueError) as error:
        if len(runs) == 1:
            return [error]
        middle = len(runs) // 2
        return [*predict_each(runs[:middle], predict), *predict_each(runs[middle:], predict)]


def _finite(prediction: RunPrediction) -> RunPrediction | ArithmeticError:
    figures = (prediction.step_time_s, *prediction.interval_s, prediction.peak_memory_bytes)
    if not all(math.isfinite(figure) for figure in figures) or prediction.step_time_s <= 0:
        return ArithmeticError(f"a step of {prediction.step_time_s} s is no prediction")
    return prediction


def _scored(row: MeasuredRow, outcome: RunPrediction | Exception | None, whole: bool) -> ScoredRow:
    if row.run is None or not isinstance(outcome, RunPrediction):
        reason = row.reason
        if outcome is not None:
            kind = "" if isinstance(outcome, MeshwrightError) else f"{type(outcome).__name__}: "
            reason = f"cannot be predicted: {kind}{outcome}"
        return ScoredRow(
            row_id=row.row_id,
            source=row.source,
            file=row.file,
            status=SKIPPED if not row.fault and isinstance(outcome, MeshwrightError | None) else ERROR,
            reason=reason,
            measured_outcome=row.outcome,
            transformer=row.transformer,
        )
    fits = outcome.fits or CHOSEN_TO_FIT in row.run.assumed
    reason = "; ".join(filter(None, (row.reason, *outcome.notes)))
    figures, peak = outcome.memory_figures, outcome.peak_memory_bytes
    smaller = None if fits or whole else _recomputed(row.run)
    if smaller is not None:
        fits, reason = True, f"{reason}; {RECOMPUTED}"
        figures, peak = {str(kind): value for kind, value in smaller.figures().items()}, smaller.reserved_bytes
    return ScoredRow(
        row_id=row.row_id,
        source=row.source,
        file=row.file,
        status=OK,
        reason=reason,
        label=outcome.label,
        workload=row.workload,
        group=group_of(row.run, complete=row.complete),
        device=row.run.hardware.device_name,
        devices=row.run.setup.devices,
        predicted_step_time_s=outcome.step_time_s,
        interval_s=outcome.interval_s,
        measured_step_time_s=_known(row.measured_time_s) if row.outcome in ("", "ok") else None,
        predicted_memory_bytes=figures.get(figure_of(row.memory_kind), peak),
        measured_memory_bytes=_known(row.memory_gib * _GIB) if row.outcome in ("", "ok") else None,
        predicted_outcome="ok" if fits else "oom",
        measured_outcome=row.outcome,
        transformer=row.transformer,
        memory_doubt=memory_doubt(row) if row.outcome in ("", "ok") else "",
    )


def recomputing(run: TrainingRun) -> TrainingRun | None:
    """A tuned run with full recomputation, where the row does not say whether it recomputed; else None."""
    unstated = f"recomputation not stated: {Recompute.NONE}" in run.assumed and isinstance(
        run.network, TransformerShape
    )
    if not unstated or run.setup.stack not in _TUNED_STACKS:
        return None
    return replace(run, setup=replace(run.setup, recompute=Recompute.FULL))


def _recomputed(run: TrainingRun) -> MemoryEstimate | None:
    other = recomputing(run)
    memory = training_memory(other) if other is not None else None
    return memory if memory is not None and memory.fits else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def prediction_lines(rows: Sequence[ScoredRow], planned: Sequence[ScoredRow] = ()) -> Iterator[str]:
    """The lines of a prediction file: a header, then one row each.

    Where the same rows were `planned` as well, what that gives follows in columns of its own.
    """
    yield _line((*COLUMNS, *(f"planned_{name}" for name in COLUMNS[1:] if planned)))
    for row, other in zip_longest(rows, planned):
        yield _line((row.row_id, *_cells(row), *(_cells(other) if other is not None else ())))


def _cells(row: ScoredRow) -> tuple[str, ...]:
    low, high = row.interval_s or (None, None)
    memory = None if row.predicted_memory_bytes is None else row.predicted_memory_bytes / _GIB
    return (
        row.status, _number(row.predicted_step_time_s), _number(low), _number(high), _number(memory),
        row.predicted_outcome, row.label, row.reason,
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _line(cells: Sequence[str]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow([" ".join(cell.split()) for cell in cells])
    return buffer.getvalue()
