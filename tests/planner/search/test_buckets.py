"""Sizes of messages: what the formula chooses is near the best of the closed form, and follows what is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans.pins import Pins
from planner.search.configurations.buckets import BUCKETS, LARGEST_PENDING, MIB, USUAL, DataAxis, bucket_bytes
from planner.search.configurations.space import Extent, configurations
from planner.search.configurations.step_model import Configuration
from simulator.profiles import load_profile

A100 = load_profile("dgx-a100")
WIDE = Configuration(data=128, order=("pipeline", "context", "expert", "data", "tensor"), tensor=8)


def test_long_passes_hide_small_messages_and_nothing_hides_large_ones() -> None:
    free = bucket_bytes(replace(A100, overlap_compute_speed=1.0), DataAxis.of(WIDE), 200 * MIB, 10.0)
    exposed = bucket_bytes(A100, DataAxis.of(WIDE), 20_000 * MIB, 0.0)
    assert free < USUAL < exposed
    # Small messages last longer in all, which kernels beside them pay for.
    assert free < bucket_bytes(A100, DataAxis.of(WIDE), 200 * MIB, 10.0) < exposed


@given(
    gradients=st.floats(1.0, 1e11),
    seconds=st.floats(0.0, 100.0),
    sharding=st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    copies=st.sampled_from([0, 8]),
)
def test_sizes_are_of_the_list_and_pending_gradients_stay_few(
    gradients: float, seconds: float, sharding: str, copies: int
) -> None:
    c = replace(WIDE, optimizer_sharding=sharding, shard_size=copies if sharding != "none" else 0, micro_batches=4)
    found = bucket_bytes(A100, DataAxis.of(c), gradients, seconds)
    assert found in BUCKETS
    if sharding == "zero2":
        assert found <= LARGEST_PENDING
    if sharding == "zero3" and not copies:
        assert found == USUAL


@settings(max_examples=20)
@given(gradients=st.floats(1e7, 1e11), seconds=st.floats(1e-3, 10.0))
def test_no_other_size_exposes_less(gradients: float, seconds: float) -> None:
    """The sum of gradients beside the backward pass, as it follows from times of single messages."""
    from planner.search.configurations.buckets import _seconds
    from simulator.program import Collective

    times = dict(zip(BUCKETS, _seconds(A100, Collective.ALL_REDUCE, 128, 8), strict=True))

    lost = A100.lost_to_messages

    def exposed(size: int) -> float:
        work, whole = seconds * 2 / 3, times[size] * max(1.0, gradients / size)
        return max(work + lost * (whole - times[size]) + times[size], whole) - work

    chosen = bucket_bytes(A100, DataAxis.of(WIDE), gradients, seconds)
    assert exposed(chosen) == pytest.approx(min(map(exposed, BUCKETS)))


def test_a_pinned_size_is_that_of_every_configuration() -> None:
    extent = Extent(hardware=A100, devices=16, global_batch=32, pins=Pins(bucket_mb=64), units=4, gradient_bytes=1e9)
    assert {c.bucket_bytes for c in configurations(extent)} == {64 * MIB}
    free = {c.bucket_bytes for c in configurations(replace(extent, pins=Pins()))}
    assert len(free) > 1


@pytest.mark.parametrize(("pinned", "expected"), [(None, {"ring", "all_to_all"}), ("ring", {"ring"}), ("none", set())])
def test_a_context_axis_runs_by_every_algorithm_that_is_free(pinned: str | None, expected: set[str]) -> None:
    pins = Pins(context_algorithm=pinned)
    extent = Extent(hardware=A100, devices=8, global_batch=8, pins=pins, units=4, sequence=65_536)
    found = {c.context_algorithm for c in configurations(extent) if c.context > 1}
    assert found == expected
    assert all((c.context > 1) == (c.context_algorithm != "none") for c in configurations(extent))


def test_states_move_to_the_host_only_where_that_is_free() -> None:
    extent = Extent(hardware=A100, devices=8, global_batch=8, pins=Pins(), units=4)
    for pinned, expected in ((None, {True, False}), (True, {True}), (False, {False})):
        pins = Pins(offload_optimizer=pinned)
        assert {c.offload for c in configurations(replace(extent, pins=pins))} == expected
