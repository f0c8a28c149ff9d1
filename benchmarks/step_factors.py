"""Fit what devices and the usual software together put on the kernels and messages of planned steps.

A step takes ``neutral_s + sum over names of (factor - 1) * response_s``, where a response is how fast the step grows
with the factor of one kind of work. Factors are those of a family of devices: ``centre * common * own``. The centre is
the product of the factors that `planner.published.fitting` gives the device and the usual software. The common part
corrects it for plans that name no software. The rest is the family's own. Both have Gaussian
priors on their logarithms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from planner.cost.stacks import USUAL_STACKS, factors_of
from planner.published.fitting import FloatArray

NAMES = ("matmul", "attention", "convolution", "memory", "optimizer", "inside", "outside")
"""Kinds of work, as in `simulator.corrections`."""
COMMON_SPREAD = np.array([0.06, 0.2, 0.2, 0.2, 0.2, 0.15, 0.15])
OWN_SPREAD = np.array([0.08, 0.15, 0.2, 0.15, 0.15, 0.15, 0.15])
"""Standard deviations (7,) of the logarithms: products hardly differ, what estimates time otherwise may."""
_SCALE = 0.05  # relative errors beyond this count linearly
_SHORTEST = 0.05  # part of the neutral time that factors cannot go below


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedSteps:
    """Runs (N,): their family and source, measured seconds, and those of the plan and its responses (N, 7)."""

    families: Sequence[str]
    sources: Sequence[str]
    measured_s: FloatArray
    neutral_s: FloatArray
    response_s: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class StepFactors:
    """Factors by family and name, and what a family without runs takes of its centre."""

    families: Mapping[str, FloatArray]
    common: FloatArray

    def predicted_s(self, steps: PlannedSteps, centres: Mapping[str, FloatArray]) -> FloatArray:
        """Seconds (N,) of the runs."""
        factors = np.array([self.families.get(f, centres[f] * self.common) for f in steps.families])
        return _seconds(steps, factors)


def centres(
    devices: Mapping[str, Mapping[str, float]], stacks: Mapping[str, Mapping[str, float]]
) -> dict[str, FloatArray]:
    """Factors (7,) by family that devices and the usual software are known to have: their product."""
    known = [stacks[stack] for stack in USUAL_STACKS if stack in stacks]
    names = {name for stack in known for name in stack}
    software = factors_of({name: float(np.median([stack.get(name, 1.0) for stack in known])) for name in names})
    return {
        family: np.array([device.get(name, 1.0) * software.get(name, 1.0) for name in NAMES])
        for family, device in devices.items()
    }


def fit_factors(
    steps: PlannedSteps, known: Mapping[str, FloatArray], rows: npt.NDArray[np.bool_] | None = None
) -> StepFactors:
    """Fit all runs, or those of a mask; a source counts with the square root of its number of runs."""
    used = np.ones(len(steps.neutral_s), dtype=bool) if rows is None else rows
    families = sorted({f for f, counts in zip(steps.families, used, strict=True) if counts})
    place = np.array([families.index(f) if f in families else 0 for f in steps.families])
    centre = np.log([known[family] for family in families])
    _, code, count = np.unique(np.array(steps.sources)[used], return_inverse=True, return_counts=True)
    weights = count[code] ** -0.25
    kinds = len(NAMES)

    def factors(theta: FloatArray) -> FloatArray:
        return np.asarray(np.exp(centre + theta[:kinds] + theta[kinds:].reshape(-1, kinds)))

    def residuals(theta: FloatArray) -> FloatArray:
        error = np.log(_seconds(steps, factors(theta)[place]) / steps.measured_s)[used] / _SCALE
        robust = np.sign(error) * np.sqrt(2 * (np.sqrt(1 + error**2) - 1))
        own = theta[kinds:].reshape(-1, kinds) / OWN_SPREAD
        return np.concatenate([weights * robust, theta[:kinds] / COMMON_SPREAD, own.ravel()])

    theta = least_squares(residuals, np.zeros(kinds * (1 + len(families)))).x
    found = dict(zip(families, factors(theta), strict=True))
    return StepFactors(families=found, common=np.asarray(np.exp(theta[:kinds])))


def left_out_s(steps: PlannedSteps, known: Mapping[str, FloatArray]) -> FloatArray:
    """Seconds (N,) of every run by the fit without its source."""
    sources, found = np.array(steps.sources), np.zeros_like(steps.neutral_s)
    for source in np.unique(sources):
        own = sources == source
        found[own] = fit_factors(steps, known, ~own).predicted_s(steps, known)[own]
    return found


def _seconds(steps: PlannedSteps, factors: FloatArray) -> FloatArray:
    grown = steps.neutral_s + ((factors - 1.0) * steps.response_s).sum(axis=1)
    return np.asarray(np.maximum(grown, _SHORTEST * steps.neutral_s))
