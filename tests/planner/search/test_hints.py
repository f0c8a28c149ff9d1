"""Hints name operators by pattern and fix their placements, for propagation and for the exact search."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.plans.hints import hint, load_hints
from planner.search.dynamic_programming import fastest
from planner.search.problem.hints import constrained, targets
from planner.search.problem.problem import Problem
from simulator.errors import InputError, UnsupportedError
from tests.planner.search.problems import captured, make_mesh, make_problem


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(captured("gpt2-tiny", 5), make_mesh(data=2, tensor=2))


def names(problem: Problem, pattern: str) -> dict[str, list[int]]:
    """First nodes of the variables that a pattern is for, with their layers."""
    found = targets(problem.parts, [hint(pattern, "tensor", outputs=["R"])])
    decisions = problem.decisions
    return {problem.graph.nodes[decisions.variables[v].nodes[0]].name: list(layers) for v, layers in found.items()}


def test_a_module_stands_for_its_product(problem: Problem) -> None:
    assert names(problem, "blocks.*.expand") == {"blocks.0.expand/addmm": [0], "blocks.1.expand/addmm": [1, 2, 3, 4]}
    assert names(problem, "blocks.3.expand") == {"blocks.1.expand/addmm": [3]}
    assert names(problem, "blocks.*/gelu") == {"blocks.0/gelu": [0], "blocks.1/gelu": [1, 2, 3, 4]}
    assert names(problem, "blocks.[24].expand.weight") == {"blocks.1.expand.weight": [2, 4]}
    assert names(problem, "tokens") == {"tokens": [0]}


@pytest.mark.parametrize(
    ("pattern", "axis", "outputs", "message"),
    [
        ("blocks.*.expnd", "tensor", ["S(1)"], "matches no operator, parameter or input; near are blocks.1.expand"),
        ("blocks.*.expand", "tensr", ["S(1)"], "did you mean 'tensor'"),
        ("blocks.*.expand", "tensor", ["S(1)", "R"], "2 outputs, but 'blocks.0.expand/addmm' .* has 1"),
        ("blocks.*.expand", "tensor", ["S(2)"], r"cannot take it: no rule is like that; it offers .*S\(1\)"),
        ("blocks.*.expand", "tensor", ["S(0)"], "does not divide, or a pin forbids it"),
        ("blocks.*.expand", "tensor", ["shard"], "placement 'shard' is not one of"),
        ("blocks.*.expand", "tensor", ["*"], "gives no placement"),
    ],
)
def test_a_hint_that_cannot_be_kept_says_why(
    problem: Problem, pattern: str, axis: str, outputs: list[str], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        constrained(problem, [hint(pattern, axis, outputs=outputs)])


def test_the_exact_search_keeps_hints(problem: Problem) -> None:
    free = fastest(problem)
    pinned = constrained(problem, [hint("blocks.*.expand", "tensor", outputs=["P"])])
    found = fastest(pinned)
    assert free.objective_s < found.objective_s < float("inf")
    for number in targets(problem.parts, [hint("blocks.*.expand", "tensor", outputs=["P"])]):
        axis = problem.states[number].choice[1, found.assignment[number]]
        assert problem.states[number].variable.choices[axis].rules[0].outputs == (-2,)
    assert fastest(problem).objective_s == free.objective_s


def test_an_axis_that_the_mesh_does_not_have_leaves_all_free(problem: Problem) -> None:
    pinned = constrained(problem, [hint("blocks.*.expand", "context", outputs=["R"])])
    assert fastest(pinned).objective_s == fastest(problem).objective_s


def test_contradicting_pins_of_one_operator_are_refused(problem: Problem) -> None:
    pair = [hint("blocks.*.expand", "tensor", outputs=[p]) for p in ("S(1)", "P")]
    with pytest.raises(InputError, match="contradict each other at 'blocks.0.expand/addmm'"):
        constrained(problem, pair)


def test_the_exact_search_may_tell_the_first_layer_from_the_rest_and_no_other(problem: Problem) -> None:
    fastest(constrained(problem, [hint("blocks.0.expand", "tensor", outputs=["P"])]))
    with pytest.raises(UnsupportedError, match="'blocks.3.expand' .* is for 1 of the layers of 'blocks'"):
        constrained(problem, [hint("blocks.3.expand", "tensor", outputs=["P"])])
    fastest(constrained(problem, [hint(f"blocks.{n}.expand", "tensor", outputs=["P"]) for n in ("*", "3")]))


def test_hints_are_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "hints.yaml"
    file.write_text(
        "- {operators: 'blocks.*.expand', axis: tensor, inputs: ['*', R, S(1)], outputs: [S(1)]}\n"
        "- {operators: 'blocks.*.contract', axis: tensor, outputs: [P]}\n"
    )
    assert load_hints(file) == (
        hint("blocks.*.expand", "tensor", inputs=["*", "R", "S(1)"], outputs=["S(1)"]),
        hint("blocks.*.contract", "tensor", outputs=["P"]),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{operators: a}", "write a list of hints"),
        ("- {operators: a, axis: tensor, output: [R]}", "hint 1 has other keys"),
        ("- {operators: a, outputs: [R]}", "operators and axis are needed"),
        ("- {operators: 3, axis: tensor, outputs: [R]}", "operators 3 is no text"),
        ("- {operators: a, axis: tensor, outputs: R}", "outputs 'R' is no list"),
        ("- {operators: a, axis: tensor, outputs: [Q]}", "hint 1: placement 'Q'"),
        ("- [", "not valid YAML"),
        ("!!python/object/apply:os.system [true]", "not valid YAML"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "hints.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        load_hints(file)
    with pytest.raises(InputError, match="does not exist"):
        load_hints(tmp_path / "none.yaml")
