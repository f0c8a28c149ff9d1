"""Along a context axis neighbours agree on every tensor; gradients of parameters alone are summed."""

from __future__ import annotations

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.networks import load_network
from planner.search.problem.context_choices import context_choices
from planner.search.problem.variables import Kind, decisions
from planner.sharding.context import ALGORITHMS, Algorithm, context_axis
from planner.sharding.placement import PARTIAL, REPLICATE


def network(name: str) -> OperatorGraph:
    return load_network(f"zoo:{name}", sequence_length=32).capture()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("name", ["gpt2-tiny", "llama3-70b"])
def test_nothing_is_redistributed_but_gradients(name: str, algorithm: Algorithm) -> None:
    graph = network(name)
    made = decisions(graph)
    choices = context_choices(made, context_axis(graph, algorithm))
    summed = set()
    for edge in made.edges:
        written, read = choices[edge.source].writes[edge.tensor], choices[edge.target].reads[edge.tensor]
        if made.variables[edge.target].kind is Kind.PARAMETER:
            assert read == REPLICATE
            summed |= {edge.tensor} if written == PARTIAL else set()
        else:
            assert written == read
    assert summed == {parameter.gradient for parameter in graph.parameters}


def test_choices_are_those_of_the_variable_where_it_has_them() -> None:
    """Only views that keep the local order, attention and the tokens have a choice that no other axis offers."""
    graph = network("gpt2-tiny")
    made = decisions(graph)
    choices = context_choices(made, context_axis(graph))
    for variable, choice in zip(made.variables, choices, strict=True):
        first = variable.choices[0]
        assert len(choice.rules) == len(first.rules)
        assert (choice.reads.keys(), choice.writes.keys()) == (first.reads.keys(), first.writes.keys())
        if choice not in variable.choices:
            kinds = {graph.nodes[node].kernel for node in variable.nodes}
            assert variable.kind is Kind.INPUT or kinds & {"view", "attention"}, variable
