"""Figures of predictions against measurements: errors of time and memory, outcomes, ranks and the cost of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau

from planner.published.results import Accuracy, Metrics, ScoredRow

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

    Every workload counts as one, however many plans it has.
    """
    workloads: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.workload and row.predicted_step_time_s and row.measured_step_time_s:
            times = row.predicted_step_time_s, row.measured_step_time_s
            workloads.setdefault(row.workload, []).append(times)
    found = [choice for times in workloads.values() if (choice := choice_of(times))]
    taus = [tau for tau, _ in found if np.isfinite(tau)]
    return _figure(np.mean, np.array(taus)), _figure(np.mean, np.array([cost for _, cost in found])), len(found)


def choice_of(times: Iterable[tuple[float, float]]) -> tuple[float, float] | None:
    """Kendall's tau, and the measured time of the plan predicted best over the best, less one; None with one plan.

    Runs of one workload that have the same predicted time are one plan, measured several times: their median counts.
    Tau is not a number where all measured times are the same.

    Parameters
    ----------
    times : predicted and measured seconds of each run
    """
    plans: dict[float, list[float]] = {}
    for predicted, measured in times:
        plans.setdefault(predicted, []).append(measured)
    if len(plans) < 2:
        return None
    foretold, medians = np.array(list(plans)), np.array([float(np.median(seconds)) for seconds in plans.values()])
    cost = float(medians[np.argmin(foretold)] / medians.min() - 1)
    return float(kendalltau(foretold, medians).statistic), cost
