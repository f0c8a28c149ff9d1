"""Kernel times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import ProfileError
from simulator.hardware import KernelModel
from simulator.kernels import kernel_time
from simulator.profiles import load_profile, profile_names, profile_text
from simulator.program import WIDER_CLASS, Kernel

profile = cache(load_profile)
WORK = st.floats(min_value=0, max_value=1e18)


def test_a_kernel_takes_the_longer_of_computing_and_moving() -> None:
    model = KernelModel(compute_efficiency=0.5, bandwidth_efficiency=0.8, overhead_s=2e-6)
    hardware = profile("dgx-a100")
    hardware = replace(hardware, memory_bandwidth=2e12, kernels={**hardware.kernels, Kernel.MATMUL: model})
    # 312e12 FLOP/s at one half; 2e12 bytes/s at four fifths.
    assert kernel_time(hardware, Kernel.MATMUL, "bfloat16", 156e9, 1.0) == pytest.approx(2e-6 + 1e-3)
    assert kernel_time(hardware, Kernel.MATMUL, "bfloat16", 1.0, 1.6e9) == pytest.approx(2e-6 + 1e-3)
    assert kernel_time(hardware, Kernel.MATMUL, "float32", 19.5e9, 0.0) == pytest.approx(2e-6 + 2e-3)


def test_the_shorter_part_counts_as_far_as_it_does_not_overlap() -> None:
    model = KernelModel(compute_efficiency=0.5, bandwidth_efficiency=0.8, overhead_s=2e-6, serial_share=0.75)
    hardware = replace(profile("dgx-a100"), memory_bandwidth=2e12)
    hardware = replace(hardware, kernels={**hardware.kernels, Kernel.MATMUL: model})
    assert kernel_time(hardware, Kernel.MATMUL, "bfloat16", 156e9, 0.8e9) == pytest.approx(2e-6 + 1e-3 + 0.375e-3)
    assert kernel_time(hardware, Kernel.MATMUL, "bfloat16", 78e9, 1.6e9) == pytest.approx(2e-6 + 1e-3 + 0.375e-3)


def test_a_class_that_a_profile_lacks_has_the_speed_of_the_wider_one() -> None:
    hardware, own = profile("dgx-a100"), yaml.safe_load(profile_text("dgx-a100")[0])["kernels"].keys()
    lacking = {kernel: wider for kernel, wider in WIDER_CLASS.items() if kernel not in own}
    assert lacking
    for kernel, wider in lacking.items():
        assert hardware.kernels[kernel] == hardware.kernels[wider]
    slowed = replace(hardware, kernel_slowdowns={Kernel.NORMALIZATION: ((1, 1.0), (2, 3.0))})
    assert slowed.compute_slowdown(2, Kernel.BATCH_NORMALIZATION) == 3.0
    assert slowed.compute_slowdown(2, Kernel.MATMUL) == 1.0
    slowed = replace(hardware, kernel_slowdowns={Kernel.CONVOLUTION: ((1, 1.0), (2, 3.0))})
    assert slowed.compute_slowdown(2, Kernel.STRIDED_CONVOLUTION_BACKWARD) == 3.0


def test_a_view_is_free() -> None:
    assert kernel_time(profile("dgx-a100"), Kernel.VIEW, "float32", 1e9, 1e9) == 0.0


def test_arrays_give_what_floats_give() -> None:
    hardware = profile("dgx-h100")
    flops, moved = np.array([0.0, 1e9, 1e12]), np.array([1e6, 0.0, 1e9])
    times = kernel_time(hardware, Kernel.MATMUL, "bfloat16", flops, moved)
    assert times.shape == (3,)
    assert times.tolist() == [
        kernel_time(hardware, Kernel.MATMUL, "bfloat16", one, two) for one, two in zip(flops, moved, strict=True)
    ]
    assert kernel_time(hardware, Kernel.VIEW, "bfloat16", flops, moved).tolist() == [0.0, 0.0, 0.0]


def test_a_dtype_the_device_cannot_compute_in_can_still_be_copied() -> None:
    atlas = profile("ascend910-atlas800")
    assert kernel_time(atlas, Kernel.COPY, "float64", 0.0, 1e6) > 0
    with pytest.raises(ProfileError, match="float64"):
        kernel_time(atlas, Kernel.MATMUL, "float64", 1.0, 1e6)


@given(st.sampled_from(profile_names()), st.sampled_from(list(Kernel)), WORK, WORK, WORK, WORK)
def test_more_work_never_takes_less_time(
    name: str, kernel: Kernel, flops: float, moved: float, more_flops: float, more_moved: float
) -> None:
    hardware = profile(name)
    less = kernel_time(hardware, kernel, "float32", flops, moved)
    assert 0 <= less <= kernel_time(hardware, kernel, "float32", flops + more_flops, moved + more_moved)
