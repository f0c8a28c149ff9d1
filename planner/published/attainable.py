"""What error predictions can reach: how far rows of the same facts differ, and what factors found afterwards leave.

No model that sees only what a row states can tell two rows apart that state the same: half of what lies between them
is the least that it is off by. A source's own speed, which nothing stated explains, costs whoever has not seen it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Rows that have others of the same facts, how many sets of facts they are, and the least mean error on them."""

    rows: int
    groups: int
    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Factored:
    """Mean errors with one factor a group.

    Attributes
    ----------
    groups
        Groups of rows.
    hindsight
        Each factor the best of its own rows: less than any model can reach.
    others
        Each row by the best factor of the other rows of its group; a row alone keeps its error.
    """

    groups: int
    hindsight: float
    others: float


def best_factor(ratios: FloatArray) -> float:
    """The factor on predictions that makes their mean absolute relative error least.

    Minimised is ``mean |f * r - 1|`` over ``ratios`` (N,) of predicted over measured: the median of ``1 / r`` with
    weights ``r``.
    """
    order = np.argsort(1.0 / ratios)
    weights = np.cumsum(ratios[order])
    return float(1.0 / ratios[order][np.searchsorted(weights, weights[-1] / 2)])


def with_factors(ratios: FloatArray, groups: Sequence[Hashable]) -> Factored:
    """Errors of predictions with one factor for each of `groups` (N,); ``ratios`` (N,) are predicted over measured."""
    hindsight = np.abs(ratios - 1.0)
    others = hindsight.copy()
    members = _members(groups)
    for rows in members:
        own = ratios[rows]
        hindsight[rows] = np.abs(best_factor(own) * own - 1.0)
        if len(rows) > 1:
            others[rows] = [abs(best_factor(np.delete(own, i)) * own[i] - 1.0) for i in range(len(rows))]
    return Factored(groups=len(members), hindsight=float(hindsight.mean()), others=float(others.mean()))


def spread_of(measured_s: FloatArray, facts: Sequence[Hashable]) -> Spread | None:
    """How far rows of the same facts (N,) lie apart; None where no two rows share theirs.

    A group's best prediction is one time for all its rows, the one with the least mean absolute relative error.
    """
    members = [rows for rows in _members(facts) if len(rows) > 1]
    if not members:
        return None
    errors = [np.abs(best_factor(1.0 / measured_s[rows]) / measured_s[rows] - 1.0) for rows in members]
    found = np.concatenate(errors)
    return Spread(rows=len(found), groups=len(members), error=float(found.mean()))


def told_by_others(measured_s: FloatArray, facts: Sequence[Hashable]) -> FloatArray:
    """Errors of predicting each measurement by the median of the others of the same facts, where there are others."""
    errors: list[float] = []
    for rows in _members(facts):
        own = measured_s[rows]
        errors += [abs(float(np.median(np.delete(own, i))) / own[i] - 1.0) for i in range(len(rows)) if len(rows) > 1]
    return np.array(errors)


def _members(groups: Sequence[Hashable]) -> list[npt.NDArray[np.intp]]:
    found: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        found.setdefault(group, []).append(index)
    return [np.array(rows, dtype=np.intp) for rows in found.values()]
