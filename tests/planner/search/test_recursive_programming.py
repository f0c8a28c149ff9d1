"""Recursive programming: always a plan where there is one, near the optimum, whatever the device count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search import dynamic_programming
from planner.search.problem.problem import Problem, Solution
from planner.search.recursive_programming import solve, with_bound
from planner.search.sequential import prime_factors
from tests.oracles.brute_force import TableProblem, exhaustive, random_cost
from tests.planner.search.one_axis import OneAxis, one_axis, wide_graphs
from tests.planner.search.problems import captured, captured_small, make_mesh, make_problem
from tests.planner.search.test_exactness import chains_of_blocks


def bounded(problem: Problem, limit: float) -> Solution | None:
    found = solve(problem, limit)
    return found and with_bound(problem, found, limit)


def check(problem: OneAxis, limit: float) -> None:
    expected = exhaustive(problem, limit)
    found = bounded(cast("Problem", problem), limit)
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    assert found.memory_bytes <= limit
    assert found.objective_s >= expected[0] - 1e-9
    assert found.lower_bound_s <= expected[0] + 1e-9
    states = tuple(found.assignment[v] for v in range(len(problem.sizes)))
    if not problem.block:
        time = sum(c.time[s] for c, s in zip(problem.unary, states, strict=True))
        time += sum(c.time[states[a], states[b]] for (a, b), c in problem.pairs.items())
        assert found.objective_s == pytest.approx(time, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(wide_graphs(), st.one_of(st.just(np.inf), st.integers(0, 40)))
def test_finds_a_plan_wherever_there_is_one(problem: OneAxis, limit: float) -> None:
    check(problem, limit)


@settings(max_examples=100, deadline=None)
@given(chains_of_blocks())
def test_finds_a_plan_of_folded_blocks(problem: TableProblem) -> None:
    check(one_axis(problem), np.inf)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_trees_are_solved_exactly(seed: int, count: int) -> None:
    """Nothing but light operators between heavy ones: all of a tree can be folded."""
    random = np.random.default_rng(seed)
    sizes = tuple(int(s) for s in random.integers(1, 4, count))
    pairs = {(int(random.integers(0, b)), b): None for b in range(1, count)}
    tables = {(a, b): random_cost(random, (sizes[a], sizes[b]), forbidden=0.0) for a, b in pairs}
    problem = OneAxis(sizes, tuple(random_cost(random, (s,)) for s in sizes), tables, {})
    found, expected = solve(cast("Problem", problem), np.inf), exhaustive(problem, np.inf)
    assert found is not None
    assert expected is not None
    assert found.objective_s == expected[0]


def gap_to_optimum(problem: Problem, solution: Solution) -> float:
    """Part of the solution's objective that the exact optimum saves."""
    return 1.0 - dynamic_programming.fastest(problem).objective_s / solution.objective_s


@pytest.mark.parametrize("axes", [{"data": 8}, {"tensor": 4}, {"data": 2, "tensor": 4}, {"data": 6, "tensor": 2}])
@pytest.mark.parametrize("name", ["gpt2-tiny", pytest.param("bert", marks=pytest.mark.slow)])
def test_is_near_the_optimum(name: str, axes: Mapping[str, int]) -> None:
    graph = captured_small(name, 4) if name == "bert" else captured(name, 4)
    problem = make_problem(graph, make_mesh(**axes), batch=24, micro_batches=2)
    found = solve(problem, np.inf)
    assert found is not None
    assert found.lower_bound_s == 0.0
    assert -1e-9 <= gap_to_optimum(problem, found) <= 0.03


@pytest.mark.parametrize("share", [0.0, 0.5, pytest.param(0.9, marks=pytest.mark.slow)])
def test_keeps_the_memory_limit(share: float) -> None:
    problem = make_problem(captured("gpt2-tiny", 4), make_mesh(data=4))
    low = dynamic_programming.smallest(problem).memory_bytes
    limit = low + share * (dynamic_programming.fastest(problem).memory_bytes - low)
    found = bounded(problem, limit)
    assert found is not None
    assert found.memory_bytes <= limit
    assert 0 < found.lower_bound_s <= found.objective_s
    assert found.gap <= 0.1
    assert solve(problem, 0.999 * low) is None


@pytest.mark.parametrize("devices", [3, 24, 2048, 4096, 4093])
def test_any_number_of_devices(devices: int) -> None:
    """A prime, a batch below the device count, thousands of devices: dims that do not divide stay whole."""
    problem = make_problem(captured("gpt2-tiny", 4), make_mesh(data=devices), batch=8)
    found = solve(problem, np.inf)
    assert found is not None
    assert gap_to_optimum(problem, found) <= 0.03


def test_restrictions_hold() -> None:
    """Parameters pinned to sharded storage are stored so; the exact search under the same pins bounds the plan."""
    problem = make_problem(captured("gpt2-tiny", 4), make_mesh(data=4), storage="sharded")
    found = solve(problem, np.inf)
    assert found is not None
    for number, states in enumerate(problem.states):
        if states.variable.kind == "parameter":
            (choice,) = states.choice[:, found.assignment[number]]
            assert all(p >= 0 for p in states.variable.choices[choice].writes.values())


@given(st.integers(1, 5000))
def test_prime_factors_multiply_back(number: int) -> None:
    factors = prime_factors(number)
    assert int(np.prod(factors, dtype=np.int64)) == number
    assert all(len(prime_factors(f)) == 1 for f in factors)
