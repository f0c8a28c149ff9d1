"""What predictions are held against: the figure that each group of rows aims at, and two naive predictions.

- *Utilisation*: six operations a parameter and token (Kaplan et al., arXiv:2001.08361), at one share of the peak for
  each device: the median of its sources, functional tests of tiny networks left aside.
- *Roofline*: the longest of three times (Williams et al., 2009), `planner.published.predictions.roofline_s`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.published.metrics import Accuracy, Metrics, ScoredRow
from planner.published.predictions import (
    ADAPTERS,
    ASCEND,
    CONVOLUTIONAL,
    EXPERTS,
    FSDP,
    FUNCTIONAL,
    IN_PART,
    LOW_PRECISION,
    TRANSFORMERS,
)

EVERYTHING = "all rows"
ALL_TRANSFORMERS = "all transformers"
UTILISATION, ROOFLINE = "6·N·D at one utilisation a device", "roofline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """The figure `figure` of `Metrics` of a group is to lie between two limits."""

    name: str
    group: str
    figure: str
    low: float | None = None
    high: float | None = None

    def met(self, metrics: Metrics) -> bool | None:
        """Whether the aim is met; None where no row tells."""
        value = getattr(metrics, self.figure)
        if value is None:
            return None
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


TIME_LIMITS = {
    TRANSFORMERS: 0.06, IN_PART: 0.13, FSDP: 0.09, EXPERTS: 0.14, LOW_PRECISION: 0.10, ADAPTERS: 0.15, ASCEND: 0.14,
    CONVOLUTIONAL: 0.10,
}  # fmt: skip
"""Mean absolute errors of step times, by group."""
AIMS = (
    *(
        Aim(name="time, mean absolute error", group=group, figure="time_mean", high=limit)
        for group, limit in TIME_LIMITS.items()
    ),
    Aim(name="time, bias", group=EVERYTHING, figure="time_bias", low=-0.02, high=0.02),
    Aim(name="measured inside the 90 % interval", group=EVERYTHING, figure="inside_interval", low=0.85, high=0.95),
    Aim(name="memory, mean absolute error", group=EVERYTHING, figure="memory_mean", high=0.03),
    Aim(name="out of memory, recall", group=EVERYTHING, figure="oom_recall", low=0.96),
    Aim(name="out of memory, precision", group=EVERYTHING, figure="oom_precision", low=0.91),
    Aim(name="regret of the plan ranked first", group=EVERYTHING, figure="regret", high=0.015),
    Aim(name="rows with a prediction", group=ALL_TRANSFORMERS, figure="coverage", low=0.95),
)


def metrics_of(accuracy: Accuracy, group: str) -> Metrics | None:
    """The figures of a group; None where no row belongs to it."""
    groups: Mapping[str, Metrics] = {
        **accuracy.by_group,
        EVERYTHING: accuracy.overall,
        ALL_TRANSFORMERS: accuracy.transformers,
    }
    return groups.get(group)


def baseline_errors(rows: Sequence[ScoredRow], *, left_out: bool) -> dict[str, dict[str, float]]:
    """Mean absolute errors of step times by baseline and group of rows; ``""`` stands for all rows.

    Only rows count that have a prediction and a measured time. With `left_out` a row's utilisation is that of the other
    sources, of all devices where none of them ran on its own.
    """
    timed = [row for row in rows if row.time_error is not None and row.operations_s and row.measured_step_time_s]
    share = _shares(timed, left_out=left_out)
    found: dict[str, dict[str, float]] = {}
    guesses: Mapping[str, Callable[[ScoredRow], float]] = {
        UTILISATION: lambda row: (row.operations_s or 0.0) / share(row),
        ROOFLINE: lambda row: row.roofline_s or 0.0,
    }
    for name, guess in guesses.items():
        errors: dict[str, list[float]] = {}
        for row in timed:
            error = abs(guess(row) / (row.measured_step_time_s or 1.0) - 1)
            for group in {"", row.group}:
                errors.setdefault(group, []).append(error)
        found[name] = {group: float(np.mean(values)) for group, values in errors.items()}
    return found


def _shares(rows: Sequence[ScoredRow], *, left_out: bool) -> Callable[[ScoredRow], float]:
    """The share of the peak that a row's device reaches."""
    reached: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row.group != FUNCTIONAL:
            share = (row.operations_s or 0.0) / (row.measured_step_time_s or 1.0)
            reached.setdefault(row.device, {}).setdefault(row.source, []).append(share)

    def median(devices: Iterable[str], without: str) -> float:
        """The median over sources of the median of each: a large source has one voice."""
        known = [np.median(found) for one in devices for of, found in reached.get(one, {}).items() if of != without]
        return float(np.median(known)) if known else 0.0

    found: dict[tuple[str, str], float] = {}
    for device, source in {(row.device, row.source if left_out else "") for row in rows}:
        found[device, source] = median([device], source) or median(reached, source) or 1.0
    return lambda row: found[row.device, row.source if left_out else ""]
