"""Batch norm by sums and among ranks, gradients on rows of pixels: those of torch's own, and where they are taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from simulator.calibration.cases import all_cases
from simulator.calibration.normalizations import (
    batch_norm,
    batch_norm_among,
    batch_norm_backward,
    batch_norm_backward_among,
    by_sums,
    in_rows,
)
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


@given(
    shape=st.sampled_from([(5, 3, 97, 97), (8, 140, 120), (17, 970, 2, 4), (2, 6, 9, 9), (6, 5, 2)]),
    affine=st.booleans(),
    mask=st.tuples(st.booleans(), st.just(True), st.just(True)),
)
@settings(max_examples=8)
def test_batch_norm_of_parts_is_that_of_the_whole(shape, affine, mask):
    """Two ranks with half of the samples each get, with sums over both, what torch gets of all."""
    values, gradient = random(2 * shape[0], *shape[1:], seed=1), random(2 * shape[0], *shape[1:], seed=2)
    weight, bias = (random(shape[1], seed=seed) if affine else None for seed in (3, 4))
    expected = aten._native_batch_norm_legit.no_stats(values, weight, bias, True, 0.1, 1e-5)
    statistics = expected[1:]
    gradients = aten.native_batch_norm_backward.default(
        gradient, values, weight, None, None, *statistics, True, 1e-5, list(mask)
    )
    for one, other in zip(batch_norm(values, weight, bias, 1e-5), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)

    def of_ranks(run):
        """What each rank makes with the sum of what both send."""
        sent = []
        for rank in range(2):
            run(rank, lambda sums: sent.append(sums.clone()) or sums)
        return [run(rank, lambda sums: sent[0] + sent[1]) for rank in range(2)]

    parts, sent_back = values.chunk(2), gradient.chunk(2)
    forward = of_ranks(lambda rank, total: batch_norm_among(parts[rank], weight, bias, 1e-5, total, 2))
    backward = of_ranks(
        lambda rank, total: batch_norm_backward_among(
            sent_back[rank], parts[rank], weight, *statistics, 1e-5, mask, total, 2
        )
    )
    torch.testing.assert_close(torch.cat([made[0] for made in forward]), expected[0], rtol=1e-10, atol=1e-10)
    for made in forward:
        for one, other in zip(made[1:3], statistics, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    if mask[0]:
        whole = torch.cat([made[0] for made in backward])
        torch.testing.assert_close(whole, gradients[0], rtol=1e-10, atol=1e-10)
    for made in backward:
        assert (made[0] is not None) == mask[0]
        torch.testing.assert_close(made[1:], gradients[1:], rtol=1e-10, atol=1e-10)


def test_statistics_by_sums_far_from_zero():
    values = (1000 + random(4, 21, 40, 40)).float()
    assert by_sums(values)
    exact, *statistics = aten._native_batch_norm_legit.no_stats(values.double(), None, None, True, 0.1, 1e-5)
    made, *found = batch_norm(values, None, None, 1e-5)
    torch.testing.assert_close(made.double(), exact, rtol=0, atol=1e-3)
    torch.testing.assert_close(found[1].double(), statistics[1], rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (torch.empty(32, 64, 8, 8), True),
        (torch.empty(32, 64, 64, dtype=torch.float64), True),
        (torch.empty(32, 64, 8, 8, dtype=torch.bfloat16), False),
        (torch.empty(32, 64, 8, 8, device="meta"), False),
        (torch.empty(32, 64, 8, 8).contiguous(memory_format=torch.channels_last), False),
        (torch.empty(31, 64, 8, 8), False),
        (torch.empty(128, 1024, 1, 1), False),
        (torch.empty(32, 1024, 2, 2), False),
    ],
    ids=lambda given: f"{tuple(given.shape)} {given.dtype}" if isinstance(given, Tensor) else str(given),
)
def test_statistics_are_sums_of_many_numbers(values, expected):
    assert by_sums(values) is expected


def test_calibration_times_statistics_by_sums_and_others():
    kernels = (Kernel.BATCH_NORMALIZATION, Kernel.SYNCHRONIZED_BATCH_NORMALIZATION)
    cases = [case for case in all_cases() if case.kernel in kernels and "backward" not in case.name]
    made = {
        (case.kernel, by_sums(torch.empty(case.shapes[0]).view(-1, case.arguments[0], *case.arguments[1:] * 2)))
        for case in cases
    }
    assert made == {(kernel, sums) for kernel in kernels for sums in (True, False)}


def test_calibration_times_some_on_rows_and_some_not():
    cases = [case for case in all_cases() if case.kernel is Kernel.BATCH_NORMALIZATION and "backward" in case.name]
    made = {
        in_rows(torch.empty(case.shapes[0]).view(-1, *case.arguments[:1], *case.arguments[1:] * 2)) for case in cases
    }
    assert made == {True, False}
