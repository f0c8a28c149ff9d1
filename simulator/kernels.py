"""Time of kernels on one device: by the roofline of their class, or by shape (products, attention, convolutions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware import AttentionModel, Hardware, MatmulModel
from simulator.program import CONVOLUTIONS, PRODUCTS, Kernel

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
    ``cached_share`` of the bytes moves at the class's speed in the caches instead (`simulator.timing`).
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


ELEMENT_BYTES: Mapping[str, float] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float4_e2m1fn": 0.5625,
}  # fmt: skip
"""Bytes of a factor's element; 16 of 4 bits share a scale of 8 (NVFP4, arXiv:2509.25149)."""
_ALIKE = {
    "float16": "bfloat16",
    "bfloat16": "float16",
    "float8_e5m2": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e5m2",
    "float4_e2m1fn": "float8_e4m3fn",
}


def matmul_time(
    hardware: Hardware, dtype: str, m: ArrayLike, n: ArrayLike, k: ArrayLike, batch: ArrayLike = 1.0
) -> FloatArray:
    """Seconds of `batch` products of an ``(m, k)`` by a ``(k, n)`` matrix in one kernel.

    The output is cut into tiles that the multiprocessors S work off in waves; the best tile counts:
    ``compute = W / (peak * e_c * utilisation(W) * sustained_speed)``, with the work ``W = min over tiles of
    2 * S * waves * tile_m * tile_n / tile_efficiency * (k + fill_depth)``. ``waves`` lies between ``tiles / S`` and
    its next integer as far as ``wave_share`` says (schedulers that split the last wave are near 0), and goes down to
    ``1 - split_share`` where the tiles do not fill one wave and are split along k.
    ``t = overhead + max(compute, bytes / (bandwidth * e_b))``. The quantisation is that of NVIDIA, "Matrix
    Multiplication Background User's Guide", 2023; the efficiencies are the profile's.
    Without a shape model in the profile the roofline of the class counts.
    """
    rows, columns, depth, number = (np.asarray(value, dtype=np.float64) for value in (m, n, k, batch))
    size = ELEMENT_BYTES.get(dtype, 4)
    inputs, outputs = number * (rows + columns) * depth * size, number * rows * columns * max(size, 2)
    model = matmul_model(hardware, dtype)
    if model is None:
        flops = 2.0 * number * rows * columns * depth
        return np.asarray(kernel_time(hardware, Kernel.MATMUL, dtype, flops, inputs + outputs))
    peak = hardware.peak(dtype, Kernel.MATMUL) * model.compute_efficiency * hardware.sustained_matmul_speed
    work = padded_work(model, hardware.multiprocessors, rows, columns, depth, number)
    compute = work / (peak * utilisation(model.utilisation, work))
    memory = (inputs + outputs) / (hardware.memory_bandwidth * model.bandwidth_efficiency)
    return np.asarray(model.overhead_s + np.maximum(compute, memory))


def grouped_matmul_time(
    hardware: Hardware, dtype: str, groups: ArrayLike, m: ArrayLike, n: ArrayLike, k: ArrayLike
) -> FloatArray:
    """Seconds of `groups` products of one shape in one kernel, `m` rows each: the experts of a layer.

    Grouped kernels reach half the rate of a batched product of the same shape where a group has
    ``grouped_matmul_rows`` rows, all of it with many. Rows are the tokens of an expert, which are the depth of the
    gradient of its weights. A single group is a plain product.
    """
    batched = matmul_time(hardware, dtype, m, n, k, groups)
    tokens = np.maximum(np.minimum(np.asarray(m, dtype=np.float64), np.asarray(k, dtype=np.float64)), 1.0)
    return np.where(np.asarray(groups) > 1, batched * (1.0 + hardware.grouped_matmul_rows / tokens), batched)


def matmul_model(hardware: Hardware, dtype: str) -> MatmulModel | None:
    """Shape model of the dtype that counts, of one as wide or the next wider, or of the first there is."""
    models = hardware.matmul_models
    if not models:
        return None
    counted = hardware.peak_dtype(dtype, Kernel.MATMUL)
    return models.get(counted) or models.get(_ALIKE.get(counted, "")) or next(iter(models.values()))


def padded_work(
    model: MatmulModel, multiprocessors: int, m: FloatArray, n: FloatArray, k: FloatArray, batch: FloatArray
) -> FloatArray:
    """FLOPs that the multiprocessors have time for while they compute `batch` products of shape ``(m, n, k)``."""
    dims = max(m.ndim, n.ndim, batch.ndim)
    height, width, cost = _tiles(model.tiles, model.tile_loss, dims)
    share = batch * np.ceil(m / height) * np.ceil(n / width) / multiprocessors
    waves = np.maximum(share, 1.0 - model.split_share + model.split_share * share)
    waves = waves + model.wave_share * (np.ceil(share) - np.maximum(share, 1.0))
    return np.asarray(2.0 * multiprocessors * (waves * cost).min(axis=0) * (k + model.fill_depth))


def utilisation(points: tuple[tuple[float, float], ...], flops: FloatArray) -> FloatArray | float:
    """Factor on the rate for work of `flops`, padding included, interpolated log-log between the profile's points."""
    if not points:
        return 1.0
    sizes, factors = _logarithms(points)
    return np.asarray(np.exp(np.interp(np.log10(np.maximum(flops, 1.0)), sizes, factors)))


@lru_cache(maxsize=64)
def _tiles(
    tiles: tuple[tuple[int, int], ...], tile_loss: float, dims: int
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Height, width and cost in outputs of every tile, with `dims` axes behind the axis of tiles."""
    shape = (len(tiles), *(1,) * dims)
    height = np.array([tile[0] for tile in tiles], dtype=np.float64).reshape(shape)
    width = np.array([tile[1] for tile in tiles], dtype=np.float64).reshape(shape)
    # Operands loaded for each product grow with the inverse sides of a tile.
    return height, width, height * width * (1.0 + tile_loss * 64.0 * (1.0 / height + 1.0 / width))


@lru_cache(maxsize=64)
def _logarithms(points: tuple[tuple[float, float], ...]) -> tuple[FloatArray, FloatArray]:
    table = np.array(points, dtype=np.float64)
    return table[:, 0], np.log(table[:, 1])


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
