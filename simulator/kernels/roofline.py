"""Time of one kernel on one device."""

from __future__ import annotations

from typing import overload

import numpy as np
from numpy.typing import NDArray

from simulator.hardware import Hardware
from simulator.program import Kernel

FloatArray = NDArray[np.float64]


@overload
def kernel_time(hardware: Hardware, kernel: Kernel, dtype: str, flops: float, bytes_moved: float) -> float: ...
@overload
def kernel_time(
    hardware: Hardware, kernel: Kernel, dtype: str, flops: FloatArray, bytes_moved: FloatArray
) -> FloatArray: ...
def kernel_time(
    hardware: Hardware, kernel: Kernel, dtype: str, flops: float | FloatArray, bytes_moved: float | FloatArray
) -> float | FloatArray:
    """Seconds of one kernel, by the roofline with a fixed cost per kernel.

    ``t = overhead + max(flops / (peak * e_c), bytes / (bandwidth * e_b))``; Williams, Waterman and
    Patterson, "Roofline", CACM 52(4), 2009, with the efficiencies ``e_c``, ``e_b`` of the kernel's class. The shorter
    of both counts with the class's ``serial_share``: processors without threads to hide it wait for memory. The part
    ``cached_share`` of the bytes moves at the class's speed in the caches instead (`simulator.caches`).
    A view moves nothing and costs nothing beyond its overhead, zero unless the profile says otherwise.

    Parameters
    ----------
    flops, bytes_moved
        floats, or arrays of one shape ``(n,)``: floating point operations and bytes read and written.
    """
    model = hardware.kernels[kernel]
    compute = np.asarray(flops, dtype=np.float64)
    memory = np.asarray(bytes_moved, dtype=np.float64)
    if kernel is Kernel.VIEW:
        seconds = np.full(np.broadcast(compute, memory).shape, model.overhead_s)
    else:
        # A kernel without arithmetic needs no peak, so copies of any dtype work on any device.
        peak = hardware.peak(dtype, kernel) if np.any(compute > 0) else np.inf
        computing = compute / (peak * model.compute_efficiency)
        moving = memory / hardware.bandwidth(kernel)
        seconds = model.overhead_s + np.maximum(computing, moving)
        if model.serial_share:
            seconds = seconds + model.serial_share * np.minimum(computing, moving)
    return float(seconds) if seconds.ndim == 0 else seconds
