"""Time of kernels whose work goes by shape: products, convolutions and fused attention by one description."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.hardware import AttentionModel, Hardware
from simulator.kernels.attention import ATTENTION_KINDS, attention_kernel_time, attention_model
from simulator.kernels.convolution import convolution_kernel_time
from simulator.kernels.matmul import grouped_matmul_time, matmul_model, matmul_time
from simulator.program import CONVOLUTIONS, PRODUCTS, Kernel

FloatArray = NDArray[np.float64]
_BACKWARD = 1.5
"""Passes from which attention goes backward."""


def has_shape_model(hardware: Hardware, kernel: Kernel) -> bool:
    """Whether the profile says how the time of `kernel` depends on its shape."""
    if kernel in PRODUCTS:
        return bool(hardware.matmul_models)
    if kernel in CONVOLUTIONS:
        return bool(hardware.matmul_models) and hardware.convolution_efficiency is not None
    return kernel is Kernel.ATTENTION and bool(hardware.attention_models)


def shaped_time(
    hardware: Hardware,
    kernel: Kernel,
    dtype: str,
    shape: Sequence[FloatArray],
    flops: FloatArray,
    bytes_moved: FloatArray,
) -> FloatArray:
    """Seconds (n,) of kernels by shape; `has_shape_model` must hold.

    Parameters
    ----------
    shape
        Four arrays (n,), as `simulator.program.Task.shape` has them.
    flops, bytes_moved
        Arrays (n,). A product knows both from its shape; of a convolution and of attention the operations say how
        many passes of that shape run: both gradients of a convolution are two, a backward attention is 2.5.
    """
    first, second, third, fourth = shape
    if kernel is Kernel.GROUPED_MATMUL:
        return grouped_matmul_time(hardware, dtype, first, second, third, fourth)
    if kernel is Kernel.MATMUL:
        return matmul_time(hardware, dtype, second, third, fourth, first)
    whole = np.maximum(first * second * third * fourth, 1.0)
    if kernel in CONVOLUTIONS:
        passes = flops / (2.0 * whole)
        return convolution_kernel_time(
            hardware, dtype, groups=first, rows=second, columns=third, depth=fourth, passes=passes, moved=bytes_moved
        )
    passes = flops / (4.0 * whole)
    forward, backward = (
        attention_kernel_time(
            hardware, dtype, model, heads=first, queries=second, seen=third, head_size=fourth,
            passes=passes, moved=bytes_moved,
        )
        for model in (_attention(hardware, backward=False), _attention(hardware, backward=True))
    )  # fmt: skip
    return np.asarray(np.where(passes > _BACKWARD, backward, forward))


def best_rate(hardware: Hardware, kernel: Kernel, dtype: str) -> float:
    """Operations a second that no kernel of a class exceeds, whatever its shape; only products and attention."""
    peak = hardware.peak(dtype, kernel)
    if kernel is Kernel.ATTENTION and hardware.attention_models:
        models = (_attention(hardware, backward=backward) for backward in (False, True))
        return peak * max(model.compute_efficiency for model in models)
    model = matmul_model(hardware, dtype)
    if kernel not in PRODUCTS or model is None:
        return peak * hardware.kernels[kernel].compute_efficiency
    loss = min(1.0 + model.tile_loss * 64.0 * (1.0 / rows + 1.0 / columns) for rows, columns in model.tiles)
    factor = max([factor for _, factor in model.utilisation] or [1.0])
    return peak * model.compute_efficiency * hardware.sustained_matmul_speed * factor / loss


def _attention(hardware: Hardware, *, backward: bool) -> AttentionModel:
    """The model of the kind of fused attention that runs."""
    kinds = {str(kind): kind for kind in ATTENTION_KINDS}
    return attention_model(hardware, kinds.get(hardware.attention, "flash2"), backward=backward)
