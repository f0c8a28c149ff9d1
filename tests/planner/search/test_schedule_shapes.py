"""What the closed form says of schedules that put weight gradients off, beside the schedules themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.configurations.schedule_shapes import apart_s, schedule_shape, turns_apart_s
from simulator.pipeline_memory import PipelineBytes, pipeline_memory
from simulator.pipeline_operators import OperatorCosts, Operators
from simulator.pipeline_passes import simulate_operators
from simulator.schedules import ActionKind, make_schedule
from tests.oracles.passes import PipelineCosts, simulate_pipeline

STILL = (
    ("1f1b", 1, 0.006), ("gpipe", 1, 1e-9), ("zb_h1", 1, 0.006), ("interleaved_1f1b", 2, 0.03), ("zbv", 2, 0.03),
)  # fmt: skip
"""Schedules, chunks a rank, and how far apart they may lie where ranks stand still while they send."""
SECONDS = st.integers(10, 30).map(lambda tenths: tenths / 10)


def filled_s(
    name: str, ranks: int, chunks: int, micro_batches: int, passes: tuple[float, float, float], *, together: bool
) -> float:
    """Seconds by which the step of equal stages is longer than the passes of one rank."""
    forward, early, late = (seconds * np.ones(ranks * chunks) for seconds in passes)
    costs = PipelineCosts(forward_s=forward, backward_s=early + late, input_gradient_s=early, weight_gradient_s=late)
    found = simulate_pipeline(make_schedule(name, ranks, micro_batches, chunks), costs)
    return (found.length_s if together else found.step_time_s) - micro_batches * chunks * sum(passes)


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["zb_h1", "zb_h2"]), ranks=st.integers(2, 5), more=st.integers(0, 6),
    forward=SECONDS, early=SECONDS, share=st.integers(1, 10), together=st.booleans(),
)  # fmt: skip
def test_h1_and_h2_pay_for_what_is_not_put_off(
    name: str, ranks: int, more: int, forward: float, early: float, share: int, together: bool
) -> None:
    late, micro_batches = min(forward, early) * share / 10, 2 * ranks + more
    shape = schedule_shape(name, ranks, 1, micro_batches, together=together)
    fill = shape.fill_s(np.array([forward]), np.array([early + late]), np.array([late]))[0]
    found = filled_s(name, ranks, 1, micro_batches, (forward, early, late), together=together)
    assert (ranks - 1) * fill == pytest.approx(found, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(
    ranks=st.integers(2, 5), more=st.integers(0, 6), longer=st.integers(10, 20), share=st.integers(6, 10),
    together=st.booleans(),
)  # fmt: skip
def test_zbv_pays_for_the_longer_of_what_follows(
    ranks: int, more: int, longer: int, share: int, together: bool
) -> None:
    """Where, as in networks, the gradient of the input takes longest and that of the weights not much less."""
    forward, early, late, micro_batches = 1.0, longer / 10, share / 10, 2 * ranks + more
    shape = schedule_shape("zbv", ranks, 2, micro_batches, together=together)
    fill = shape.fill_s(np.array([forward]), np.array([early + late]), np.array([late]))[0]
    found = filled_s("zbv", ranks, 2, micro_batches, (forward, early, late), together=together)
    assert 2 * (ranks - 1) * fill == pytest.approx(found, rel=0.1, abs=1e-9)


def step_s(
    name: str, ranks: int, chunks: int, micro_batches: int, send_s: float, *, overlaps: bool, stall: float = 0.0
) -> float:
    """What the closed form says of equal stages: a second forward, one for each gradient, and messages between them."""
    shape = schedule_shape(name, ranks, chunks, micro_batches, overlaps=overlaps, stall=stall)
    fill = float(shape.fill_s(np.ones(1), np.full(1, 2.0), np.ones(1))[0])
    own = 3.0 * micro_batches - fill
    hides = (shape.steady_sends - shape.still_sends) * 2.0 * send_s - shape.hidden_share * own
    busy = own + shape.still_sends * 2.0 * send_s + max(0.0, hides)
    return ranks * chunks * fill + shape.fill_sends * 2.0 * send_s * (ranks * chunks - 1) + chunks * busy


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(STILL),
    ranks=st.integers(2, 6), rounds=st.integers(2, 5), send=st.integers(0, 10),
)  # fmt: skip
def test_ranks_that_stand_still_send_for_every_micro_batch(
    name: tuple[str, int, float], ranks: int, rounds: int, send: int
) -> None:
    schedule, chunks, within = name
    costs = PipelineCosts(forward_s=1.0, backward_s=2.0, send_s=send / 100, overlap_sends=False)
    made = make_schedule(schedule, ranks, rounds * ranks, chunks)
    found = step_s(schedule, ranks, chunks, rounds * ranks, send / 100, overlaps=False)
    assert found == pytest.approx(simulate_pipeline(made, costs).step_time_s, rel=within)


@settings(max_examples=40, deadline=None)
@given(ranks=st.integers(2, 6), chunks=st.integers(2, 3), more=st.integers(0, 40))
def test_micro_batches_that_ranks_do_not_divide_take_and_keep_what_is_said(ranks: int, chunks: int, more: int) -> None:
    micro_batches = ranks + more
    schedule = make_schedule("interleaved_1f1b", ranks, micro_batches, chunks)
    made = simulate_pipeline(schedule, PipelineCosts(forward_s=1.0, backward_s=2.0))
    assert step_s("interleaved_1f1b", ranks, chunks, micro_batches, 0.0, overlaps=True) == pytest.approx(
        made.step_time_s, rel=1e-9
    )
    shape = schedule_shape("interleaved_1f1b", ranks, chunks, micro_batches)
    held = pipeline_memory(schedule, made.starts_s, made.ends_s, PipelineBytes(activations=1.0))
    assert np.bincount(shape.rank_of, shape.in_flight).tolist() == [rank.peak_bytes for rank in held]


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["zb_h1", "zb_h2"]), ranks=st.integers(2, 6), rounds=st.integers(2, 5), send=st.integers(0, 25)
)
def test_h1_waits_twice_for_messages_there_and_back_while_it_fills_and_h2_once(
    name: str, ranks: int, rounds: int, send: int
) -> None:
    costs = PipelineCosts(forward_s=1.0, backward_s=2.0, send_s=send / 100)
    made = make_schedule(name, ranks, rounds * ranks)
    found = step_s(name, ranks, 1, rounds * ranks, send / 100, overlaps=True)
    assert found == pytest.approx(simulate_pipeline(made, costs).step_time_s, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 5), micro_batches=st.integers(2, 9), data=st.data())
def test_gpipe_goes_at_the_pace_of_its_slowest_forward_and_its_slowest_backward_pass(
    ranks: int, micro_batches: int, data: st.DataObject
) -> None:
    draws = st.lists(SECONDS, min_size=ranks, max_size=ranks).map(np.array)
    forward, backward, once = (data.draw(draws) for _ in range(3))
    both = forward + backward
    found = apart_s(micro_batches, forward, backward, both, (micro_batches - 1) * both + once)
    assert found >= both.sum() + ((micro_batches - 1) * both + once).max() - 1e-9

    def simulated_s(epilogue: np.ndarray) -> float:
        costs = PipelineCosts(forward_s=forward, backward_s=backward, epilogue_s=epilogue)
        return simulate_pipeline(make_schedule("gpipe", ranks, micro_batches, 1), costs).step_time_s

    # What the first rank does last, nothing hides; others begin later and end earlier by the passes before them.
    first = np.where(np.arange(ranks) == 0, once.max() + both.sum(), 0.0)
    last = apart_s(micro_batches, forward, backward, both, (micro_batches - 1) * both + first)
    assert last == pytest.approx(simulated_s(first), rel=1e-9)
    assert simulated_s(once) <= found + 1e-9 <= simulated_s(once) + both[:-1].sum() + 2e-9


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 5), micro_batches=st.integers(2, 9), data=st.data())
def test_gpipe_waits_for_its_slowest_link_in_every_pass(ranks: int, micro_batches: int, data: st.DataObject) -> None:
    forward, backward = (data.draw(st.lists(SECONDS, min_size=ranks, max_size=ranks).map(np.array)) for _ in range(2))
    sends = 3 * data.draw(st.lists(SECONDS, min_size=ranks - 1, max_size=ranks - 1).map(np.array))
    costs = PipelineCosts(forward_s=forward, backward_s=backward, send_s=np.append(sends, 0.0))
    simulated = simulate_pipeline(make_schedule("gpipe", ranks, micro_batches, 1), costs).step_time_s
    both = forward + backward
    found = apart_s(micro_batches, forward, backward, both, (micro_batches - 1) * both, sends) + 2 * sends.sum()
    assert found == pytest.approx(simulated, rel=1e-9)


@settings(max_examples=30, deadline=None)
@given(ranks=st.integers(2, 5), rounds=st.integers(2, 4), data=st.data())
def test_what_the_first_rank_of_1f1b_does_last_waits_for_the_slowest(
    ranks: int, rounds: int, data: st.DataObject
) -> None:
    scale = data.draw(st.lists(SECONDS, min_size=ranks, max_size=ranks).map(np.array))
    forward, backward, micro_batches = scale, 2 * scale, rounds * ranks
    both = forward + backward
    once = np.where(np.arange(ranks) == 0, data.draw(SECONDS) + both.sum(), 0.0)
    found = turns_apart_s(micro_batches, forward, backward, both, (micro_batches - 1) * both + once)
    costs = PipelineCosts(forward_s=forward, backward_s=backward, epilogue_s=once)
    simulated = simulate_pipeline(make_schedule("1f1b", ranks, micro_batches, 1), costs).step_time_s
    without = both.sum() + ((micro_batches - 1) * both + once).max()
    assert without <= found * (1 + 1e-9)
    # Either way a rank ends with passes of others, all of them at most.
    assert abs(found - simulated) <= both.sum() - both.min() + 1e-9


@settings(max_examples=30, deadline=None)
@given(name=st.sampled_from(["zb_h1", "zb_h2", "zbv"]), ranks=st.integers(2, 5), kept=SECONDS, waiting=SECONDS)
def test_what_is_kept_and_what_waits_for_weight_gradients_count_as_many_as_there_are(
    name: str, ranks: int, kept: float, waiting: float
) -> None:
    chunks, micro_batches = (2 if name == "zbv" else 1), 3 * ranks
    shape, schedule = (
        schedule_shape(name, ranks, chunks, micro_batches),
        make_schedule(name, ranks, micro_batches, chunks),
    )
    held = shape.held_bytes(np.array([kept]), np.array([waiting]))[0]
    found = np.bincount(shape.rank_of, shape.in_flight * held).max()
    costs = PipelineCosts(forward_s=1.0, backward_s=2.0, input_gradient_s=1.0, weight_gradient_s=1.0)
    made = simulate_pipeline(schedule, costs)
    sizes = PipelineBytes(activations=kept, weight_activations=waiting)
    peaks = [rank.peak_bytes for rank in pipeline_memory(schedule, made.starts_s, made.ends_s, sizes)]
    assert found == pytest.approx(max(peaks), rel=0.15 if name == "zbv" else 1e-9)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from([("1f1b", 1, 0.01), ("gpipe", 1, 1e-9), ("interleaved_1f1b", 2, 0.01)]),
    ranks=st.integers(2, 6), rounds=st.integers(3, 5), send=st.integers(1, 10), tenths=st.integers(1, 8),
)  # fmt: skip
def test_ranks_that_stand_still_for_a_part_pay_for_it(
    name: tuple[str, int, float], ranks: int, rounds: int, send: int, tenths: int
) -> None:
    (schedule, chunks, within), send_s, stall = name, send / 100, tenths / 10
    one = {ActionKind.FORWARD: 1.0, ActionKind.BACKWARD: 2.0}
    passes = {
        kind: [Operators.chain(np.array([seconds]), np.zeros(1, dtype=np.int64))] * (ranks * chunks)
        for kind, seconds in one.items()
    }
    made = make_schedule(schedule, ranks, rounds * ranks, chunks)
    costs = OperatorCosts(passes=passes, send_s=send_s, send_stall=stall)
    simulated_s = simulate_operators(made, costs).step_time_s
    assert simulated_s >= simulate_operators(made, replace(costs, send_stall=0.0)).step_time_s
    found = step_s(schedule, ranks, chunks, rounds * ranks, send_s, overlaps=True, stall=stall)
    assert found == pytest.approx(simulated_s, rel=within)
