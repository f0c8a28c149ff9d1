"""Pipelines of operators: written out in full and as passes, the same times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine, pipeline_passes
from simulator.errors import InputError
from simulator.pipeline_operators import (
    LABELS,
    STREAMS,
    OperatorCosts,
    Operators,
    in_one_stream,
    operator_table,
    plan_operators,
)
from simulator.pipeline_passes import period_s, simulate_operators
from simulator.schedules import ActionKind, Schedule, make_schedule
from tests.oracles.passes import PipelineCosts, simulate_pipeline
from tests.simulator.test_schedules import EVERY, shapes


def random_operators(random: np.random.Generator) -> Operators:
    count = int(random.integers(1, 7))
    rows = [np.flatnonzero(random.random(index) < 0.5) for index in range(count)]
    return Operators(
        seconds=random.uniform(0, 2, count),
        communication=random.integers(0, 3, count),
        dependency_offsets=np.concatenate(([0], np.cumsum([len(row) for row in rows]))),
        dependencies=np.concatenate(rows),
        ahead=random.random(count if random.random() < 0.5 else 0) < 0.5,
    )


def random_costs(schedule: Schedule, seed: int, *, overlap: bool) -> OperatorCosts:
    random = np.random.default_rng(seed)
    shared = [random_operators(random) for _ in range(3)]

    def some(share: float) -> dict[ActionKind, list[Operators]]:
        kinds = [kind for kind in ActionKind if random.random() < share]
        return {kind: random.choice(np.array(shared, dtype=object), schedule.stages).tolist() for kind in kinds}

    def meeting() -> tuple[int, ...]:
        return tuple(random.permutation(schedule.ranks)[: random.integers(1, schedule.ranks + 1)].tolist())

    return OperatorCosts(
        passes=some(1.0),
        first=some(0.5),
        last=some(0.5),
        meetings=[(meeting(), random.uniform(0, 1)) for _ in range(random.integers(0, 3))],
        send_s=random.uniform(0, 1, schedule.stages) if random.random() < 0.7 else 0.0,
        prologue_s=random.uniform(0, 1, schedule.ranks),
        epilogue_s=random.uniform(0, 1, schedule.ranks),
        overlap_sends=overlap,
        send_stall=random.uniform(0, 1) if random.random() < 0.5 else 0.0,
    )


@EVERY
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_passes_and_operators_take_the_same_time(name: str, data: st.DataObject) -> None:
    schedule = make_schedule(name, *shapes(name, data))
    costs = random_costs(schedule, data.draw(st.integers(0, 999)), overlap=data.draw(st.booleans()))
    table = operator_table(schedule, costs)
    starts, ends = fast_engine.run(table)
    reference = engine.run(table)
    np.testing.assert_allclose(starts, reference[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(ends, reference[1], rtol=1e-12, atol=1e-12)

    passes = simulate_operators(schedule, costs)
    assert passes.length_s == pytest.approx(ends.max(), rel=1e-12)
    last = np.arange(table.size - schedule.ranks, table.size)
    for run in (fast_engine.run, engine.run):
        period = period_s(table, last, schedule.beginning_ranks, ends, run)
        assert passes.step_time_s == pytest.approx(period, rel=1e-9)
    kernels = np.bincount(table.stream, table.work)[: schedule.ranks]
    np.testing.assert_allclose(passes.bubble_s, passes.step_time_s - kernels, rtol=1e-9, atol=1e-9)
    plan = plan_operators(schedule, costs)
    operators = sum(len(plan.groups[which].operators.seconds) for which in plan.which)
    assert np.count_nonzero(table.label < STREAMS) == operators
    everything = np.sort(ends[table.label < LABELS.index("prologue")])
    found = np.searchsorted(everything, passes.ends_s)
    near = np.minimum(
        np.abs(everything[np.minimum(found, len(everything) - 1)] - passes.ends_s),
        np.abs(everything[np.maximum(found - 1, 0)] - passes.ends_s),
    )
    assert near.max() < 1e-9, "every output comes at the end of an operator"


@EVERY
def test_one_operator_a_pass_is_the_pipeline_of_passes(name: str) -> None:
    schedule = make_schedule(name, 1 if name == "gradient_accumulation" else 4, 8)
    random = np.random.default_rng(7)
    seconds = random.uniform(1, 2, (4, schedule.stages))
    none = np.zeros(1, dtype=np.int64)
    costs = OperatorCosts(
        passes={
            kind: [Operators.chain(seconds[kind, stage : stage + 1], none) for stage in range(schedule.stages)]
            for kind in ActionKind
        },
        send_s=0.25,
    )
    passes = PipelineCosts(
        forward_s=seconds[0],
        backward_s=seconds[1],
        input_gradient_s=seconds[2],
        weight_gradient_s=seconds[3],
        send_s=0.25,
    )
    whole = simulate_pipeline(schedule, passes)
    single = simulate_operators(schedule, costs)
    if not schedule.paired.any():
        np.testing.assert_allclose(single.ends_s, whole.ends_s)
        np.testing.assert_allclose(single.bubble_s, whole.bubble_s)
    else:  # The operator of one action of a pair runs before that of the other.
        assert single.step_time_s <= whole.step_time_s + 1e-9


def test_paired_actions_hide_their_messages() -> None:
    """A pass of 4 x (1 s kernel, 1 s message): 8 s alone, two of them together 9 s, all but one message hidden."""
    pattern = Operators.chain(np.ones(8), np.tile([0, 1], 4))
    costs = OperatorCosts(passes={ActionKind.FORWARD: [pattern], ActionKind.BACKWARD: [pattern]})
    single = simulate_operators(make_schedule("gradient_accumulation", 1, 1), costs)
    copies = simulate_operators(make_schedule("multi_copy", 1, 2), costs)
    assert single.ends_s.tolist() == [8.0, 16.0]
    assert copies.ends_s.tolist() == [8.0, 9.0, 16.0, 17.0]


def test_compiled_passes_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = make_schedule("dualpipe_v", 3, 8)
    costs = random_costs(schedule, 3, overlap=False)
    plain = simulate_operators(schedule, costs)
    monkeypatch.setattr(pipeline_passes, "COMPILED_GROUPS", 0)
    compiled = simulate_operators(schedule, costs)
    assert compiled.step_time_s == plain.step_time_s
    np.testing.assert_array_equal(compiled.ends_s, plain.ends_s)


def test_wrong_operators_are_refused() -> None:
    none = np.zeros(0, dtype=np.int64)
    with pytest.raises(InputError, match="needs operators"):
        Operators.chain(np.zeros(0), none)
    with pytest.raises(InputError, match="finite time of at least 0"):
        Operators.chain(np.array([-1.0]), np.zeros(1, dtype=np.int64))
    with pytest.raises(InputError, match="Operator 0 waits for operator 0"):
        Operators(
            seconds=np.ones(1),
            communication=np.zeros(1, dtype=np.int64),
            dependency_offsets=np.array([0, 1]),
            dependencies=np.array([0]),
        )
    one = Operators.chain(np.ones(1), np.zeros(1, dtype=np.int64))
    with pytest.raises(InputError, match="has 2 stages, but there are 1 lists of operators of kind forward"):
        simulate_operators(make_schedule("1f1b", 2, 2), OperatorCosts(passes={ActionKind.FORWARD: [one]}))


def test_first_and_last_micro_batch_run_their_own_operators_and_meetings_wait_for_all() -> None:
    schedule = make_schedule("1f1b", 2, 3)

    def one(seconds: float) -> list[Operators]:
        return [Operators.chain(np.array([seconds]), np.zeros(1, dtype=np.int64))] * schedule.stages

    passes = {ActionKind.FORWARD: one(1.0), ActionKind.BACKWARD: one(2.0)}
    plain = OperatorCosts(passes=passes)
    first = {ActionKind.FORWARD: one(10.0)}
    costs = OperatorCosts(
        passes=passes, first=first, last={ActionKind.BACKWARD: one(5.0)}, meetings=[((0, 1), 7.0)], epilogue_s=0.5
    )
    found, usual = simulate_operators(schedule, costs), simulate_operators(schedule, plain)
    kernels = np.subtract(found.step_time_s, found.bubble_s)
    np.testing.assert_allclose(kernels, 10 + 2 * 1 + 2 * 2 + 5 + 0.5)
    assert usual.step_time_s == pytest.approx((3 + 1) * 3)
    np.testing.assert_allclose(found.ready_s, found.computed_s.max() + 7.0)


def test_operators_that_need_no_input_run_before_the_pass_begins() -> None:
    schedule = make_schedule("gpipe", 2, 1)
    kernel = Operators.chain(np.array([1.0]), np.zeros(1, dtype=np.int64))

    def gathering(ahead: bool) -> Operators:
        return Operators(
            seconds=np.array([1.0, 1.0]),
            communication=np.array([2, 0]),
            dependency_offsets=np.array([0, 0, 1]),
            dependencies=np.array([0]),
            ahead=np.array([ahead, False]),
        )

    def step(ahead: bool) -> float:
        passes = {ActionKind.FORWARD: [kernel, gathering(ahead)], ActionKind.BACKWARD: [kernel, kernel]}
        return simulate_operators(schedule, OperatorCosts(passes=passes)).step_time_s

    assert (step(True), step(False)) == (4.0, 5.0)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_h1", 1)])
def test_what_nothing_hides_comes_before_and_after_all_passes(name: str, chunks: int) -> None:
    """Parameters gathered and gradients summed once a step delay no other rank."""
    schedule = make_schedule(name, 4, 8, chunks)

    def costs(gathered: float, summed: float) -> OperatorCosts:
        def row(beside: Sequence[float]) -> list[Operators]:
            """One pass of each stage: a kernel, and what travels beside it before or behind its output."""
            streams = np.array([0, *(STREAMS - 1 for _ in beside)])
            return [Operators.chain(np.array([1.0, *beside]), streams)] * schedule.stages

        kinds = {ActionKind(int(kind)) for kind in np.unique(schedule.kind)}
        return OperatorCosts(
            passes={kind: row(()) for kind in kinds},
            first={ActionKind.FORWARD: row((gathered,))},
            last={kind: row((summed,)) for kind in kinds & {ActionKind.BACKWARD, ActionKind.WEIGHT_GRADIENT}},
            send_s=0.1,
        )

    alone, both = (in_one_stream(schedule, costs(*sizes)) for sizes in ((0.0, 0.0), (2.0, 3.0)))
    step, longer = (simulate_operators(schedule, one).step_time_s for one in (alone, both))
    assert longer == pytest.approx(step + 5.0 * chunks, rel=1e-12)
    assert fast_engine.run(operator_table(schedule, both))[1].max() == pytest.approx(longer, rel=1e-12)


def test_what_travels_beside_every_pass_keeps_its_turn() -> None:
    schedule = make_schedule("1f1b", 2, 4)
    one = Operators.chain(np.array([1.0, 0.5]), np.array([0, STREAMS - 1]))
    costs = OperatorCosts(passes={kind: [one, one] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)})
    turned = in_one_stream(schedule, costs)
    assert not np.any(turned.epilogue_s)
    whole = Operators.chain(np.array([1.5]), np.array([0]))
    joined = replace(turned, passes={kind: [whole, whole] for kind in costs.passes})
    steps = [simulate_operators(schedule, each).step_time_s for each in (turned, joined)]
    assert steps[0] == pytest.approx(steps[1], rel=1e-12)
