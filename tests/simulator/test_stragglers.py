"""A slow rank or link does to the step what simulating every rank says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.errors import InputError
from simulator.pipeline_operators import OperatorCosts, Operators
from simulator.pipeline_passes import simulate_operators
from simulator.profiles import load_profile
from simulator.reliability import compute_factors, slow_level, slow_stages
from simulator.schedules import ActionKind, make_schedule
from simulator.task_table import StreamKind, TaskTable
from simulator.timing import task_times
from tests.oracles.simulated import slow_links, slow_ranks
from tests.simulator.programs import AXES, DEVICES, communication

HARDWARE = load_profile("dgx-a100")


def test_factors_are_seeded_and_spread_as_stated() -> None:
    assert compute_factors(8, seed=1).tolist() == [1.0] * 8
    slow = compute_factors(16, seed=3, slow_ranks=2, slowdown=1.4)
    assert sorted(slow.tolist()) == [1.0] * 14 + [1.4] * 2
    assert slow.tolist() == compute_factors(16, seed=3, slow_ranks=2, slowdown=1.4).tolist()
    many = compute_factors(20_000, seed=0, spread=0.08)
    assert np.std(np.log(many)) == pytest.approx(0.08, rel=0.02)
    assert np.median(many) == pytest.approx(1.0, abs=0.003)


def table() -> TaskTable:
    """Two ranks: a computation each, then a transfer of rank 0 over link 1."""
    integers = np.array
    return TaskTable(
        stream=integers([0, 1, 2]),
        stream_rank=integers([0, 1, 0]),
        stream_kind=integers([StreamKind.COMPUTE, StreamKind.COMPUTE, StreamKind.COMMUNICATION]),
        work=np.array([2.0, 2.0, 100.0]),
        latency_s=np.zeros(3),
        rate_bytes_per_s=np.array([0.0, 0.0, 10.0]),
        meeting=integers([-1, -1, -1]),
        dependency_offsets=integers([0, 0, 0, 1]),
        dependencies=integers([0]),
        link_offsets=integers([0, 0, 0, 1]),
        links=integers([1]),
        link_weights=np.ones(1),
        link_capacity=np.array([10.0, 20.0]),
    )


def test_tables_slow_chosen_ranks_and_links_only() -> None:
    subject = table()
    assert slow_ranks(subject, np.array([1.0, 1.5])).work.tolist() == [2.0, 3.0, 100.0]
    assert slow_links(subject, {1: 0.25}).link_capacity.tolist() == [10.0, 5.0]
    assert subject.work.tolist() == [2.0, 2.0, 100.0]
    assert subject.link_capacity.tolist() == [10.0, 20.0]


@pytest.mark.parametrize("run", [engine.run, fast_engine.run], ids=["reference", "fast"])
def test_engines_run_straggling_tables(run) -> None:
    """Rank 1 computes half as long again and rank 0's transfer crosses a link with a quarter of its capacity."""
    starts, ends = run(slow_links(slow_ranks(table(), np.array([1.0, 1.5])), {1: 0.25}))
    assert np.asarray(ends).tolist() == pytest.approx([2.0, 3.0, 2.0 + 100.0 / 5.0])
    assert np.asarray(starts).tolist() == pytest.approx([0.0, 0.0, 2.0])


def test_a_slow_link_slows_what_crosses_it() -> None:
    message = communication("inside", axis="tensor", payload_bytes=1e9)
    times = [
        task_times([message], AXES, hardware, DEVICES)[0]
        for hardware in (HARDWARE, slow_level(HARDWARE, "NVSwitch", 0.5), slow_level(HARDWARE, "InfiniBand", 0.5))
    ]
    assert 1.8 * times[0] < times[1] < 2.0 * times[0]
    assert times[2] == times[0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: compute_factors(4, seed=0, slow_ranks=5), "5 slow ranks of 4"),
        (lambda: compute_factors(4, seed=0, slowdown=0.5), "at least 1"),
        (lambda: slow_ranks(table(), np.ones(1)), "1 factors"),
        (lambda: slow_ranks(table(), np.array([1.0, 0.0])), "above 0"),
        (lambda: slow_links(table(), {2: 0.5}), "links are 0 to 1"),
        (lambda: slow_links(table(), {0: 0.0}), "shares"),
        (lambda: slow_level(HARDWARE, "Ethernet", 0.5), "NVSwitch, InfiniBand"),
    ],
)
def test_bad_input_is_refused(call, words) -> None:
    with pytest.raises(InputError, match=words):
        call()


def chain(forward: float, backward: float, ranks: int) -> OperatorCosts:
    """Passes of two kernels with a message of half the time of each in between."""
    made = {
        kind: Operators.chain(np.array([0.4, 0.2, 0.4]) * seconds, np.array([0, 1, 0]))
        for kind, seconds in ((ActionKind.FORWARD, forward), (ActionKind.BACKWARD, backward))
    }
    return OperatorCosts(passes={kind: [one] * ranks for kind, one in made.items()})


@settings(deadline=None, max_examples=20)
@given(
    ranks=st.integers(1, 6), rounds=st.integers(1, 4), backward=st.sampled_from((1.0, 2.0)), factor=st.floats(1.0, 8.0)
)
def test_a_slow_stage_lengthens_1f1b_by_its_own_work_alone(
    ranks: int, rounds: int, backward: float, factor: float
) -> None:
    """With all stages alike a step takes (M + p - 1)(f + b); a slow last stage is busy for M of its own passes.

    The micro-batch that reaches it first has passed the others forward, and the last comes back through them:
    (p - 1)(f + b) + M s (f + b), with s the factor of the whole pass. A slow first stage that is slower than the way
    through the others and back is never idle: M s (f + b).
    """
    micro_batches = ranks * rounds
    schedule, costs = make_schedule("1f1b", ranks, micro_batches), chain(1.0, backward, ranks)
    whole = 1.0 + backward
    slower = 0.8 * factor + 0.2

    def step(slow_rank: int) -> float:
        factors = np.ones(ranks)
        factors[slow_rank] = factor
        return simulate_operators(schedule, slow_stages(schedule, costs, factors)).step_time_s

    assert simulate_operators(schedule, costs).step_time_s == pytest.approx((micro_batches + ranks - 1) * whole)
    assert step(ranks - 1) == pytest.approx((ranks - 1) * whole + micro_batches * slower * whole)
    if slower >= whole:
        assert step(0) == pytest.approx(micro_batches * slower * whole)


def test_stages_that_are_alike_share_their_operators() -> None:
    schedule, costs = make_schedule("1f1b", 4, 8), chain(1.0, 2.0, 4)
    slow = slow_stages(schedule, costs, np.array([1.0, 2.0, 2.0, 1.0])).passes[ActionKind.FORWARD]
    assert slow[0] is slow[3]
    assert slow[1] is slow[2]
    assert slow[1].seconds.tolist() == [0.8, 0.2, 0.8]
    with pytest.raises(InputError, match="3 factors for 4 pipeline ranks"):
        slow_stages(schedule, costs, np.ones(3))
