"""Figures of predictions against measurements: errors of time and memory, outcomes, ranks and the cost of a choice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from scipy.stats import kendalltau


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """A measured row beside its prediction.

    Attributes
    ----------
    row_id, source, file
        As the measurements name them; ``file`` is the file's name without folder.
    status
        ``ok`` (predicted), ``skipped`` (a fact is missing or what is described is not modelled) or ``error``.
    reason
        Why a row was skipped or failed, or what had to be assumed.
    label
        ``calibrated``, ``interpolated`` or ``extrapolated``; empty without a prediction.
    workload
        Rows with the same workload trained the same network with the same batch on the same devices, by
        different plans; empty where there is nothing to choose between.
    device
        The accelerator as the profile names it; empty where none is known.
    group
        Of `planner.published.predictions.group_of`: rows that share an aim; empty where none is known.
    transformer
        Whether the network is one, also where there is no prediction.
    predicted_outcome, measured_outcome
        ``ok`` or ``oom``; empty where unknown.
    memory_doubt
        Why the measured memory tells little, one of `planner.published.predictions.DOUBTS`; empty where it is plain.
    likely_cause
        Why the prediction is off, where the comparison can tell.
    not_read
        Words of the row that tell it from others of its source which take another time and have the same prediction.
    operations_s, roofline_s
        Seconds of naive predictions: operations at the device's peak, and the roofline.
    """

    row_id: str
    source: str
    file: str
    status: str
    reason: str = ""
    label: str = ""
    workload: str = ""
    device: str = ""
    devices: int = 0
    group: str = ""
    transformer: bool = False
    predicted_step_time_s: float | None = None
    interval_s: tuple[float, float] | None = None
    measured_step_time_s: float | None = None
    predicted_memory_bytes: float | None = None
    measured_memory_bytes: float | None = None
    predicted_outcome: str = ""
    measured_outcome: str = ""
    likely_cause: str = ""
    memory_doubt: str = ""
    not_read: tuple[str, ...] = ()
    operations_s: float | None = None
    roofline_s: float | None = None

    @property
    def time_error(self) -> float | None:
        """Relative error of the predicted time, ``predicted / measured − 1``; None where either is missing."""
        if self.predicted_step_time_s is None or not self.measured_step_time_s:
            return None
        return self.predicted_step_time_s / self.measured_step_time_s - 1

    @property
    def inside_interval(self) -> bool | None:
        """Whether the measured time lies in the predicted interval; None where either is missing."""
        if self.interval_s is None or not self.measured_step_time_s:
            return None
        return self.interval_s[0] <= self.measured_step_time_s <= self.interval_s[1]

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted memory; None where either is missing."""
        if self.predicted_memory_bytes is None or not self.measured_memory_bytes:
            return None
        return self.predicted_memory_bytes / self.measured_memory_bytes - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """Figures of one group of rows; None where no row of the group can tell.

    Attributes
    ----------
    rows, predicted
        Rows in the group, and those with a prediction; ``coverage`` is their ratio.
    timed, time_mean, time_median, time_p90, time_max, time_bias
        Rows with a predicted and a measured time; absolute relative errors of these; ``time_bias`` is the
        mean of the signed errors.
    inside_interval
        Share of the measured times inside the predicted intervals.
    memory_rows, memory_mean, memory_median, memory_bias
        The same of peak memory.
    memory_clear_rows, memory_clear_mean
        The same of the rows that do not leave in doubt what was measured, and of what run (``memory_doubt``).
    oom_rows, oom_recall, oom_precision
        Rows measured out of memory among those whose outcome was predicted; share of them predicted so;
        share of the rows predicted out of memory that were.
    workloads, kendall_tau, regret
        Workloads with at least two measured plans; mean rank correlation of predicted and measured times
        in them; mean of ``measured time of the plan predicted fastest / best measured time − 1``.
    """

    rows: int
    predicted: int
    timed: int = 0
    time_mean: float | None = None
    time_median: float | None = None
    time_p90: float | None = None
    time_max: float | None = None
    time_bias: float | None = None
    inside_interval: float | None = None
    memory_rows: int = 0
    memory_mean: float | None = None
    memory_median: float | None = None
    memory_clear_rows: int = 0
    memory_clear_mean: float | None = None
    memory_bias: float | None = None
    oom_rows: int = 0
    oom_recall: float | None = None
    oom_precision: float | None = None
    workloads: int = 0
    kendall_tau: float | None = None
    regret: float | None = None

    @property
    def coverage(self) -> float:
        """Share of the rows with a prediction."""
        return self.predicted / self.rows if self.rows else 0.0


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """How well one fit predicts measured rows: all, the transformers, by source and by group, in the rows' order."""

    rows: tuple[ScoredRow, ...]
    overall: Metrics
    transformers: Metrics
    by_source: Mapping[str, Metrics]
    by_group: Mapping[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class AccuracyResult:
    """The same rows predicted in several ways.

    Attributes
    ----------
    fitted
        By coefficients fitted on everything.
    left_out
        Each source by a fit that never saw it.
    """

    fitted: Accuracy
    left_out: Accuracy | None = None


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
