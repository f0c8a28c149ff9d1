"""Bounds of chains by their cuts against brute force, followed in states and listed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.search.stages import chain_bound as chains
from planner.search.stages.chain_bound import chain_bound, chain_bounds, chain_rows, cheapest_rows, listed_cuts
from planner.search.stages.fragments import FILL, STEADY, Fragments
from planner.search.stages.partition import PartitionTask
from planner.search.stages.turn_search import listed_partition
from tests.planner.search.test_pipeline_partition import brute_force, check, tasks


def without_choice(task: PartitionTask) -> PartitionTask:
    """One way of each unit, any memory, and nothing left to synchronise."""
    kinds = []
    for number, kind in enumerate(task.kinds):
        values = np.zeros((1, 7))
        values[:, [FILL, STEADY]] = kind.values[:1][:, [FILL, STEADY]]
        ends = [-1 if number == 0 else 0, -1 if number == len(task.kinds) - 1 else 0]
        kinds.append(Fragments(values, np.array(ends[:1]), np.array(ends[1:]), np.zeros((1, 1), dtype=np.int64)))
    return replace(task, kinds=tuple(kinds), limit_bytes=np.inf)


@given(st.one_of(tasks(), tasks(chunks=2)))
def test_no_way_to_bound_a_chain_is_above_brute_force(task: PartitionTask) -> None:
    best = brute_force(task) * (1 + 1e-9)
    assert chain_bound(task) <= best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chains, "few_cuts", lambda units, pieces: False)
        followed = chain_bound(task)
        assert followed <= best
        patch.setattr(chains, "WIDE", 0)
        assert chain_bound(task) <= followed * (1 + 1e-9)


@settings(max_examples=50)
@given(tasks(chunks=2))
def test_listed_cuts_of_units_without_choice_are_exact(task: PartitionTask) -> None:
    assume(1 < task.pieces <= task.units and (task.hidden_share == 0))
    alone = without_choice(task)
    assert chain_bound(alone) == pytest.approx(brute_force(alone))


@settings(max_examples=50)
@given(tasks())
def test_one_rank_without_choice_is_bounded_by_what_it_takes(task: PartitionTask) -> None:
    alone = replace(task, limit_bytes=np.inf, ranks=1, rank_of=np.zeros(1, dtype=np.int64), in_flight=np.ones(1))
    only = [kind.take(np.zeros(1, dtype=np.int64)) for kind in alone.kinds]
    only = [replace(kind, entry=kind.entry * 0 - 1, exit=kind.exit * 0 - 1) for kind in only]
    alone = replace(alone, kinds=tuple(only))
    assert chain_bound(alone) == pytest.approx(brute_force(alone))


@settings(max_examples=50)
@given(st.one_of(tasks(), tasks(chunks=2)))
def test_the_cheapest_rows_are_those_of_any_states(task: PartitionTask) -> None:
    values = np.concatenate([kind.values for kind in task.kinds])
    anywhere = chain_rows(task, values[None]).anywhere
    for found, expected in zip(cheapest_rows(task), (anywhere.busy, anywhere.fill), strict=True):
        assert np.array_equal(found, expected[0, :, 0, :, 0])


@settings(max_examples=50)
@given(st.one_of(tasks(), tasks(chunks=2)), st.integers(0, 2**16))
def test_tasks_bounded_at_once_have_the_bounds_of_each(task: PartitionTask, seed: int) -> None:
    draw = np.random.default_rng(seed)
    others = [
        replace(
            task, kinds=tuple(replace(k, values=k.values * draw.uniform(0.5, 2, k.values.shape)) for k in task.kinds)
        )
        for _ in range(3)
    ]
    assert chain_bounds([task, *others]).tolist() == [chain_bound(one) for one in (task, *others)]


def test_cuts_are_listed_once_each() -> None:
    first, last = listed_cuts(6, 3)
    assert first.shape == last.shape == (3, 10)
    assert len({tuple(cut) for cut in first.T.tolist()}) == 10
    assert np.array_equal(first[1:], last[:-1] + 1)
    assert set(first[0].tolist()) == {0}
    assert set(last[-1].tolist()) == {5}


@given(tasks(chunks=2))
def test_listed_partitions_fit_and_lie_between_their_bound_and_nothing_better(task: PartitionTask) -> None:
    assume(1 < task.pieces <= task.units)
    found, best = listed_partition(task), brute_force(task)
    if found is None:
        return
    check(task, found)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert found.objective_s >= best * (1 - 1e-9)


@settings(max_examples=50)
@given(tasks(chunks=2))
def test_listed_partitions_without_choice_are_the_best(task: PartitionTask) -> None:
    assume(1 < task.pieces <= task.units)
    alone = without_choice(task)
    found = listed_partition(alone)
    assert found is not None
    assert found.objective_s == pytest.approx(brute_force(alone))
