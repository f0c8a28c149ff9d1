"""Fitting the kernel model of a profile to measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.program import Kernel

WIDEST = 1.5
NARROWEST = 1e-3
HELD_OUT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured kernel: its work and its time."""

    kernel: Kernel
    dtype: str
    flops: float
    bytes_moved: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Fitted speed of one class: overhead, bytes/s, FLOP/s by dtype, and how it was found."""

    overhead_s: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    rows: int
    error: float
    """Median relative error on the rows of the fit."""


def split_held_out(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Hold every fourth row back from the fit, to check it."""
    return (
        [row for index, row in enumerate(rows) if index % HELD_OUT != HELD_OUT - 1],
        [row for index, row in enumerate(rows) if index % HELD_OUT == HELD_OUT - 1],
    )


def predict_row(fit: KernelFit, row: Measured) -> float:
    """Evaluate the model of `simulator.kernels.kernel_time` for one measured row."""
    compute = row.flops / fit.flops_per_s[row.dtype] if row.flops else 0.0
    return fit.overhead_s + max(compute, row.bytes_moved / fit.bytes_per_s)


def fit_kernel(rows: Sequence[Measured]) -> KernelFit:
    """Fit ``t = overhead + max(flops / rate(dtype), bytes / bandwidth)`` to the rows of one class.

    Minimises the mean of ``log(predicted / measured)^2``, which weighs short and long kernels alike, by
    coordinate descent on the logarithms of the parameters with a shrinking step.
    """
    dtypes = sorted({row.dtype for row in rows if row.flops > 0})
    flops = np.array([[row.flops if row.dtype == dtype else 0.0 for dtype in dtypes] for row in rows])
    moved = np.array([row.bytes_moved for row in rows])
    seconds = np.array([row.seconds for row in rows])

    def loss(logs: NDArray[np.float64]) -> float:
        return float(np.mean(np.log(_times(np.exp(logs), flops, moved) / seconds) ** 2))

    logs = np.log(_first_guess(flops, moved, seconds))
    step = WIDEST
    while step > NARROWEST:
        best = loss(logs)
        for index in range(len(logs)):
            for change in (step, -step):
                trial = logs.copy()
                trial[index] += change
                if loss(trial) < best - 1e-12:
                    logs, best = trial, loss(trial)
        step *= 0.8
    found = np.exp(logs)
    errors = np.abs(_times(found, flops, moved) / seconds - 1)
    return KernelFit(
        overhead_s=float(found[0]),
        bytes_per_s=float(found[1]),
        flops_per_s={dtype: float(rate) for dtype, rate in zip(dtypes, found[2:], strict=True)},
        rows=len(rows),
        error=float(np.median(errors)),
    )


def _times(found: NDArray[np.float64], flops: NDArray[np.float64], moved: NDArray[np.float64]) -> NDArray[np.float64]:
    """Model times (rows,) for parameters (overhead, bandwidth, rates…) and work (rows, dtypes), (rows,)."""
    work = moved / found[1]
    if flops.shape[1]:
        work = np.maximum(work, np.max(flops / found[2:], axis=1))
    return np.asarray(found[0] + work)


def _first_guess(
    flops: NDArray[np.float64], moved: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    bandwidth = max(float(np.max(moved / seconds)), 1.0)
    rates = [max(float(np.max(column / seconds)), 1.0) for column in flops.T]
    return np.array([float(np.min(seconds)) * 0.8, bandwidth, *rates])
