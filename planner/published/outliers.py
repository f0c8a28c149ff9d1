"""Rows that are predicted worst, and what probably lies behind each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.published.aims import FUNCTIONAL
from planner.published.metrics import ScoredRow

SHORT_STEP_S = 0.1
FEW_ROWS = 4
FAR_OFF = math.log(4.0)
"""Beyond, no property of hardware or software that rows share is left to explain it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Why a row is probably off: ``kind`` is the same for rows of like causes, ``words`` are the row's own."""

    kind: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """A row, its relative error, and the likely cause."""

    row: ScoredRow
    error: float
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kin:
    """Signed log errors of a source and of each of its workloads."""

    source: np.ndarray
    workloads: dict[str, list[float]]


def outliers(rows: Sequence[ScoredRow], *, least: float = 0.25) -> list[Outlier]:
    """The rows whose time is off by more than `least` in either direction, worst first, ties by name.

    Errors count as logarithms, so that half and double are equally far off.
    """
    timed = [(row, _log_error(row)) for row in rows]
    found = [(row, error) for row, error in timed if abs(error) > math.log1p(least)]
    found.sort(key=lambda item: (-abs(item[1]), item[0].file, item[0].row_id))
    kin = _kin(rows)
    return [Outlier(row=row, error=math.expm1(error), cause=likely_cause(row, kin[row.source])) for row, error in found]


def likely_cause(row: ScoredRow, kin: _Kin) -> Cause:
    """A guess from the rows of the same source and of the same workload, and from what was assumed."""
    error = _log_error(row)
    sign = math.copysign(1.0, error)
    others = [other for other in kin.workloads.get(row.workload, []) if other != error] if row.workload else []
    if row.likely_cause:
        return Cause(kind="as the comparison says", words=row.likely_cause)
    if len(others) >= FEW_ROWS and abs(float(np.median(others))) < abs(error) / 3:
        return Cause(
            kind="other plans of its workload are predicted",
            words=f"the other {len(others)} plans of this workload are off by {_percent(float(np.median(others)))} in "
            "the median: this plan does something that is not modelled, or its run was disturbed",
        )
    if row.group == FUNCTIONAL:
        return Cause(
            kind="a functional test",
            words="a functional test of a small network: checks, logs and the host set its pace, which differs from "
            "machine to machine and from one software version to the next",
        )
    same = float(np.mean(np.sign(kin.source) == sign)) if kin.source.size else 0.0
    middle = float(np.median(kin.source)) if kin.source.size else 0.0
    if kin.source.size >= FEW_ROWS and same > 0.8 and abs(middle) > 0.1:
        return Cause(
            kind="its source is off as a whole",
            words=f"{100 * same:.0f} % of the {kin.source.size} rows of this source are off in the same direction "
            f"(median {_percent(middle)}): something its rows share, unstated or unknown to the fit",
        )
    if row.measured_step_time_s and row.measured_step_time_s < SHORT_STEP_S:
        return Cause(
            kind="a short step", words="a short step: the host, not the device, sets the pace, and hosts differ"
        )
    assumed = f"assumed: {row.reason}" if row.reason else ""
    if abs(error) > FAR_OFF:
        doubt = "more than four times off: a time, a batch or a count of devices is probably not what its column says"
        return Cause(kind="more than four times off", words="; ".join(filter(None, (doubt, assumed))))
    if assumed:
        return Cause(kind="something had to be assumed", words=assumed)
    if row.label == "extrapolated":
        return Cause(kind="outside of what was fitted", words="outside of what was fitted")
    return Cause(kind="unexplained", words="unexplained")


def _kin(rows: Iterable[ScoredRow]) -> dict[str, _Kin]:
    errors: dict[str, list[float]] = {}
    workloads: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        errors.setdefault(row.source, [])
        if row.time_error is not None:
            errors[row.source].append(_log_error(row))
            workloads.setdefault(row.source, {}).setdefault(row.workload, []).append(_log_error(row))
    return {
        source: _Kin(source=np.array(found), workloads=workloads.get(source, {})) for source, found in errors.items()
    }


def _log_error(row: ScoredRow) -> float:
    error = row.time_error
    return 0.0 if error is None else math.log1p(max(error, -1 + 1e-12))


def _percent(log_error: float) -> str:
    return f"{100 * math.expm1(log_error):+.0f} %".replace("-", "−")
