"""The exact search and HiGHS find the same optimum of real networks, with room to spare and without."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from planner.search.dynamic_programming import fastest, smallest, solve
from planner.search.problem.problem import Problem
from tests.oracles.milp import solve_with_highs
from tests.oracles.reduction import Tables, reduced
from tests.planner.search.problems import captured, captured_small, make_mesh, make_problem

pytest.importorskip("highspy", reason="highspy is not installed: no integer programs")

RELATIVE = 1e-6


def limit_between(problem: Problem, share: float) -> float:
    """A memory limit `share` of the way from the smallest plan to the fastest; infinite for 1."""
    if share == 1:
        return float("inf")
    low, high = smallest(problem).memory_bytes, fastest(problem).memory_bytes
    return low + share * (high - low)


def check(problem: Problem, limit: float) -> None:
    found = solve(problem, limit)
    exact = solve_with_highs(problem, limit, time_limit_s=60.0)
    if exact.status not in ("optimal", "infeasible"):
        pytest.skip(f"HiGHS stopped early: {exact.status}")
    if found is None:
        assert exact.status == "infeasible"
        return
    assert exact.status == "optimal"
    assert found.memory_bytes <= limit
    assert found.lower_bound_s <= exact.objective_s * (1 + RELATIVE)
    assert found.objective_s >= exact.objective_s * (1 - RELATIVE)
    assert found.gap <= RELATIVE
    assert found.objective_s == pytest.approx(exact.objective_s, rel=RELATIVE)


@pytest.mark.parametrize("share", [1.0, 0.6, 0.1])
@pytest.mark.parametrize("axes", [{"data": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}])
def test_perceptron(axes: Mapping[str, int], share: float) -> None:
    problem = make_problem(captured("mlp"), make_mesh(**axes))
    check(problem, limit_between(problem, share))


@pytest.mark.parametrize(
    ("axes", "micro_batches", "share"),
    [
        ({"data": 4}, 1, 1.0),
        ({"data": 4}, 2, 0.5),
        pytest.param({"data": 2}, 1, 0.1, marks=pytest.mark.slow),
        ({"tensor": 2}, 1, 1.0),
        ({"tensor": 2}, 2, 0.3),
    ],
)
def test_transformer_of_two_layers(axes: Mapping[str, int], micro_batches: int, share: float) -> None:
    graph = captured("gpt2-tiny", 2)
    problem = make_problem(graph, make_mesh(**axes), micro_batches=micro_batches, unfolded=True)
    check(problem, limit_between(problem, share))


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "axes"), [(3, {"data": 2, "tensor": 4}), (4, {"data": 2, "tensor": 2})])
def test_transformers_of_more_layers_on_two_axes(layers: int, axes: Mapping[str, int]) -> None:
    problem = make_problem(captured("gpt2-tiny", layers), make_mesh(**axes), unfolded=True)
    check(problem, float("inf"))


def check_what_is_left(problem: Problem, share: float) -> None:
    """HiGHS is given what may be in a plan as good as the one found, by a bound that the search knows nothing of."""
    free = fastest(problem)
    limit = limit_between(problem, share)
    found = solve(problem, limit)
    assert found is not None
    assert found.memory_bytes <= limit
    known = found.objective_s * (1 + RELATIVE)
    tables: Tables | Problem = problem
    price = 0.0 if share == 1 else (found.objective_s - free.objective_s) / (free.memory_bytes - limit)
    for times in (1.0,) if share == 1 else (0.5, 1.0, 2.0):
        paid = 0.0 if share == 1 else times * price * limit
        tables = reduced(tables, known, price=times * price, paid=paid)
    exact = solve_with_highs(tables, limit, time_limit_s=60.0)
    assert exact.status == "optimal"
    assert found.gap <= RELATIVE
    assert found.objective_s == pytest.approx(exact.objective_s, rel=RELATIVE)


THREE_AXES = {"data": 2, "context": 2, "tensor": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "axes", "share"),
    [
        ("gpt", 2, {"data": 2, "context": 2, "tensor": 4}, 1.0),
        ("gpt", 2, THREE_AXES, 0.5),
        ("gpt", 3, THREE_AXES, 1.0),
        ("gpt", 4, THREE_AXES, 1.0),
        ("llama", 2, THREE_AXES, 1.0),
    ],
)
def test_transformers_on_three_axes(name: str, layers: int, axes: Mapping[str, int], share: float) -> None:
    check_what_is_left(make_problem(captured_small(name, layers), make_mesh(**axes), unfolded=True), share)


@pytest.mark.parametrize(
    ("name", "axes", "share"),
    [
        ("mlp", {"data": 2, "context": 2, "tensor": 2}, 1.0),
        pytest.param("mlp", {"data": 2, "context": 2, "tensor": 2}, 0.3, marks=pytest.mark.slow),
        pytest.param("llama", {"data": 2, "tensor": 2}, 1.0, marks=pytest.mark.slow),
        pytest.param("llama", {"tensor": 2}, 0.4, marks=pytest.mark.slow),
        pytest.param("gpt", {"data": 2, "tensor": 2}, 1.0, marks=pytest.mark.slow),
        pytest.param("resnet50", {"data": 2}, 1.0, marks=pytest.mark.slow),
    ],
)
def test_other_networks_and_three_axes(name: str, axes: Mapping[str, int], share: float) -> None:
    graph = captured("mlp") if name == "mlp" else captured_small(name, 2)
    problem = make_problem(graph, make_mesh(**axes), unfolded=True)
    check(problem, limit_between(problem, share))


def test_a_limit_below_the_smallest_plan_is_infeasible_for_both() -> None:
    problem = make_problem(captured("mlp"), make_mesh(data=2))
    limit = smallest(problem).memory_bytes * 0.999
    assert solve(problem, limit) is None
    assert solve_with_highs(problem, limit).status == "infeasible"
