"""Time of matrix products by shape: tiles, waves of tiles over the multiprocessors, depth, memory."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from simulator.hardware import Hardware, MatmulModel
from simulator.kernels.roofline import kernel_time
from simulator.program import Kernel

FloatArray = NDArray[np.float64]
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
