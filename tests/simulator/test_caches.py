"""What lies in the caches, by the working set of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from simulator.hardware import Caches, Hardware
from simulator.kernels import kernel_time
from simulator.profiles import load_profile, write_profile
from simulator.program import Kernel, Phase, Task
from simulator.timing import ALL_BELOW, NONE_ABOVE, cached_share, in_caches, task_times

MIB = 1 << 20
PROFILE = load_profile("dgx-a100")
PLAIN = replace(PROFILE, training={})


def processor(own: int = 1 * MIB, shared: int = 32 * MIB) -> Hardware:
    """A profile of which memory-bound kernels are four times as fast in the caches."""
    kernels = {
        kernel: replace(model, cached_bandwidth=4 * PLAIN.memory_bandwidth * model.bandwidth_efficiency)
        for kernel, model in PLAIN.kernels.items()
    }
    return replace(PLAIN, kernels=kernels, caches=Caches(own_bytes=own, shared_bytes=shared))


def test_a_profile_without_caches_finds_nothing_in_them() -> None:
    assert cached_share(PLAIN, 1.0, 1) == 0.0
    assert in_caches(PLAIN, 1.0, 1) is PLAIN


def test_small_steps_lie_in_the_caches_and_large_ones_do_not() -> None:
    hardware, size = processor(), 33 * MIB
    assert cached_share(hardware, ALL_BELOW * size, 1) == 1.0
    assert cached_share(hardware, NONE_ABOVE * size, 1) == pytest.approx(0.0, abs=1e-12)
    # Half way on the logarithm between a quarter and twice the caches.
    assert cached_share(hardware, size * (ALL_BELOW * NONE_ABOVE) ** 0.5, 1) == pytest.approx(0.5)
    # Two processes share what is common: each has 1 + 16 MiB.
    assert cached_share(hardware, ALL_BELOW * 17 * MIB, 2) == 1.0
    assert cached_share(hardware, ALL_BELOW * 33 * MIB, 2) < 1.0


@given(st.floats(1.0, 1e12), st.floats(1.0, 100.0), st.integers(1, 64))
def test_more_bytes_and_more_processes_find_less(size: float, more: float, processes: int) -> None:
    hardware = processor()
    share = cached_share(hardware, size, processes)
    assert 0.0 <= share <= 1.0
    assert cached_share(hardware, size * more, processes) <= share
    assert cached_share(hardware, size, processes + 1) <= share


@given(st.floats(0.0, 1.0), st.floats(1.0, 1e12))
def test_a_kernel_takes_between_its_time_in_the_caches_and_beyond(share: float, moved: float) -> None:
    hardware = processor()
    beyond, cached, between = (
        kernel_time(replace(hardware, cached_share=part), Kernel.COPY, "float32", 0.0, moved)
        for part in (0.0, 1.0, share)
    )
    overhead = hardware.kernels[Kernel.COPY].overhead_s
    assert between - overhead == pytest.approx(share * (cached - overhead) + (1 - share) * (beyond - overhead))
    assert cached - overhead == pytest.approx((beyond - overhead) / 4)
    assert beyond == kernel_time(PLAIN, Kernel.COPY, "float32", 0.0, moved)


def test_tasks_are_timed_by_what_a_step_holds() -> None:
    hardware = processor()
    moved = [Task(name="task", phase=Phase.FORWARD, kernel=Kernel.ELEMENTWISE, bytes_moved=1e6)]
    small, large = (task_times(moved, (), in_caches(hardware, size, 1), 1)[0] for size in (1 * MIB, 1 << 30))
    assert small < large == task_times(moved, (), PLAIN, 1)[0]
    overhead = hardware.kernels[Kernel.ELEMENTWISE].overhead_s
    assert small - overhead == pytest.approx((large - overhead) / 4)


def test_a_profile_states_its_caches_and_speeds_in_them(tmp_path) -> None:
    from importlib.resources import files

    data = yaml.safe_load((files("hw_profiles") / "dgx-a100.yaml").read_text())
    read = "assumed: for a test"
    data["device"]["own_cache_bytes"] = {"value": MIB, "source": read}
    data["device"]["shared_cache_bytes"] = {"value": 32 * MIB, "source": read}
    data["kernels"]["copy"]["cached_bandwidth_bytes_per_s"] = {"value": 7e12, "source": read}
    found = write_profile(data, tmp_path / "cached.yaml")
    assert found.caches == Caches(own_bytes=MIB, shared_bytes=32 * MIB)
    assert found.kernels[Kernel.COPY].cached_bandwidth == 7e12
    assert found.hash != PROFILE.hash
    assert any(row.field == "device.shared_cache_bytes" for row in found.rows)
