"""Meshes and micro-batches around the operator search: what is left out would not have been kept."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from planner.cost.work import optimizer
from planner.plans.pins import Pins
from planner.search import candidates
from planner.search.candidates import Found, Known, Misfit, Space, closed, explore
from planner.search.dynamic_programming import fastest, once_s, solve
from planner.search.problem.unaligned import aligned
from planner.search.problem.variables import Kind
from simulator.profiles import load_profile
from tests.planner.search.problems import BUCKET_BYTES, captured, make_mesh, make_problem


@cache
def space() -> Space:
    graph, decisions = aligned(captured("gpt2-tiny"))
    return Space(
        graph=graph,
        decisions=decisions,
        hardware=load_profile("dgx-a100"),
        devices=4,
        global_batch=64,
        optimizer=optimizer("adamw"),
        pins=Pins(),
        bucket_bytes=BUCKET_BYTES,
    )


@cache
def most_bytes() -> float:
    found = [item for item in explore(space(), float("inf")) if isinstance(item, Found)]
    return max(item.solution.memory_bytes for item in found)


@pytest.mark.parametrize("share", [0.9, 0.3, 0.1, 0.01])
@pytest.mark.parametrize("shape", [(4, 1), (1, 4)])
def test_the_first_micro_batch_that_fits_is_that_of_a_scan(shape: tuple[int, int], share: float) -> None:
    limit = share * most_bytes()
    mesh = candidates._Shape(space(), *shape)
    needs = [candidates.least_bytes(mesh.problem(count)) for count in mesh.counts]
    assert needs == sorted(needs, reverse=True)
    first = next((position for position, bytes_ in enumerate(needs) if bytes_ <= limit), None)
    found = mesh._first_fitting(limit)
    if first is None:
        assert isinstance(found, Misfit)
        assert found.memory_bytes == needs[-1]
    else:
        assert found == first


@pytest.mark.parametrize("share", [2.0, 0.2, 0.02])
def test_meshes_over_the_plans_wanted_are_left_out_and_no_others(share: float) -> None:
    limit = share * most_bytes()
    everything, few = (
        [item for item in explore(space(), limit, wanted=wanted) if isinstance(item, Found)] for wanted in (None, 2)
    )
    best = sorted(item.solution.objective_s for item in everything)[:2]
    assert sorted(item.solution.objective_s for item in few)[:2] == best


def meshes_found(known: Known) -> set[tuple[int, ...]]:
    return {i.mesh.sizes for i in explore(space(), np.inf, known=known) if isinstance(i, Found)}


def test_passes_are_found_out_where_a_mesh_with_more_data_parallel_ranks_is_too_slow() -> None:
    step = 10 * min(i.solution.objective_s for i in explore(space(), np.inf) if isinstance(i, Found))
    asked: list[tuple[int, bool]] = []

    def passes_s(data: int, tensor: int, find: bool) -> tuple[float, float]:
        asked.append((data, find))
        return {4: 0.05, 2: 2.0, 1: 3.0 if find else 0.0}[data] * step, 0.0

    assert meshes_found(Known(steps_s=(step,), passes_s=passes_s)) == {(4,)}
    assert {data: find for data, find in asked if data < 4} == {2: False, 1: True}


def test_meshes_whose_passes_take_too_long_are_left_out() -> None:
    best = min(
        (item for item in explore(space(), np.inf) if isinstance(item, Found)), key=lambda i: i.solution.objective_s
    )
    step = 10 * best.solution.objective_s
    slow = Known(steps_s=(step,), passes_s=lambda data, tensor, find: ((0.05 if data == 4 else 2.0) * step, 0.0))
    assert meshes_found(Known(steps_s=(step,))) > meshes_found(slow) == {(4,)}


def test_kernels_with_the_sums_that_they_wait_for_leave_meshes_out() -> None:
    problems = {shape: candidates._Shape(space(), *shape).problem(1) for shape in ((4, 1), (2, 2), (1, 4))}
    kernels = {shape: problem.least_kernels_s for shape, problem in problems.items()}
    for shape, problem in problems.items():
        assert 0 < kernels[shape] <= problem.least_work_s <= fastest(problem).objective_s
    step = 10 * max(fastest(problem).objective_s for problem in problems.values())
    near = candidates.NEAR_ENOUGH * step

    def waiting(share: float) -> Known:
        waited = {data: share * (near - kernels[data, tensor]) for data, tensor in kernels}
        return Known(steps_s=(step,), passes_s=lambda data, tensor, find: (0.0, waited[data]))

    assert meshes_found(waiting(0.999)) == meshes_found(Known(steps_s=(step,)))
    assert meshes_found(waiting(1.001)) == set()


def test_passes_that_free_strategies_shorten_leave_no_mesh_out() -> None:
    step = min(i.solution.objective_s for i in explore(space(), np.inf) if isinstance(i, Found))
    # Whoever cuts the batch alone takes a hundred times as long, on every mesh.
    slow = Known(steps_s=(step,), passes_s=lambda data, tensor, find: (100.0 * step, 0.0))
    assert meshes_found(slow) == meshes_found(Known(steps_s=(step,)))


def test_meshes_that_nothing_can_hide_are_left_out() -> None:
    items = [item for item in explore(space(), np.inf) if isinstance(item, Found)]
    best = min(items, key=lambda item: item.solution.objective_s)
    hidden = best.solution.objective_s - once_s(best.problem, best.solution)
    near = candidates.NEAR_ENOUGH
    assert best.mesh.sizes in meshes_found(Known(steps_s=(hidden / near * 1.01,)))
    assert meshes_found(Known(steps_s=(hidden / near * 0.99,))) == set()


def test_messages_once_a_step_are_those_of_parameters_in_all_layers() -> None:
    folded, written_out = (
        make_problem(captured("gpt2-tiny"), make_mesh(data=2, tensor=2), unfolded=unfolded)
        for unfolded in (False, True)
    )
    plan = fastest(written_out)
    kinds = [variable.kind for variable in written_out.decisions.variables]
    parameters = {number for number, kind in enumerate(kinds) if kind is Kind.PARAMETER}
    once = sum(
        float(cost.time[plan.assignment[a], plan.assignment[b]])
        for (a, b), cost in written_out.pairs.items()
        if parameters & {a, b}
    )
    assert once_s(written_out, plan) == pytest.approx(once, rel=1e-12)
    assert once_s(folded, fastest(folded)) == pytest.approx(once, rel=1e-9)
    assert 0 < once < plan.objective_s


def test_labels_prove_the_best_plan_and_keep_the_others() -> None:
    limit = 0.1 * most_bytes()
    found = [item for item in explore(space(), limit) if isinstance(item, Found)]
    done = closed(space(), found, limit)
    assert len(done) == len(found)
    exact = min(solution.objective_s for item in found if (solution := solve(item.problem, limit)) is not None)
    assert done[0].solution.objective_s == pytest.approx(exact, rel=1e-9)
    assert done[0].solution.gap <= 1e-9
    assert all(item.solution.memory_bytes <= limit for item in done)


def test_other_modes_are_not_closed() -> None:
    fast = replace(space(), search_mode="recursive_programming")
    found = [item for item in explore(fast, np.inf) if isinstance(item, Found)]
    assert [item.solution.objective_s for item in closed(fast, found, np.inf)] == sorted(
        item.solution.objective_s for item in found
    )
