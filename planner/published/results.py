"""What comparing predictions with measurements gives: the rows, and figures of groups of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
        Of `planner.published.aims`: rows that share an aim; empty where none is known.
    transformer
        Whether the network is one, also where there is no prediction.
    predicted_outcome, measured_outcome
        ``ok`` or ``oom``; empty where unknown.
    memory_doubt
        Why the measured memory tells little, one of `planner.published.memory_doubts.DOUBTS`; empty where it is plain.
    likely_cause
        Why the prediction is off, where the comparison can tell.
    not_read
        Words of the row that tell it from others of its source which take another time and have the same prediction.
    operations_s, roofline_s
        Seconds by `planner.published.baselines`: operations at the device's peak, and the roofline.
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
