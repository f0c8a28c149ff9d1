"""Convolutions as products: the values and gradients of torch's own, and which are taken."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from simulator.calibration.cases import all_cases
from simulator.calibration.convolutions import (
    MOST_PIXELS,
    convolution,
    convolution_backward,
    has_few_windows,
    is_product,
    misses_pixels,
)
from simulator.kernels import COPIES, convolution_time
from simulator.profiles import load_profile
from simulator.program import Kernel

aten = torch.ops.aten
FEW, MANY = (8, 6, 4, 4), (8, 6, 8, 8)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taken(image=FEW, window=(1, 1), dtype=torch.float32, stride=(1, 1), padding=(0, 0), transposed=False, groups=1):
    weight = torch.empty(6, image[1] // groups, *window, dtype=dtype)
    return is_product(torch.empty(image, dtype=dtype), weight, stride, padding, transposed, groups)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@st.composite
def convolutions(draw):
    """Image, weight, bias or none, what they are called with, and which gradients are asked for."""
    dims = draw(st.integers(1, 3))
    size = st.integers(1, 7 if dims < 3 else 4)
    sides = draw(st.lists(size, min_size=dims, max_size=dims))
    samples, inputs = draw(st.integers(1, 20)), draw(st.integers(1, 9))
    outputs = draw(st.sampled_from((1, 2, 5, 9, 70)))
    window = draw(st.sampled_from((1, 1, 1, 2, 3)))
    least = window - min(sides)
    padding = draw(st.sampled_from((0, 0, 0, 1))) if least <= 0 else 1
    stride = draw(st.one_of(st.lists(st.integers(1, 3), min_size=dims, max_size=dims), st.just([2])))
    image, weight = random(samples, inputs, *sides, seed=1), random(outputs, inputs, *[window] * dims, seed=2)
    if draw(st.booleans()) and dims == 2:
        image = image.contiguous(memory_format=torch.channels_last)
    bias = random(outputs, seed=3) if draw(st.booleans()) else None
    geometry = (stride, [padding] * dims, [draw(st.integers(1, 2)) if window == 1 else 1] * dims, False, [0] * dims, 1)
    return image, weight, bias, geometry, draw(st.tuples(st.booleans(), st.booleans(), st.booleans()))


@given(convolutions())
def test_values_and_gradients_are_those_of_torch(drawn):
    image, weight, bias, geometry, mask = drawn
    expected = aten.convolution.default(image, weight, bias, *geometry)
    made = convolution(image, weight, bias, *geometry)
    if is_product(image, weight, geometry[0], geometry[1], False, 1):
        assert made.stride() == torch.empty_like(made, memory_format=torch.contiguous_format).stride()
    torch.testing.assert_close(made, expected, rtol=1e-12, atol=1e-12)
    gradient, sizes = random(*expected.shape, seed=4), None if bias is None else [len(weight)]
    mask = (*mask[:2], mask[2] and bias is not None)
    found = convolution_backward(gradient, image, weight, sizes, *geometry, mask)
    reference = aten.convolution_backward.default(gradient, image, weight, sizes, *geometry, mask)
    for mine, torchs, asked in zip(found, reference, mask, strict=True):
        assert (mine is not None) == asked
        if asked:
            torch.testing.assert_close(mine, torchs, rtol=1e-12, atol=1e-12)


def test_what_runs_as_a_product():
    assert taken()
    assert taken(dtype=torch.float64)
    assert taken(stride=(2, 2), image=(8, 6, 10, 10))
    assert taken(image=(MOST_PIXELS - 1, 6, 1, 1))


@pytest.mark.parametrize(
    "other",
    [
        {"image": MANY},
        {"image": (MOST_PIXELS, 6, 1, 1)},
        {"image": (0, 6, 4, 4)},
        {"window": (3, 3)},
        {"window": (1, 2)},
        {"padding": (0, 1)},
        {"groups": 2},
        {"transposed": True},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_what_torch_runs_itself(other):
    assert not taken(**other)


def few_windows(gradient=(4, 64, 2, 1), window=(3, 3), dtype=torch.float32, dilation=(1, 1), groups=1):
    weight = torch.empty(gradient[1], 6, *window, dtype=dtype)
    return has_few_windows(torch.empty(gradient, dtype=dtype), weight, dilation, False, groups)


@pytest.mark.parametrize(
    "other",
    [{"gradient": (4, 64, 3, 1)}, {"gradient": (0, 64, 2, 1)}, {"window": (1, 1)}, {"dilation": (1, 2)}, {"groups": 2},
     {"dtype": torch.bfloat16}],
    ids=str,
)  # fmt: skip
def test_gradients_of_many_weights_from_few_windows_are_products(other):
    assert few_windows()
    assert not few_windows(**other)


def test_windows_of_a_pixel_that_go_further_miss_some():
    image, weight = torch.empty(8, 6, 4, 4), torch.empty(6, 6, 1, 1)
    assert misses_pixels(image, weight, (2, 1), (0, 0), False, 1)
    assert not misses_pixels(image, weight, (1, 1), (0, 0), False, 1)
    assert not misses_pixels(image, weight, (2, 1), (1, 1), False, 1)
    assert not misses_pixels(image, torch.empty(6, 6, 3, 3), (2, 2), (0, 0), False, 1)


def test_other_devices_and_several_threads_are_torchs():
    weight = torch.empty(6, 6, 1, 1, device="meta")
    assert not is_product(torch.empty(FEW, device="meta"), weight, (1, 1), (0, 0), False, 1)
    torch.set_num_threads(2)
    assert not taken()


def test_calibration_times_gradients_of_weights_that_are_products_and_others():
    found = set()
    for case in all_cases():
        if "backward of conv" in case.name and case.dtype == "float32":
            gradient, _, weight = (torch.empty(shape) for shape in case.shapes)
            assert case.operator is convolution_backward
            found.add((case.kernel, has_few_windows(gradient, weight, (1, 1), False, 1)))
    kinds = (Kernel.CONVOLUTION_BACKWARD, Kernel.STRIDED_CONVOLUTION_BACKWARD)
    assert found == {(kernel, few) for kernel in kinds for few in (True, False)}


def test_calibration_times_convolutions_that_are_products_and_others():
    kinds = set()
    for case in all_cases():
        if case.kernel is Kernel.CONVOLUTION and case.dtype == "float32":
            image, weight = (torch.empty(shape) for shape in case.shapes)
            assert case.operator is convolution
            _, stride, padding, _, transposed, _, groups = case.arguments
            samples = "few" if image.shape[0] < 16 else "more"
            kinds.add((is_product(image, weight, stride, padding, transposed, groups), samples))
    assert kinds == {(True, "few"), (True, "more"), (False, "few"), (False, "more")}


def test_copies_around_convolutions_are_of_16_bits_alone() -> None:
    """What a convolution moves once more at the rate of copies, whatever its products take."""
    plain = load_profile("dgx-a100")
    copying = replace(plain, training={**plain.training, COPIES: 3.0})
    shape = {"pixels": 1e6, "in_channels": 64.0, "out_channels": 128.0, "area": 9.0}
    for dtype, copied in (("float16", 3.0), ("float32", 0.0)):
        longer = convolution_time(copying, dtype, **shape) - convolution_time(plain, dtype, **shape)
        moved = 2 * (1e6 * (64 + 128) + 9 * 64 * 128)
        rate = plain.memory_bandwidth * plain.kernels[Kernel.COPY].bandwidth_efficiency
        assert float(longer) == pytest.approx(copied * moved / rate)
