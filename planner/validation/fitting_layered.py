"""Fit what hardware and software leave open in steps of layered networks, on published rows.

Minimised is the sum over rows of ``weight * log(1 + (log(predicted / measured) / scale)²)`` with a Gaussian prior on
the logarithm of every coefficient. Coefficients belong to device families and stacks, never to a network or a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from planner.estimate.device_family import family_of
from planner.estimate.layered_work import (
    LayeredCoefficients,
    LayeredParameters,
    layered_breakdown,
    product_kind,
)
from planner.estimate.training_run import LayeredNetwork, Stack, TrainingRun, TrainingSetup
from planner.validation.fitting import Prior
from planner.validation.reading import MeasuredRow

FloatArray = npt.NDArray[np.float64]
_RESIDUAL_SCALE = 0.12
_BATCH_DECIDES = ("clip", "sound", "sentence")
_KNOWN_BATCH, _UNKNOWN_BATCH = 1.0, 0.3
"""Weights: published rates of recurrent networks state no batch, which decides them; they may only settle the rest."""
_STEP = 1e-3
_EVALUATIONS = 40
_PRODUCTS = {
    "half": Prior(centre=0.45, spread=0.15),
    "tf32": Prior(centre=0.38, spread=0.125),
    "single": Prior(centre=1.05, spread=0.1),
}
"""Devices reach much the same part of their peak in convolutions; held tight, so that the few sources of one device,
whose hosts may be slow, do not make a slow device of it. Without tensor units the peak is easily reached, and
Winograd's algorithm needs fewer operations than are counted."""
_OLD_PRODUCTS = {"hopper": 0.63, "blackwell": 0.63}
"""Share of the peak that ``mma`` instructions reach where tensor units want asynchronous products of warp groups, which
few convolutions use (Luo et al., arXiv:2402.13499, section on tensor cores)."""
_KNOWN_DEVICES = {"volta": ("half", "single"), **dict.fromkeys(("ampere", "hopper", "blackwell"), ("half", "tf32"))}
"""Devices that are predicted without a row of theirs, by what is expected of them."""
DEVICE_PRIORS = {
    "memory": Prior(centre=0.85, spread=0.1),
    "grouped": Prior(centre=0.12, spread=0.8),
    "columns_half": Prior(centre=32.0, spread=0.2),
    "depth_half": Prior(centre=64.0, spread=0.2),
    "rows_half": Prior(centre=512.0, spread=0.3),
    "kernel_s": Prior(centre=5e-6, spread=0.3),
    "launch": Prior(centre=1.0, spread=0.2),
    "boxes": Prior(centre=1.0, spread=0.4),
}
SINK_PRIORS = {"launch": Prior(centre=0.05, spread=0.3), "kernel_s": Prior(centre=2e-5, spread=0.3)}
"""Of Ascend devices, which launch the kernels of a whole graph themselves."""
STACK_PRIORS = {
    "products": Prior(centre=1.0, spread=0.12),
    "memory": Prior(centre=1.0, spread=0.15),
    "grouped": Prior(centre=1.0, spread=0.2),
    "kernel_s": Prior(centre=1.0, spread=0.3),
    "unfused": Prior(centre=0.7, spread=0.4),
    "launch_s": Prior(centre=8e-6, spread=0.8),
    "casts": Prior(centre=0.1, spread=1.0),
    "step_overhead_s": Prior(centre=2e-3, spread=0.4),
    "exposed": Prior(centre=0.2, spread=0.7),
    "contention": Prior(centre=0.03, spread=0.5),
}
STACK_OWN_PRIORS: Mapping[str, Mapping[str, Prior]] = {
    Stack.EAGER: {"launch_s": Prior(centre=2e-5, spread=0.4), "casts": Prior(centre=0.8, spread=0.5)},
    Stack.TENSORFLOW: {"launch_s": Prior(centre=3e-5, spread=0.3)},
    Stack.MINDSPORE: {"launch_s": Prior(centre=8e-5, spread=0.6), "unfused": Prior(centre=0.3, spread=0.5)},
    Stack.MINDSPORE_TOOLKIT: {
        "launch_s": Prior(centre=8e-5, spread=0.6),
        "unfused": Prior(centre=0.3, spread=0.5),
        "kernel_s": Prior(centre=2.0, spread=0.3),
    },
}
"""PyTorch launches operators one by one and keeps images in planes, which tensor units do not take: half precision is
copied around convolutions. TensorFlow schedules operators one by one; MindSpore's graphs run as operators where no
device takes them whole."""
HOST_PRIORS = {
    "image": Prior(centre=2e-4, spread=0.5),
    "augmented image": Prior(centre=2e-4, spread=0.5),
    "annotated image": Prior(centre=5e-4, spread=0.5),
    "mosaic image": Prior(centre=3e-3, spread=1.0),
    "small image": Prior(centre=2e-4, spread=1.0),
    "small volume": Prior(centre=1e-3, spread=0.7),
    "volume": Prior(centre=1e-2, spread=1.0),
}
PYTHON_HOST_PRIORS = {
    "image": Prior(centre=6e-4, spread=0.5),
    "augmented image": Prior(centre=1.8e-3, spread=0.5),
    "annotated image": Prior(centre=2e-3, spread=1.0),
    "mosaic image": Prior(centre=5e-3, spread=1.0),
}
"""Where Python on the host transforms images."""
_BOUNDS = {"unfused": 1.0, "exposed": 1.0, "half": 1.0, "tf32": 1.0, "single": 1.6, "memory": 1.1, "contention": 0.2}


