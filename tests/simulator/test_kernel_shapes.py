"""Kernel times by shape: quantisation, limits, monotony, arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray

from simulator.hardware import AttentionModel, AttentionPasses, Hardware, MatmulModel
from simulator.kernels import (
    attention_time,
    convolution_time,
    grouped_matmul_time,
    kernel_time,
    matmul_time,
    shaped_time,
)
from simulator.profiles import load_profile
from simulator.program import Kernel

profile = cache(load_profile)
SIDE = st.integers(min_value=1, max_value=20_000)
PART = st.floats(min_value=0, max_value=1)
MODEL = MatmulModel(
    tiles=((256, 128), (128, 128), (64, 64)),
    compute_efficiency=0.9,
    bandwidth_efficiency=0.8,
    overhead_s=3e-6,
    fill_depth=100.0,
    tile_loss=0.2,
    wave_share=1.0,
    utilisation=((9.0, 0.5), (10.0, 0.9), (12.0, 1.0)),
)
FUSED = AttentionModel(
    compute_efficiency=0.6,
    bandwidth_efficiency=0.8,
    overhead_s=5e-6,
    tile_queries=128,
    fill_keys=100.0,
    fill_head_size=20.0,
    wave_share=0.5,
)


def hardware(model: MatmulModel = MODEL, **changes: object) -> Hardware:
    """An A100 with given models, whatever its profile says."""
    models = {
        "multiprocessors": 108,
        "matmul_models": {"bfloat16": model},
        "sustained_matmul_speed": 1.0,
        "grouped_matmul_rows": 128.0,
        "convolution_efficiency": 0.5,
        "grouped_convolution_efficiency": None,
        "attention_models": {"flash2": AttentionPasses(forward=FUSED, backward=FUSED)},
    }
    return replace(profile("dgx-a100"), **{**models, **changes})  # type: ignore[arg-type]


@st.composite
def matmul_models(draw: st.DrawFn) -> MatmulModel:
    """Any model that a profile may hold."""
    low = draw(st.floats(min_value=0.2, max_value=1))
    return MatmulModel(
        tiles=tuple(draw(st.lists(st.tuples(st.integers(16, 512), st.integers(16, 512)), min_size=1, max_size=4))),
        compute_efficiency=draw(st.floats(min_value=0.1, max_value=1)),
        bandwidth_efficiency=draw(st.floats(min_value=0.1, max_value=1)),
        overhead_s=draw(st.floats(min_value=0, max_value=1e-4)),
        fill_depth=draw(st.floats(min_value=0, max_value=1e3)),
        tile_loss=draw(st.floats(min_value=0, max_value=2)),
        wave_share=draw(PART),
        split_share=draw(PART),
        utilisation=((9.0, low), (11.0, min(1.0, 3 * low))),
    )


def seconds(machine: Hardware, m: float, n: float, k: float, batch: float = 1.0) -> float:
    return float(matmul_time(machine, "bfloat16", m, n, k, batch))


def test_a_wave_takes_one_tile_of_each_multiprocessor() -> None:
    one = replace(MODEL, tiles=((128, 128),), utilisation=(), tile_loss=0.0, overhead_s=0.0, fill_depth=0.0)
    machine = hardware(one)
    full = seconds(machine, 128 * 12, 128 * 9, 4096)  # 108 tiles
    assert full == pytest.approx(2 * 128 * 12 * 128 * 9 * 4096 / (312e12 * 0.9))
    assert seconds(machine, 128 * 12 + 1, 128 * 9, 4096) == pytest.approx(2 * full)  # 117 tiles, 2 waves
    assert seconds(machine, 100, 100, 4096) == pytest.approx(full)  # one tile takes as long as a wave
    split = hardware(replace(one, split_share=1.0))
    assert seconds(split, 128 * 3, 128 * 9, 40960) == pytest.approx(10 * full / 4)


@given(matmul_models(), SIDE, SIDE, SIDE, st.integers(1, 64), SIDE)
@settings(max_examples=60, deadline=None)
def test_products_are_never_faster_than_the_peaks_and_grow(
    model: MatmulModel, m: int, n: int, k: int, batch: int, more: int
) -> None:
    machine = hardware(model)
    time = seconds(machine, m, n, k, batch)
    assert time >= 2 * batch * m * n * k / machine.peak("bfloat16")
    assert time >= 2 * batch * (m * n + n * k + m * k) / machine.memory_bandwidth
    slack = 1 + 1e-9
    assert time <= seconds(machine, m + more, n, k, batch) * slack
    assert time <= seconds(machine, m, n + more, k, batch) * slack
    assert time <= seconds(machine, m, n, k + more, batch) * slack
    assert time <= seconds(machine, m, n, k, batch + more) * slack


@given(st.lists(st.tuples(SIDE, SIDE, SIDE), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None)
def test_arrays_give_what_single_shapes_give(shapes: list[tuple[int, int, int]]) -> None:
    machine = hardware()
    m, n, k = (np.array(column, dtype=float) for column in zip(*shapes, strict=True))
    assert matmul_time(machine, "bfloat16", m, n, k).tolist() == [seconds(machine, *shape) for shape in shapes]
    square = matmul_time(machine, "bfloat16", m[:, None], n[None, :], 512.0)
    assert square.shape == (len(shapes), len(shapes))
    assert square[0, -1] == seconds(machine, m[0], n[-1], 512)

    def attention(rows: ArrayLike, heads: ArrayLike) -> NDArray[np.float64]:
        return attention_time(
            machine,
            "bfloat16",
            batch=2,
            heads=heads,
            key_value_heads=4,
            queries=rows,
            keys=rows,
            head_size=64,
            causal=True,
            backward=False,
        )

    assert attention(m, n).tolist() == [float(attention(one, two)) for one, two in zip(m, n, strict=True)]


def test_wide_units_of_other_dtypes_use_the_model_with_their_own_peak() -> None:
    machine = hardware(replace(MODEL, overhead_s=0.0, utilisation=()))
    args = (8192, 8192, 8192)
    slow, fast = (float(matmul_time(machine, dtype, *args)) for dtype in ("float32", "bfloat16"))
    assert slow / fast == pytest.approx(312 / 19.5)
    assert float(matmul_time(machine, "float16", *args)) == fast


def test_grouped_products_are_slower_than_one_of_all_rows() -> None:
    machine = hardware()
    grouped = grouped_matmul_time(machine, "bfloat16", 8, 512, 4096, 4096)
    assert float(grouped) > seconds(machine, 8 * 512, 4096, 4096)
    assert float(grouped) == pytest.approx(seconds(machine, 512, 4096, 4096, 8) * 1.25)
    assert float(grouped_matmul_time(machine, "bfloat16", 1, 512, 4096, 4096)) == seconds(machine, 512, 4096, 4096)
    shape = [np.array([size]) for size in (8.0, 512.0, 4096.0, 4096.0)]
    nothing = np.zeros(1)
    planned = shaped_time(machine, Kernel.GROUPED_MATMUL, "bfloat16", shape, nothing, nothing)
    assert planned == pytest.approx(float(grouped))


@given(st.integers(1, 16), st.integers(1, 64), st.integers(1, 8192), st.sampled_from([64, 128, 256]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_fused_attention_keeps_below_the_peak_and_grows(
    batch: int, heads: int, tokens: int, size: int, causal: bool
) -> None:
    machine = hardware()

    def time(rows: int, columns: int, *, backward: bool = False) -> float:
        return float(
            attention_time(
                machine,
                "bfloat16",
                batch=batch,
                heads=heads,
                key_value_heads=heads,
                queries=rows,
                keys=columns,
                head_size=size,
                causal=causal,
                backward=backward,
            )
        )

    forward = time(tokens, tokens)
    flops = 4 * batch * heads * tokens**2 * size * (0.5 if causal else 1)
    assert forward >= flops / machine.peak("bfloat16")
    assert time(tokens, tokens, backward=True) >= forward
    assert time(tokens + 64, tokens) >= forward
    assert time(tokens, tokens + 64) > forward or forward <= FUSED.overhead_s * 1.5


def test_a_causal_mask_halves_long_attention_and_a_missing_kind_uses_another() -> None:
    def time(machine: Hardware, *, causal: bool, kind: str = "flash2") -> float:
        return float(
            attention_time(
                machine,
                "bfloat16",
                batch=4,
                heads=32,
                key_value_heads=8,
                queries=32768,
                keys=32768,
                head_size=128,
                causal=causal,
                backward=True,
                kind=kind,  # type: ignore[arg-type]
            )
        )

    machine = hardware()
    assert time(machine, causal=False) / time(machine, causal=True) == pytest.approx(2, rel=0.01)
    assert time(machine, causal=True, kind="vendor") == time(machine, causal=True)
    bare = hardware(attention_models={}, matmul_models={})
    flops = 2.5 * 4 * 4 * 32 * 32768**2 * 0.5 * 128
    roofline = kernel_time(bare, Kernel.ATTENTION, "bfloat16", flops, 0.0)
    assert time(bare, causal=True) == pytest.approx(roofline)


def test_convolutions_are_products_at_their_own_efficiency() -> None:
    machine = hardware(replace(MODEL, overhead_s=0.0))
    shape = {"pixels": 256 * 14 * 14, "in_channels": 1024, "out_channels": 1024, "area": 9}
    time = float(convolution_time(machine, "bfloat16", **shape))
    product = seconds(machine, 256 * 14 * 14, 1024, 1024 * 9)
    overhead = machine.kernels[Kernel.CONVOLUTION].overhead_s
    assert time == pytest.approx(overhead + product / 0.5)
    depthwise = float(convolution_time(machine, "bfloat16", **shape, groups=1024))
    assert overhead < depthwise < time / 20
    bare = hardware(matmul_models={})
    flops = 2 * 256 * 14 * 14 * 1024 * 1024 * 9
    assert float(convolution_time(bare, "bfloat16", **shape)) == pytest.approx(
        kernel_time(bare, Kernel.CONVOLUTION, "bfloat16", flops, 0.0)
    )


def test_convolutions_of_single_channels_read_wide_windows_again() -> None:
    """Bytes at the share of the bandwidth with windows of nine places, and with the window's side over 3 more."""
    machine = hardware(grouped_convolution_efficiency=0.1)

    def depthwise(area: int) -> float:
        shape = {"pixels": 32 * 800, "in_channels": 512, "out_channels": 512, "area": area, "groups": 512}
        return float(convolution_time(machine, "bfloat16", **shape)) - machine.kernels[Kernel.CONVOLUTION].overhead_s

    moved = {area: 2 * (2 * 32 * 800 * 512 + 512 * area) for area in (3, 9, 81)}
    for area, again in ((3, 1.0), (9, 1.0), (81, 3.0)):
        assert depthwise(area) == pytest.approx(again * moved[area] / (0.1 * machine.memory_bandwidth))
    wide = {"pixels": 32 * 800, "in_channels": 4096, "out_channels": 4096, "area": 9, "groups": 2}
    products = [
        convolution_time(hardware(grouped_convolution_efficiency=share), "bfloat16", **wide) for share in (1e-3, None)
    ]
    assert products[0] == products[1] < 4 * 32 * 800 * 4096 / (1e-3 * machine.memory_bandwidth)


def test_a_sustained_speed_slows_products() -> None:
    shape = (8192.0, 8192.0, 8192.0)
    hot = hardware(replace(MODEL, overhead_s=0.0), sustained_matmul_speed=0.7)
    cool = hardware(replace(MODEL, overhead_s=0.0))
    assert seconds(cool, *shape) / seconds(hot, *shape) == pytest.approx(0.7)


def test_without_models_products_take_the_roofline() -> None:
    bare = hardware(matmul_models={})
    expected = kernel_time(bare, Kernel.MATMUL, "bfloat16", 2.0 * 512**3, 3.0 * 2 * 512**2)
    assert seconds(bare, 512, 512, 512) == expected
