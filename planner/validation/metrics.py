"""Figures of predictions against measurements: errors of time and memory, outcomes, ranks and the cost of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from planner.validation.results import Accuracy, Metrics, ScoredRow

FloatArray = npt.NDArray[np.float64]
OUT_OF_MEMORY = "oom"


def accuracy_of(rows: Iterable[ScoredRow]) -> Accuracy:
    """The figures of all rows, by source and by group."""
    rows = tuple(rows)
    return Accuracy(
        rows=rows,
        overall=metrics_of_rows(rows),
        transformers=metrics_of_rows([row for row in rows if row.transformer]),
        by_source=_by(rows, lambda row: row.source),
        by_group=_by(rows, lambda row: row.group),
    )


def _by(rows: Sequence[ScoredRow], name: Callable[[ScoredRow], str]) -> dict[str, Metrics]:
    parts: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if name(row):
            parts.setdefault(name(row), []).append(row)
    return {key: metrics_of_rows(part) for key, part in parts.items()}


def metrics_of_rows(rows: Sequence[ScoredRow]) -> Metrics:
    """The figures of some rows; rows without a prediction count for coverage alone."""
    predicted = [row for row in rows if row.status == "ok"]
    errors = _array(row.time_error for row in predicted)
    memory = _array(row.memory_error for row in predicted)
    clear = _array(row.memory_error for row in predicted if not row.memory_doubt)
    inside = _array(row.inside_interval for row in predicted)
    recall, precision, oom_rows = _outcomes(predicted)
    tau, regret, workloads = _choices(predicted)
    return Metrics(
        rows=len(rows),
        predicted=len(predicted),
        timed=errors.size,
        time_mean=_figure(np.mean, np.abs(errors)),
        time_median=_figure(np.median, np.abs(errors)),
        time_p90=_figure(_ninth_decile, np.abs(errors)),
        time_max=_figure(np.max, np.abs(errors)),
        time_bias=_figure(np.mean, errors),
        inside_interval=_figure(np.mean, inside),
        memory_rows=memory.size,
        memory_mean=_figure(np.mean, np.abs(memory)),
        memory_median=_figure(np.median, np.abs(memory)),
        memory_clear_rows=clear.size,
        memory_clear_mean=_figure(np.mean, np.abs(clear)),
        memory_bias=_figure(np.mean, memory),
        oom_rows=oom_rows,
        oom_recall=recall,
        oom_precision=precision,
        workloads=workloads,
        kendall_tau=tau,
        regret=regret,
    )


def _array(values: Iterable[float | None]) -> FloatArray:
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _ninth_decile(values: FloatArray) -> np.float64:
    return np.float64(np.quantile(values, 0.9))


def _figure(of: Callable[[FloatArray], np.floating], values: FloatArray) -> float | None:
    return float(of(values)) if values.size else None


def _outcomes(rows: Sequence[ScoredRow]) -> tuple[float | None, float | None, int]:
    """Recall and precision of "out of memory", and how many rows ran out."""
    known = [row for row in rows if row.measured_outcome in ("ok", OUT_OF_MEMORY) and row.predicted_outcome]
    measured = [row for row in known if row.measured_outcome == OUT_OF_MEMORY]
    foretold = [row for row in known if row.predicted_outcome == OUT_OF_MEMORY]
    right = sum(row.predicted_outcome == OUT_OF_MEMORY for row in measured)
    recall = right / len(measured) if measured else None
    # Where nothing ran out there is nothing to find; how often "out of memory" was wrong would be no precision.
    precision = right / len(foretold) if foretold and measured else None
    return recall, precision, len(measured)


def _choices(rows: Sequence[ScoredRow]) -> tuple[float | None, float | None, int]:
    """Mean Kendall rank correlation and mean regret over the workloads with at least two plans.

    Rows of a workload that have the same predicted time are one plan, measured several times: their median counts.
    """
    workloads: dict[str, dict[float, list[float]]] = {}
    for row in rows:
        if row.workload and row.predicted_step_time_s and row.measured_step_time_s:
            plans = workloads.setdefault(row.workload, {})
            plans.setdefault(row.predicted_step_time_s, []).append(row.measured_step_time_s)
    taus, regrets = [], []
    for plans in workloads.values():
        if len(plans) < 2:
            continue
        predicted = np.array(list(plans))
        measured = np.array([float(np.median(times)) for times in plans.values()])
        regrets.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
        tau = float(kendalltau(predicted, measured).statistic)
        if np.isfinite(tau):
            taus.append(tau)
    return _figure(np.mean, np.array(taus)), _figure(np.mean, np.array(regrets)), len(regrets)
