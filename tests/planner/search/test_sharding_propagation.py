"""Propagation spreads hinted strategies over everything, at little more than the exact search pays under them."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.plans.hints import Hint, hint
from planner.search.dynamic_programming import fastest, smallest
from planner.search.problem.hints import constrained
from planner.search.problem.layered_tables import LayeredTables
from planner.search.problem.problem import Problem, Solution, choices_of
from planner.search.sharding_propagation import propagate
from planner.sharding.placement import PARTIAL
from simulator.errors import InputError
from tests.oracles.brute_force import TableProblem, exhaustive
from tests.planner.search.made_networks import gpt
from tests.planner.search.one_axis import OneAxis, one_axis, wide_graphs
from tests.planner.search.problems import captured, make_mesh, make_problem
from tests.planner.search.test_exactness import chains_of_blocks

MEGATRON = (
    *(hint(f"blocks.*.attention.{name}", "tensor", outputs=["S(1)"]) for name in ("query", "key", "value")),
    hint("blocks.*.attention.output", "tensor", outputs=["P"]),
    hint("blocks.*.expand", "tensor", outputs=["S(1)"]),
    hint("blocks.*.contract", "tensor", outputs=["P"]),
)


LARGE = {"vocabulary": 51200, "hidden": 4096, "layers": 96, "heads": 32, "length": 2048}


def output_of(problem: Problem, solution: Solution, name: str, axis: int = 0, layer: int | None = None) -> int:
    """Placement of an operator's first output along one axis, in a layer of its run if it is in one."""
    index = next(i for i, node in enumerate(problem.graph.nodes) if node.name == name)
    variable = problem.decisions.of_node[index]
    states = solution.assignment if layer is None else solution.layers[0][layer - 1]
    position = problem.decisions.variables[variable].nodes.index(index)
    return choices_of(problem, variable, states[variable])[axis].rules[position].outputs[0]


@settings(max_examples=150, deadline=None)
@given(wide_graphs(), st.one_of(st.just(np.inf), st.integers(0, 40)))
def test_finds_a_plan_wherever_there_is_one(problem: OneAxis, limit: float) -> None:
    expected = exhaustive(problem, limit)
    try:
        found = propagate(cast("Problem", problem), limit).solution
    except InputError:
        found = None
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.memory_bytes <= limit
        assert found.objective_s >= expected[0] - 1e-9


@settings(max_examples=60, deadline=None)
@given(chains_of_blocks())
def test_finds_a_plan_of_folded_blocks(problem: TableProblem) -> None:
    table = one_axis(problem)
    expected = exhaustive(table, np.inf)
    if expected is not None:
        found = propagate(cast("Problem", table), np.inf).solution
        assert found is not None
        assert found.objective_s >= expected[0] - 1e-9


@pytest.mark.parametrize("axes", [{"tensor": 8}, {"data": 4, "tensor": 8}])
def test_six_hints_make_the_plan_of_megatron(axes: dict[str, int]) -> None:
    problem = make_problem(gpt(**LARGE), make_mesh(**axes), batch=8)
    done = propagate(problem, np.inf, MEGATRON)
    assert done.solution is not None
    exact = fastest(constrained(problem, MEGATRON))
    assert done.solution.objective_s <= 1.02 * exact.objective_s
    axis = list(axes).index("tensor")
    for layer in (1, 50, 95):
        placed = [
            output_of(problem, done.solution, f"blocks.1{name}", axis, layer)
            for name in ("/gelu", ".expand/addmm", ".contract/addmm", ".attention.output/addmm")
        ]
        assert placed == [2, 1, -2, -2]
        attention = "blocks.1.attention/_scaled_dot_product_flash_attention_for_cpu"
        assert output_of(problem, done.solution, attention, axis, layer) == 1
    assert output_of(problem, done.solution, "head/mm", axis) == 1
    assert output_of(problem, done.solution, "blocks.0/gelu", axis) == 2


def test_without_hints_everything_follows_the_batch() -> None:
    """Nothing is replicated because it is far from the seeds: every operator with a batch splits it."""
    problem = make_problem(captured("gpt2-tiny", 12), make_mesh(data=8), batch=256)
    done = propagate(problem, np.inf)
    assert done.solution is not None
    batch = {
        node.name: output_of(problem, done.solution, node.name)
        for i, node in enumerate(problem.graph.nodes)
        if node.flops and node.phase == "forward"
    }
    assert batch
    assert set(batch.values()) == {0}