@dataclass(frozen=True, kw_only=True, eq=False)
class LayeredFit:
    """Fitted coefficients, and the logarithm of predicted over measured of the rows."""

    coefficients: LayeredCoefficients
    residuals: FloatArray


def _kind(run: TrainingRun) -> str:
    return run.network.sample if isinstance(run.network, LayeredNetwork) else ""


def priors_of(runs: Sequence[TrainingRun]) -> dict[tuple[str, str, str], Prior]:
    """Coefficients that `runs` depend on, as ``(devices or stacks, group, name)``."""
    found: dict[tuple[str, str, str], Prior] = {}
    for run in runs:
        family, stack = family_of(run.hardware.device_name), str(run.setup.stack)
        found["devices", family, product_kind(run)] = _product_prior(family, product_kind(run))
        device = DEVICE_PRIORS | SINK_PRIORS if family.startswith("ascend") else DEVICE_PRIORS
        found |= {("devices", family, name): prior for name, prior in device.items()}
        software = STACK_PRIORS | dict(STACK_OWN_PRIORS.get(stack, {}))
        found |= {("stacks", stack, name): prior for name, prior in software.items()}
        kind = _kind(run)
        host = PYTHON_HOST_PRIORS if run.setup.stack is Stack.MINDSPORE_TOOLKIT else HOST_PRIORS
        if kind in host:
            found["stacks", stack, f"host_{kind.replace(' ', '_')}_s"] = host[kind]
    for family, kinds in _KNOWN_DEVICES.items():
        expected = {kind: _product_prior(family, kind) for kind in kinds} | DEVICE_PRIORS
        found |= {("devices", family, name): prior for name, prior in expected.items()}
    return found


def _product_prior(family: str, kind: str) -> Prior:
    usual = _PRODUCTS[kind]
    return replace(usual, centre=usual.centre * _OLD_PRODUCTS.get(family, 1.0))


