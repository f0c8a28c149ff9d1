"""Tables by segments of layers price a plan as the exact search does."""

from __future__ import annotations

import pytest

from planner.search.dynamic_programming import fastest, smallest, solve
from planner.search.problem.layered_tables import LayeredTables
from tests.planner.search.problems import captured, captured_small, deepened, make_mesh, make_problem


@pytest.mark.parametrize(
    ("name", "layers"),
    [("gpt2-tiny", 5), *(pytest.param(name, 4, marks=pytest.mark.slow) for name in ("bert", "llama"))],
)
def test_every_layer_its_own_segment_costs_what_the_exact_search_says(name: str, layers: int) -> None:
    graph = captured(name, layers) if "-" in name else captured_small(name, layers)
    problem = make_problem(graph, make_mesh(data=4))
    tables = LayeredTables(problem, [range(2, run.count) for run in graph.runs])
    free, least = fastest(problem), smallest(problem)
    between = solve(problem, (free.memory_bytes + least.memory_bytes) / 2)
    assert between is not None
    for plan in (free, least, between):
        states = tables.states_of(plan)
        time, memory = tables.cost(states)
        assert time == pytest.approx(plan.objective_s, rel=1e-12)
        assert memory == plan.memory_bytes
        again = tables.solution(states)
        assert (again.assignment, again.layers) == (plan.assignment, plan.layers)


def test_one_segment_costs_what_equal_layers_cost() -> None:
    """The first layer, and then equal ones: the same sum whether or not they are written as segments."""
    graph = captured("gpt2-tiny", 6)
    problem = make_problem(graph, make_mesh(tensor=4))
    whole, parts = LayeredTables(problem), LayeredTables(problem, [(2, 4)])
    plan = whole.solution(whole.states_of(fastest(problem)))
    assert parts.cost(parts.states_of(plan)) == pytest.approx(whole.cost(whole.states_of(plan)), rel=1e-12)
    assert len(plan.layers[0]) == 5


def test_tables_do_not_grow_with_depth() -> None:
    mesh = make_mesh(data=2)
    sizes = [
        len(LayeredTables(make_problem(deepened(captured("gpt2-tiny"), layers), mesh)).pairs) for layers in (3, 96)
    ]
    assert sizes[0] == sizes[1]
