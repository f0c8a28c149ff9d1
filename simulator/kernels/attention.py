"""Time of attention by shape: fused kernels, and the products and the softmax they replace."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware import AttentionModel, Hardware
from simulator.kernels.matmul import ELEMENT_BYTES
from simulator.kernels.roofline import kernel_time
from simulator.program import Kernel

FloatArray = NDArray[np.float64]
AttentionKind = Literal["flash", "flash2", "vendor"]
ATTENTION_KINDS: tuple[AttentionKind, ...] = ("flash", "flash2", "vendor")
BACKWARD_FLOPS = 2.5  # five products where forward has two: the scores are computed again
_INSTEAD = {"flash2": ("vendor", "flash"), "vendor": ("flash2", "flash"), "flash": ("flash2", "vendor")}


def attention_time(
    hardware: Hardware,
    dtype: str,
    *,
    batch: ArrayLike,
    heads: ArrayLike,
    key_value_heads: ArrayLike,
    queries: ArrayLike,
    keys: ArrayLike,
    head_size: ArrayLike,
    causal: bool,
    backward: bool,
    kind: AttentionKind = "flash2",
) -> FloatArray:
    """Seconds of fused attention, forward or backward; a causal mask halves the work.

    Blocks of ``tile_queries`` queries of one head run in waves over the multiprocessors S, each over all
    its keys: ``compute = S * waves * tile_queries * 4 * (pairs / queries + fill_keys)
    * (head_size + fill_head_size) / (peak * e_c)``, 2.5 times that backward (Dao, "FlashAttention-2", 2023);
    ``fill_head_size`` stands for the exponentials, which do not depend on the head's size.
    ``t = overhead + max(compute, bytes / (bandwidth * e_b))``. Without a model in the profile the roofline
    of the class counts.
    """
    count, own, shared, rows, columns, size = (
        np.asarray(value, dtype=np.float64) for value in (batch, heads, key_value_heads, queries, keys, head_size)
    )
    passes = BACKWARD_FLOPS if backward else 1.0
    seen = columns * (0.5 if causal else 1.0)
    # Forward reads q, k, v and writes o; backward reads these and do, and writes dq, dk, dv.
    tensors = count * size * (own * rows + shared * columns) * ELEMENT_BYTES.get(dtype, 4)
    moved = tensors * (4.0 if backward else 2.0)
    if not hardware.attention_models:
        flops = passes * 4.0 * count * own * rows * seen * size
        return np.asarray(kernel_time(hardware, Kernel.ATTENTION, dtype, flops, moved))
    model = attention_model(hardware, kind, backward=backward)
    return attention_kernel_time(
        hardware, dtype, model, heads=count * own, queries=rows, seen=seen, head_size=size, passes=passes, moved=moved
    )


def attention_kernel_time(
    hardware: Hardware,
    dtype: str,
    model: AttentionModel,
    *,
    heads: FloatArray,
    queries: FloatArray,
    seen: FloatArray,
    head_size: FloatArray,
    passes: FloatArray | float,
    moved: FloatArray,
) -> FloatArray:
    """Seconds of a fused kernel by one direction's model; `attention_time` has the formula.

    Parameters
    ----------
    heads
        Those of all sequences together.
    seen
        Keys that a query attends to on average.
    passes
        Two products each: 1 forward, 2.5 backward.
    moved
        Bytes read and written.
    """
    share = heads * np.ceil(queries / model.tile_queries) / hardware.multiprocessors
    waves = np.maximum(share, 1.0)
    waves = waves + model.wave_share * (np.ceil(share) - waves)
    peak = hardware.peak(dtype, Kernel.ATTENTION) * model.compute_efficiency
    pairs = hardware.multiprocessors * waves * model.tile_queries * (seen + model.fill_keys)
    compute = passes * 4.0 * pairs * (head_size + model.fill_head_size) / peak
    memory = moved / (hardware.memory_bandwidth * model.bandwidth_efficiency)
    return np.asarray(model.overhead_s + np.maximum(compute, memory))


def attention_model(hardware: Hardware, kind: AttentionKind = "flash2", *, backward: bool) -> AttentionModel:
    """The profile's model of a kind of attention in one direction, or of the kind most like it; there must be one."""
    models = hardware.attention_models
    passes = models.get(kind) or next(models[other] for other in _INSTEAD[kind] if other in models)
    return passes.backward if backward else passes.forward