def test_a_hint_for_one_layer_changes_that_layer() -> None:
    problem = make_problem(captured("gpt2-tiny", 6), make_mesh(tensor=4))
    free = propagate(problem, np.inf).solution
    found = propagate(problem, np.inf, [hint("blocks.3.expand", "tensor", outputs=["P"])]).solution
    assert free is not None
    assert found is not None
    outputs = [output_of(problem, found, "blocks.1.expand/addmm", layer=layer) for layer in range(1, 6)]
    usual = output_of(problem, free, "blocks.1.expand/addmm", layer=3)
    assert usual != PARTIAL
    assert outputs == [usual, usual, PARTIAL, usual, usual]
    assert found.objective_s > free.objective_s
    tables = LayeredTables(problem, [range(2, 6)])
    assert tables.cost(tables.states_of(found)) == pytest.approx((found.objective_s, found.memory_bytes), rel=1e-12)


def test_the_more_specific_of_two_hints_holds_and_it_is_said() -> None:
    problem = make_problem(captured("gpt2-tiny", 6), make_mesh(tensor=4))
    hints = [hint("blocks.*.expand", "tensor", outputs=["S(1)"]), hint("blocks.2.expand", "tensor", outputs=["P"])]
    done = propagate(problem, np.inf, hints)
    assert done.solution is not None
    outputs = [output_of(problem, done.solution, "blocks.1.expand/addmm", layer=layer) for layer in (1, 2, 3)]
    assert outputs == [1, -2, 1]
    assert len(done.messages) == 1
    assert (
        "'blocks.2.expand' (tensor: outputs P) and 'blocks.*.expand' (tensor: outputs S(1)) contradict"
        in (done.messages[0])
    )
    assert "'blocks.1.expand/addmm' (layer 2): the first holds; with the other a step would take" in done.messages[0]


@pytest.mark.parametrize("turn", [1, -1])
def test_of_equally_specific_hints_the_cheaper_holds(turn: int) -> None:
    problem = make_problem(captured("gpt2-tiny", 4), make_mesh(tensor=4))
    pair: list[Hint] = [hint("blocks.*/gelu", "tensor", outputs=[p]) for p in ("S(2)", "R")][::turn]
    done = propagate(problem, np.inf, pair)
    assert done.solution is not None
    costs = [fastest(constrained(problem, [item])).objective_s for item in pair]
    cheaper = pair[int(np.argmin(costs))]
    assert output_of(problem, done.solution, "blocks.1/gelu", layer=2) == cheaper.outputs[0]
    assert done.solution.objective_s <= 1.02 * min(costs)
    assert "ms more" in done.messages[0]


def test_tied_embeddings_propagate() -> None:
    """A hint on the tied parameter alone: the head, its other reader, splits the vocabulary without a copy."""
    problem = make_problem(gpt(**LARGE), make_mesh(tensor=8), batch=8)
    vocabulary = [hint("token_embedding.weight", "tensor", outputs=["S(0)"])]
    done = propagate(problem, np.inf, vocabulary)
    assert done.solution is not None
    assert output_of(problem, done.solution, "token_embedding.weight") == 0
    assert output_of(problem, done.solution, "head/mm") == 1
    assert all("S(0) by 'head/mm'" in message for message in done.messages)
    exact = fastest(constrained(problem, vocabulary))
    assert done.solution.objective_s <= 1.02 * exact.objective_s


def test_uses_of_a_tied_parameter_that_disagree_are_reported() -> None:
    problem = make_problem(captured("gpt2-tiny", 2), make_mesh(tensor=4))
    disagreeing = [
        hint("token_embedding/embedding", "tensor", inputs=["S(1)", "*"]),
        hint("head/mm", "tensor", outputs=["S(1)"]),
    ]
    done = propagate(problem, np.inf, disagreeing)
    assert len(done.messages) == 1
    assert "tied parameter 'token_embedding.weight' (also head.weight) is stored" in done.messages[0]
    assert "ms of redistribution a step" in done.messages[0]


def test_keeps_hints_and_the_memory_limit() -> None:
    problem = make_problem(captured("gpt2-tiny", 4), make_mesh(data=2, tensor=4))
    pinned = constrained(problem, MEGATRON)
    low, high = smallest(pinned).memory_bytes, fastest(pinned).memory_bytes
    for limit in (low, (low + high) / 2):
        found = propagate(problem, limit, MEGATRON).solution
        assert found is not None
        assert found.memory_bytes <= limit
        assert output_of(problem, found, "blocks.1.expand/addmm", axis=1, layer=2) == 1
    assert propagate(problem, 0.99 * low, MEGATRON).solution is None
