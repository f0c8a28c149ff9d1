"""The pace of a machine: typical kernels, timed when it is calibrated and beside a run, on all its ranks together.

Clocks, other programs and other machines on the same host change how fast a machine computes, and how much processes on
it slow each other down, from one minute to the next. The same few kernels on both occasions, run by as many processes
at the same time, tell that from an error of a prediction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from simulator.calibration.cases import all_cases
from simulator.calibration.timing import repeated_case, synchronize

TYPICAL = (
    "mm 256x768x3072",
    "mm 64x1024x4096",
    "backward of conv 16x256x4x4 to 256, 3x3",
    "gelu 524288",
    "adam 4194304",
)
"""Products of arithmetic and of weights from memory, convolutions, activations, and updates from memory."""


class Pace:
    """Typical kernels in float32, ready to be timed again and again by one rank of some that do the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.name in TYPICAL and c.dtype == "float32"]
        # Inputs are the same each time: between two calls of one kernel the others have filled the caches.
        self._runs = [repeated_case(case, device, turn_bytes=0) for case in cases]
        for run in self._runs:
            run(1)
        synchronize(device)

    def seconds(self) -> float:
        """Seconds that one call of each kernel takes by the wall clock, which a step is timed by."""
        start = time.perf_counter()
        for run in self._runs:
            run(1)
        synchronize(self._device)
        return time.perf_counter() - start


def timed_paces(pace: Pace, meet: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of some rounds of one rank; `meet` waits for the others before each."""
    found = []
    for _ in range(rounds):
        meet()
        found.append(pace.seconds())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """The median of rounds, each its slowest rank's, for which a step waits, and their middle 80 % over it."""

    median_s: float
    spread: float


def paces_of(ranks: Sequence[Sequence[float]] | NDArray[np.float64]) -> Paces:
    """Pace of a machine from the rounds of its ranks (ranks, rounds)."""
    low, median, high = np.quantile(np.max(np.asarray(ranks), axis=0), (0.1, 0.5, 0.9)).tolist()
    return Paces(median_s=median, spread=(high - low) / median)
