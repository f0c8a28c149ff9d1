"""Graphs too wide for elimination: bounds hold, plans fit, and the two meet wherever the bound is tight."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.search import dynamic_programming
from planner.search.dynamic_programming import WideProblem, solve
from planner.search.exact import buckets
from planner.search.exact.blocks import TooWideError
from planner.search.exact.buckets import Buckets, plain
from planner.search.exact.certified import FAST
from planner.search.exact.model import model_of, possible
from planner.search.exact.wide import Dual, unrolled
from planner.search.problem.problem import Problem, Solution
from tests.oracles.brute_force import TableProblem, exhaustive, random_cost, total
from tests.oracles.milp import solve_with_highs
from tests.planner.search.test_exactness import blocks_of, chains_of_blocks, graphs


def wide(problem: TableProblem, limit: float) -> Solution | None:
    """Search as if elimination were impossible, but for what the bound leaves; a limit is searched after none."""
    searched = WideProblem(cast("Problem", problem), TooWideError(""))
    if limit % 2:  # whether the plan without a limit is known must not matter
        searched.solve(np.inf)
    return searched.solve(limit)


def check(problem: TableProblem, limit: float) -> None:
    expected = exhaustive(problem, limit)
    try:
        found = wide(problem, limit)
    except TooWideError:
        return
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.memory_bytes <= limit
    assert found.objective_s >= expected[0] - 1e-9
    assert found.lower_bound_s <= expected[0] + 1e-9


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(0, 60))
def test_bounds_of_small_graphs_hold_under_a_memory_limit(problem: TableProblem, limit: int) -> None:
    check(problem, float(limit))


@settings(max_examples=30, deadline=None)
@given(chains_of_blocks(), st.one_of(st.just(np.inf), st.integers(20, 60).map(float)))
@example(blocks_of(1, np.random.default_rng(1)), 29.0)  # what is left differs before the first layer and behind it
def test_bounds_of_runs_hold(problem: TableProblem, limit: float) -> None:
    check(problem, limit)


@settings(max_examples=12, deadline=None)
@given(chains_of_blocks())
def test_the_bound_of_a_run_is_one_of_the_whole_graph(problem: TableProblem) -> None:
    expected = exhaustive(problem, np.inf)
    model = possible(model_of(cast("Problem", problem)))
    dual = Dual(unrolled(model).model, FAST)
    bound = dual.tighten()
    if expected is not None:
        assert bound <= expected[0] + 1e-9
        keep = dual.below(expected[0])
        assert all(mask.any() for mask in keep)


def grid(seed: int, rows: int, columns: int, states: int, attraction: float = 0.0) -> TableProblem:
    random = np.random.default_rng(seed)
    count = rows * columns
    pairs = {}
    for v in range(count):
        if v % columns < columns - 1:
            pairs[v, v + 1] = random_cost(random, (states, states), 0.0)
        if v + columns < count:
            pairs[v, v + columns] = random_cost(random, (states, states), 0.0)
    unary = tuple(random_cost(random, (states,)) for _ in range(count))
    return TableProblem((states,) * count, unary, pairs, {})


def clique(seed: int, size: int, states: int) -> TableProblem:
    random = np.random.default_rng(seed)
    pairs = {(a, b): random_cost(random, (states, states), 0.05) for a in range(size) for b in range(a + 1, size)}
    return TableProblem((states,) * size, tuple(random_cost(random, (states,)) for _ in range(size)), pairs, {})


@pytest.mark.parametrize(
    "problem",
    [grid(1, 6, 6, 3), grid(2, 8, 8, 2), clique(3, 7, 3), clique(4, 9, 2), grid(8, 10, 10, 2)],
    ids=["grid-6", "grid-8", "clique-7", "clique-9", "grid-10"],
)
@pytest.mark.parametrize("share", [1.0, pytest.param(0.4, marks=pytest.mark.slow)])
def test_wide_graphs_are_held_to_the_integer_program(problem: TableProblem, share: float) -> None:
    pytest.importorskip("highspy", reason="highspy is not installed: no integer programs")
    free = solve(cast("Problem", problem), np.inf)
    small = dynamic_programming.smallest(cast("Problem", problem))
    assert free is not None
    limit = np.inf if share == 1 else small.memory_bytes + share * (free.memory_bytes - small.memory_bytes)
    exact = solve_with_highs(cast("Problem", problem), limit)
    if exact.status != "optimal":
        pytest.skip(f"HiGHS stopped early: {exact.status}")
    narrow, broad = solve(cast("Problem", problem), limit), wide(problem, limit)
    for found in (narrow, broad):
        assert found is not None
        assert found.memory_bytes <= limit
        assert found.objective_s >= exact.objective_s * (1 - 1e-6)
        assert found.lower_bound_s <= exact.objective_s * (1 + 1e-6)
    assert narrow is not None
    if narrow.gap < 1e-9:
        assert narrow.objective_s == pytest.approx(exact.objective_s, rel=1e-6)


def test_what_is_too_wide_is_bounded_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten variables that all meet, of twelve states: elimination would need a table of 10^10 entries."""
    problem = clique(5, 10, 12)
    found = solve(cast("Problem", problem), np.inf)
    assert found is not None
    assert np.isfinite(found.objective_s)
    assert 0 < found.lower_bound_s <= found.objective_s
    assert total(problem, found.assignment) == (found.objective_s, found.memory_bytes)
    monkeypatch.setattr(buckets, "MAX_WORK", 10)
    chain = grid(6, 1, 6, 3)
    exact = exhaustive(chain, np.inf)
    found = solve(cast("Problem", chain), np.inf)
    assert exact is not None
    assert found is not None
    assert found.objective_s >= exact[0] - 1e-9 >= found.lower_bound_s - 2e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_compiled_loop_gives_what_numpy_gives(seed: int) -> None:
    """The last variable meets three others, by tables of two or three variables."""
    random = np.random.default_rng(seed)
    sizes = [*random.integers(2, 6, 3).tolist(), 7]
    scopes = [(0, 3), (1, 3), (1, 2, 3)] if seed % 2 else [(0, 3), (1, 3), (2, 3), (0, 1, 3)]
    tables = [random.integers(0, 50, [sizes[v] for v in scope]).astype(float) for scope in scopes]
    tables[0][0, 0] = np.inf
    planned = Buckets([plain(scope, sizes) for scope in scopes], sizes, [3])
    numpy_ = planned.run(tables)
    worth, compiled = buckets.WORTH_COMPILING, buckets.COMPILED
    try:
        buckets.WORTH_COMPILING = buckets.COMPILED = 0
        compiled = planned.run(tables)
    finally:
        buckets.WORTH_COMPILING, buckets.COMPILED = worth, compiled
    np.testing.assert_array_equal(numpy_[-1], compiled[-1])
