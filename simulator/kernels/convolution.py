"""Time of convolutions by shape: implicit matrix products."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware import Hardware
from simulator.kernels.matmul import ELEMENT_BYTES, matmul_model, padded_work, utilisation
from simulator.kernels.roofline import kernel_time
from simulator.program import Kernel

FloatArray = NDArray[np.float64]
COPIES, SINGLE_COPIES = "planned_convolution_copies", "planned_single_convolution_copies"
"""Keys of a profile's training: by how much of what a convolution moves it is copied around, in 16 bits and in float32
on tensor units, where the software is known and leaves channels in front: tensor units take them last."""
_HALF, _SINGLE = 2, 4
_SMALL_WINDOW = 9.0
"""Places of a window that a kernel without products reads once."""


def convolution_time(
    hardware: Hardware,
    dtype: str,
    *,
    pixels: ArrayLike,
    in_channels: ArrayLike,
    out_channels: ArrayLike,
    area: ArrayLike,
    groups: ArrayLike = 1.0,
    input_pixels: ArrayLike | None = None,
) -> FloatArray:
    """Seconds of one convolution, or of one of its two gradients, which take the same products.

    ``pixels`` are output positions of the whole batch (``batch * height * width``), ``area`` the window's
    (``9`` for 3 x 3), ``input_pixels`` the input's positions, as many unless given. It is the product of a
    ``(pixels, in_channels / groups * area)`` by an ``(…, out_channels / groups)`` matrix for every group
    (Chetlur et al., "cuDNN", 2014), at ``convolution_efficiency`` of a matrix product's rate; it reads input and
    weights once. Groups so narrow that a kernel without products is faster use that: it works on the vector units, and
    reads windows wider than 3 x 3 again from caches, at ``grouped_convolution_efficiency`` of the memory's bandwidth
    with the side of the window over 3 (`planner.published.layered.table` has the same of whole steps).
    """
    positions, wide, narrow, window, parts = (
        np.asarray(value, dtype=np.float64) for value in (pixels, in_channels, out_channels, area, groups)
    )
    size = ELEMENT_BYTES.get(dtype, 4)
    read = positions if input_pixels is None else np.asarray(input_pixels, dtype=np.float64)
    depth, columns = wide * window / parts, narrow / parts
    moved = size * (read * wide + positions * narrow + depth * narrow)
    flops = 2.0 * positions * depth * narrow
    model, efficiency = matmul_model(hardware, dtype), hardware.convolution_efficiency
    if model is None or efficiency is None:
        return np.asarray(kernel_time(hardware, Kernel.CONVOLUTION, dtype, flops, moved))
    return convolution_kernel_time(
        hardware, dtype, groups=parts, rows=positions, columns=columns, depth=depth, passes=1.0, moved=moved
    )


def convolution_kernel_time(
    hardware: Hardware,
    dtype: str,
    *,
    groups: FloatArray,
    rows: FloatArray,
    columns: FloatArray,
    depth: FloatArray,
    passes: FloatArray | float,
    moved: FloatArray,
) -> FloatArray:
    """Seconds of `passes` kernels of one convolution's shape; `convolution_time` has the formula.

    The profile must have ``convolution_efficiency`` and a model of products.

    Parameters
    ----------
    groups, rows, columns, depth
        The products that the convolution comes to: ``(rows, depth)`` by ``(depth, columns)`` for each group.
    moved
        Bytes that all passes read and write.
    """
    model, efficiency = matmul_model(hardware, dtype), hardware.convolution_efficiency
    assert model is not None
    assert efficiency is not None
    rate = hardware.peak(dtype, Kernel.CONVOLUTION)
    peak = rate * model.compute_efficiency * efficiency * hardware.sustained_matmul_speed
    work = padded_work(model, hardware.multiprocessors, rows, columns, depth, groups)
    compute = passes * work / (peak * utilisation(model.utilisation, work))
    roofline = hardware.kernels[Kernel.CONVOLUTION]
    seconds = np.maximum(compute, moved / (hardware.memory_bandwidth * roofline.bandwidth_efficiency))
    flops = passes * 2.0 * groups * rows * columns * depth
    vector = flops / (rate * hardware.kernels[Kernel.ELEMENTWISE].compute_efficiency)
    share = hardware.grouped_convolution_efficiency or roofline.bandwidth_efficiency
    again = np.sqrt(np.maximum(depth / _SMALL_WINDOW, 1.0)) if hardware.grouped_convolution_efficiency else 1.0
    direct = np.maximum(vector, moved * again / (hardware.memory_bandwidth * share))
    key = {_HALF: COPIES, _SINGLE: SINGLE_COPIES}.get(int(ELEMENT_BYTES.get(dtype, 0)), "")
    copied = hardware.training.get(key, 0.0)
    copies = copied * moved / (hardware.memory_bandwidth * hardware.kernels[Kernel.COPY].bandwidth_efficiency)
    kernels = np.where(groups > 1.0, np.minimum(seconds, direct), seconds)
    return np.asarray(passes * roofline.overhead_s + kernels + copies)