def fit_layered(rows: Sequence[MeasuredRow], near: LayeredCoefficients | None = None) -> LayeredFit:
    """Coefficients that predict `rows` best; a source counts with the square root of its number of rows.

    ``near`` is where the search begins, a fit on nearly the same rows; by default it begins at the priors.
    """
    runs = [row.run for row in rows if row.run]
    target = np.log([row.measured_time_s for row in rows])
    sources = [row.source for row in rows]
    weights = np.array([1 / np.sqrt(sources.count(source)) for source in sources])
    weights *= [_KNOWN_BATCH if _kind(run) not in _BATCH_DECIDES else _UNKNOWN_BATCH for run in runs]
    weights *= np.sqrt(len(rows)) / np.linalg.norm(weights)
    priors = priors_of(runs)
    keys = list(priors)
    centres = np.log([priors[key].centre for key in keys])
    spreads = np.array([priors[key].spread for key in keys])
    upper = np.log([_BOUNDS.get(key[2], np.inf) for key in keys])

    concerned = [_concerned(key, runs) for key in keys]

    def robust(predicted: FloatArray) -> FloatArray:
        scaled = (predicted - target) / _RESIDUAL_SCALE
        return np.asarray(np.sqrt(weights) * np.sign(scaled) * np.sqrt(np.log1p(scaled**2)))

    def residuals(theta: FloatArray) -> FloatArray:
        predicted = predicted_logarithms(runs, _coefficients(keys, theta))
        return np.concatenate([robust(predicted), (theta - centres) / spreads])

    def jacobian(theta: FloatArray) -> FloatArray:
        base = predicted_logarithms(runs, _coefficients(keys, theta))
        slopes = np.zeros((len(runs) + len(keys), len(keys)))
        for column, rows_concerned in enumerate(concerned):
            moved = theta.copy()
            moved[column] -= _STEP
            predicted = base.copy()
            predicted[rows_concerned] = predicted_logarithms(
                [runs[row] for row in rows_concerned], _coefficients(keys, moved)
            )
            slopes[: len(runs), column] = (robust(base) - robust(predicted)) / _STEP
            slopes[len(runs) + column, column] = 1 / spreads[column]
        return slopes

    start = centres if near is None else _logarithms(keys, near, centres)
    solution = least_squares(
        residuals, np.minimum(start, upper - 1e-3), jacobian, bounds=(-np.inf, upper), max_nfev=_EVALUATIONS,
        ftol=1e-5, xtol=1e-4,
    )  # fmt: skip
    coefficients = _coefficients(keys, solution.x)
    return LayeredFit(coefficients=coefficients, residuals=predicted_logarithms(runs, coefficients) - target)


def _concerned(key: tuple[str, str, str], runs: Sequence[TrainingRun]) -> list[int]:
    """Indices of the runs that a coefficient can change."""
    part, group, _ = key
    return [
        index
        for index, run in enumerate(runs)
        if group == (family_of(run.hardware.device_name) if part == "devices" else run.setup.stack)
    ]


def predicted_logarithms(runs: Sequence[TrainingRun], coefficients: LayeredCoefficients) -> FloatArray:
    """Logarithm of the predicted seconds of every run; equal runs are predicted once."""
    known: dict[tuple[int, str, TrainingSetup], float] = {}
    parameters: dict[tuple[str, str, str], LayeredParameters] = {}
    found = []
    for run in runs:
        key = id(run.network), run.hardware.hash, run.setup
        seconds = known.get(key)
        if seconds is None:
            group = family_of(run.hardware.device_name), str(run.setup.stack), product_kind(run)
            if group not in parameters:
                parameters[group] = coefficients.parameters(run)
            seconds = known[key] = sum(layered_breakdown(run, parameters[group]).values())
        found.append(seconds)
    return np.log(found)


def _logarithms(keys: Sequence[tuple[str, str, str]], known: LayeredCoefficients, centres: FloatArray) -> FloatArray:
    groups = {"devices": known.devices, "stacks": known.stacks}
    values = [
        groups[part].get(group, {}).get(name, math.exp(centre))
        for (part, group, name), centre in zip(keys, centres.tolist(), strict=True)
    ]
    return np.log(values)


def _coefficients(keys: Sequence[tuple[str, str, str]], theta: FloatArray) -> LayeredCoefficients:
    groups: dict[str, dict[str, dict[str, float]]] = {"devices": {}, "stacks": {}}
    for (part, group, name), value in zip(keys, np.exp(theta), strict=True):
        groups[part].setdefault(group, {})[name] = float(value)
    return LayeredCoefficients(**groups)
