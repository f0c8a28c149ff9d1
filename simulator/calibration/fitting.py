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
SERIAL_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WEIGHT = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured kernel: its work and its time; ``cached`` if its inputs lay in the caches."""

    kernel: Kernel
    dtype: str
    flops: float
    bytes_moved: float
    seconds: float
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFit:
    """Fitted speed of one class: overhead, bytes/s, FLOP/s by dtype, and how it was found.

    ``cached_bytes_per_s`` is 0 where nothing was measured in the caches.
    """

    overhead_s: float
    bytes_per_s: float
    flops_per_s: dict[str, float]
    rows: int
    error: float
    """Median relative error on the rows of the fit."""
    serial_share: float = 0.0
    cached_bytes_per_s: float = 0.0


def split_held_out(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Hold every fourth row back from the fit, to check it."""
    return (
        [row for index, row in enumerate(rows) if index % HELD_OUT != HELD_OUT - 1],
        [row for index, row in enumerate(rows) if index % HELD_OUT == HELD_OUT - 1],
    )


def predict_row(fit: KernelFit, row: Measured) -> float:
    """Evaluate the model of `simulator.kernels.kernel_time` for one measured row."""
    compute = row.flops / fit.flops_per_s[row.dtype] if row.flops else 0.0
    moving = row.bytes_moved / (fit.cached_bytes_per_s if row.cached else fit.bytes_per_s)
    return fit.overhead_s + max(compute, moving) + fit.serial_share * min(compute, moving)


def fit_kernel(rows: Sequence[Measured]) -> KernelFit:
    """Fit ``t = overhead + max(compute, moving) + serial_share min(compute, moving)`` to the rows of one class.

    With ``compute = flops / rate(dtype)`` and ``moving = bytes / bandwidth``, the bandwidth one of two: in the caches
    (at least as fast) and beyond. Minimises the mean of
    ``log(predicted / measured)^2``, long kernels weighing more, as they do in a step (by the fourth root of their
    time), by coordinate descent on the logarithms of the parameters with a shrinking step, for several shares.
    """
    shares = SERIAL_SHARES if any(row.flops > 0 for row in rows) else SERIAL_SHARES[:1]
    return min((_fit(rows, share) for share in shares), key=lambda found: found[0])[1]


def _fit(rows: Sequence[Measured], share: float) -> tuple[float, KernelFit]:
    """What is left to fit, and the fit, with a given serial share."""
    dtypes = sorted({row.dtype for row in rows if row.flops > 0})
    flops = np.array([[row.flops if row.dtype == dtype else 0.0 for dtype in dtypes] for row in rows])
    moved = np.array([row.bytes_moved for row in rows])
    seconds = np.array([row.seconds for row in rows])
    cached = np.array([row.cached for row in rows])

    weights = seconds**WEIGHT
    weights = weights / weights.sum()

    def loss(logs: NDArray[np.float64]) -> float:
        return float(weights @ np.log(_times(np.exp(logs), flops, moved, cached, share) / seconds) ** 2)

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
    errors = np.abs(_times(found, flops, moved, cached, share) / seconds - 1)
    return loss(logs), KernelFit(
        overhead_s=float(found[0]),
        bytes_per_s=float(found[1]),
        flops_per_s={dtype: float(rate) for dtype, rate in zip(dtypes, found[3:], strict=True)},
        rows=len(rows),
        error=float(np.median(errors)),
        serial_share=share,
        cached_bytes_per_s=float(max(found[1], found[2])) if cached.any() else 0.0,
    )


def _times(
    found: NDArray[np.float64],
    flops: NDArray[np.float64],
    moved: NDArray[np.float64],
    cached: NDArray[np.bool_],
    share: float,
) -> NDArray[np.float64]:
    """Model times (rows,) for parameters (overhead, two bandwidths, rates…) and work (rows, dtypes), (rows,)."""
    work = moved / np.where(cached, max(found[1], found[2]), found[1])
    if flops.shape[1]:
        compute = np.max(flops / found[3:], axis=1)
        work = np.maximum(work, compute) + share * np.minimum(work, compute)
    return np.asarray(found[0] + work)


def _first_guess(
    flops: NDArray[np.float64], moved: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    bandwidth = max(float(np.max(moved / seconds)), 1.0)
    rates = [max(float(np.max(column / seconds)), 1.0) for column in flops.T]
    return np.array([float(np.min(seconds)) * 0.8, bandwidth, bandwidth, *rates])
