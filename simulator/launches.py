"""The pace of the host: kernels of a pass through a unit take at least as long as the host takes to launch them.

A host launches kernels one after the other and runs ahead of its device while that is at work. Where the kernels and
messages of a pass are shorter than their launches, the device waits for the host, and its kernels end at the pace at
which they are launched. A profile states the time of one launch (``training.planned_launch_s``): what devices and the
usual software need for an operator of a network. Without it the host counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simulator.hardware import Hardware
from simulator.program import COMPUTE_STREAM, Kernel, Task

FloatArray = npt.NDArray[np.float64]
NAME = "planned_launch_s"
NOT_LAUNCHED = frozenset({Kernel.VIEW, Kernel.COPY})
"""Kernels without a launch of their own: views cost nothing, and slices and masks go with what reads them."""


def launch_time(hardware: Hardware) -> float:
    """Seconds in which the host launches one kernel; 0 where the profile does not say."""
    return hardware.training.get(NAME, 0.0)


def paced(tasks: Sequence[Task], seconds: FloatArray, hardware: Hardware) -> FloatArray:
    """Seconds (tasks,) with kernels slowed down evenly where the host launches those of their pass more slowly.

    With l the time of a launch, n kernels of a pass that take C seconds together, and messages that take X, kernels
    take ``max(C, n l - X)``.

    Parameters
    ----------
    seconds : array, shape (tasks,)
        What each task takes alone.
    """
    each = launch_time(hardware)
    if not each:
        return seconds
    number = np.array([task.launched_with for task in tasks], dtype=np.int64)
    runs = np.array([task.collective is None and task.stream == COMPUTE_STREAM for task in tasks], dtype=np.bool_)
    counts = np.array([task.kernel not in NOT_LAUNCHED for task in tasks], dtype=np.bool_) & runs & (number >= 0)
    size = int(number.max(initial=-1)) + 1
    if not counts.any():
        return seconds
    inside = number >= 0
    total = np.bincount(number[inside], seconds[inside], size)
    kernels = np.bincount(number[counts], seconds[counts], size)
    launches = np.bincount(number[counts], minlength=size) * each
    waits = np.maximum(launches - total, 0.0)
    slower = 1.0 + waits / np.maximum(kernels, 1e-30)
    found: FloatArray = np.where(counts, seconds * slower[np.where(counts, number, 0)], seconds)
    return found
