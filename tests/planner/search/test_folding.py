"""The search of a folded graph is the search of the whole one, at a cost that does not grow with depth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from planner.graph.folding import template_name
from planner.graph.operator_graph import OperatorGraph
from planner.search.dynamic_programming import fastest, smallest, solve
from planner.search.problem.problem import node_rules
from tests.oracles.milp import solve_with_highs
from tests.planner.search.problems import captured, captured_small, make_mesh, make_problem

MESHES: tuple[Mapping[str, int], ...] = ({"data": 2}, {"tensor": 4}, {"data": 2, "tensor": 2})
ROUNDING = 1e-10


@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("axes", MESHES)
def test_folded_equals_unfolded(axes: Mapping[str, int], micro_batches: int, layers: int) -> None:
    graph, mesh = captured("gpt2-tiny", layers), make_mesh(**axes)
    folded = make_problem(graph, mesh, micro_batches=micro_batches)
    whole = make_problem(graph, mesh, micro_batches=micro_batches, unfolded=True)
    for search in (fastest, smallest):
        one, other = search(folded), search(whole)
        assert one.objective_s == pytest.approx(other.objective_s, rel=ROUNDING)
        assert one.memory_bytes == other.memory_bytes


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_other_families_folded_equal_unfolded(name: str) -> None:
    """In BERT, whose blocks end in a norm, the last block's output is read once and all others' four times."""
    graph, mesh = captured_small(name, 4), make_mesh(data=2, tensor=2)
    one = fastest(make_problem(graph, mesh))
    other = fastest(make_problem(graph, mesh, unfolded=True))
    assert one.objective_s == pytest.approx(other.objective_s, rel=ROUNDING)
    assert one.memory_bytes == other.memory_bytes


@pytest.mark.parametrize("axes", MESHES)
def test_the_layers_of_a_folded_plan_cost_what_they_cost_in_the_whole_graph(axes: Mapping[str, int]) -> None:
    """A plan whose layers differ, because memory binds, is priced as the whole graph prices its rules."""
    graph, mesh = captured("gpt2-tiny", 6), make_mesh(**axes)
    folded = make_problem(graph, mesh)
    whole = make_problem(graph, mesh, unfolded=True)
    limit = 0.4 * smallest(folded).memory_bytes + 0.6 * fastest(folded).memory_bytes
    found = solve(folded, limit)
    assert found is not None
    assert found.lower_bound_s <= found.objective_s
    # Every operator's rules of the folded plan, pinned in the whole problem; stations are left to choose.
    rules, layers = node_rules(folded, found)
    expanded = dict(rules)
    for part in layers:
        for number in range(part.first, part.last + 1):
            expanded.update({name.replace("*", str(number), 1): chosen for name, chosen in part.rules.items()})
    assert {n.name for i, n in enumerate(whole.graph.nodes) if whole.decisions.of_node[i] >= 0} == set(expanded)
    choices = [list(v.choices) for v in whole.decisions.variables]
    keep: list[tuple[set[object], ...]] = []
    for variable in whole.decisions.variables:
        names = [whole.graph.nodes[i].name for i in variable.nodes]
        keep.append(tuple({tuple(expanded[name][axis] for name in names)} for axis in range(len(mesh.axes))))
    fixed = whole
    for number, states in enumerate(whole.states):
        if not whole.decisions.variables[number].nodes:
            continue
        allowed = [
            all(choices[number][c].rules in keep[number][axis] for axis, c in enumerate(states.choice[:, s]))
            for s in range(len(states))
        ]
        assert any(allowed)
        times = fixed.unary[number].time.copy()
        times[[not a for a in allowed]] = float("inf")
        unary = list(fixed.unary)
        unary[number] = replace(unary[number], time=times)
        fixed.unary = tuple(unary)
    assert fastest(fixed).objective_s <= found.objective_s * (1 + ROUNDING)
    again = solve(fixed, found.memory_bytes)
    assert again is not None
    assert again.objective_s <= found.objective_s * (1 + ROUNDING)


@pytest.mark.parametrize("share", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_the_folded_search_is_held_to_the_integer_program_of_the_whole_graph(share: float) -> None:
    pytest.importorskip("highspy", reason="highspy is not installed: no integer programs")
    graph, mesh = captured("gpt2-tiny", 3), make_mesh(data=4)
    folded = make_problem(graph, mesh)
    low, high = smallest(folded).memory_bytes, fastest(folded).memory_bytes
    limit = float("inf") if share == 1 else low + share * (high - low)
    found = solve(folded, limit)
    exact = solve_with_highs(make_problem(graph, mesh, unfolded=True), limit)
    if exact.status != "optimal":
        pytest.skip(f"HiGHS stopped early: {exact.status}")
    assert found is not None
    assert found.lower_bound_s <= exact.objective_s * (1 + 1e-6)
    assert found.objective_s >= exact.objective_s * (1 - 1e-6)


def sizes(graph: OperatorGraph) -> tuple[object, ...]:
    problem = make_problem(graph, make_mesh(data=2, tensor=2))
    tables = sorted((pair, cost.time.shape) for pair, cost in problem.pairs.items())
    return len(problem.decisions.variables), [len(s) for s in problem.states], tables


def test_tables_do_not_grow_with_depth_and_layers_stay_folded() -> None:
    shallow, deep = captured("gpt2-tiny", 12), captured("gpt2-tiny", 96)
    assert sizes(shallow) == sizes(deep)
    mesh = make_mesh(data=2, tensor=2)
    one, other = (make_problem(g, mesh) for g in (shallow, deep))
    found, deeper = fastest(one), fastest(other)
    assert found.width == deeper.width
    assert (len(found.layers[0]), len(deeper.layers[0])) == (11, 95)
    assert len(node_rules(one, found)[1]) == len(node_rules(other, deeper)[1]) <= 3


def test_a_plan_names_each_operator_of_a_block_once() -> None:
    graph = captured("gpt2-tiny", 5)
    problem = make_problem(graph, make_mesh(data=2))
    rules, layers = node_rules(problem, fastest(problem))
    (run,) = graph.runs
    names = {template_name(graph.nodes[i].name, run.prefix) for i in run.second if problem.decisions.of_node[i] >= 0}
    assert [n for part in layers for n in range(part.first, part.last + 1)] == list(range(5))
    assert all(set(part.rules) == names for part in layers)
    assert not any(name.startswith("blocks.") for name in rules)
