"""Gradients of batch norm on rows of pixels: those of torch's own, and where they are taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from simulator.calibration.cases import all_cases
from simulator.calibration.normalizations import batch_norm_backward, in_rows
from simulator.program import Kernel

aten = torch.ops.aten
SMALL = (16, 256, 2, 2)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(
    samples=st.integers(4, 9),
    channels=st.integers(150, 300),
    sides=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    affine=st.booleans(),
    training=st.booleans(),
    mask=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_gradients_are_those_of_torch(samples, channels, sides, affine, training, mask):
    values, gradient = (random(samples, channels, *sides, seed=seed) for seed in (1, 2))
    weight, mean, scale = (random(channels, seed=seed) for seed in (3, 4, 5))
    running = (mean, scale.abs() + 0.1)
    arguments = (weight if affine else None, *running, mean, scale, training, 1e-5, list(mask))
    expected = aten.native_batch_norm_backward.default(gradient, values, *arguments)
    made = batch_norm_backward(gradient, values, *arguments)
    for one, other, asked in zip(made, expected, mask, strict=True):
        assert (one is None) == (other is None) == (not asked)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
            assert one.stride() == other.stride()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.empty(SMALL), True),
        (torch.empty(SMALL, dtype=torch.float64), True),
        (torch.empty(SMALL, dtype=torch.bfloat16), False),
        (torch.empty(SMALL, device="meta"), False),
        (torch.empty(SMALL).contiguous(memory_format=torch.channels_last), False),
        (torch.empty(16, 256, 1, 1), False),
        (torch.empty(16, 256, 7), True),
        (torch.empty(16, 256, 2, 4), False),
        (torch.empty(2, 1024, 2, 2), False),
        (torch.empty(4, 128, 2, 2), False),
        (torch.empty(16, 256), False),
    ],
    ids=lambda given: f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else str(given),
)
def test_rows_are_taken_of_many_small_images(values, expected):
    assert in_rows(values) is expected


def test_calibration_times_some_on_rows_and_some_not():
    cases = [case for case in all_cases() if case.kernel is Kernel.BATCH_NORMALIZATION and "backward" in case.name]
    made = {
        in_rows(torch.empty(case.shapes[0]).view(-1, *case.arguments[:1], *case.arguments[1:] * 2)) for case in cases
    }
    assert made == {True, False}
