"""Decisions: stations, gradients, followers; the same at every batch size and depth."""

from __future__ import annotations

import pytest
import torch

from planner.graph.capture import capture_module
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.graph.scaling import at_batch
from planner.networks import InputSpec
from planner.search.problem.gradients import gradient_flows
from planner.search.problem.variables import Kind, Variable, decisions
from planner.sharding.placement import PARTIAL, REPLICATE
from simulator.program import Phase
from tests.planner.search.problems import captured

NETWORKS = ("mlp", "gpt2-tiny")
SUMS_OF_A_BLOCK = 4
"""Two residual branches, and query, key and value, which take two sums."""


def terms(graph: OperatorGraph, sums: tuple[int, ...]) -> list[TensorRef]:
    """What a chain of gradient sums adds up, without its own partial sums."""
    return [ref for index in sums for ref in graph.nodes[index].tensor_inputs if ref.node not in sums]


def uses(graph: OperatorGraph, ref: TensorRef) -> set[int]:
    return {u for u in graph.consumers[ref] if graph.nodes[u].phase is Phase.FORWARD}


def station_of(graph: OperatorGraph, ref: TensorRef) -> Variable:
    return next(v for v in decisions(graph).variables if v.tensor == ref)


@pytest.mark.parametrize("layers", [2, 4])
def test_every_gradient_sum_belongs_to_the_station_of_the_tensor_that_is_used_more_than_once(layers: int) -> None:
    graph = unfold(captured("gpt2-tiny", layers))
    flows = {ref: flow for ref, flow in gradient_flows(graph).items() if flow.sums}
    made = sorted(i for flow in flows.values() for i in flow.sums)
    assert made == [i for i, node in enumerate(graph.nodes) if node.role is Role.GRADIENT_SUM]
    assert len(made) == SUMS_OF_A_BLOCK * layers + 1
    for ref, flow in flows.items():
        assert len(terms(graph, flow.sums)) == len(flow.sums) + 1 == len(uses(graph, ref))
        assert graph.spec(flow.gradient).shape == graph.spec(ref).shape
        station = station_of(graph, ref)
        assert station.kind is Kind.STATION
        assert station.nodes == flow.sums
        for term in terms(graph, flow.sums):
            forward = graph.nodes[term.node].forward
            sender_is_a_use = forward is not None and _reaches(graph, ref, forward)
            assert sender_is_a_use or graph.nodes[term.node].role is Role.GRADIENT_SUM


class _Shared(torch.nn.Module):
    """One norm that is used several times, whose weight and bias are of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.GroupNorm(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(self.norm(x * (n + 1)).square().sum() for n in range(4)) / x.shape[0]


def test_gradients_of_a_weight_and_of_a_bias_that_look_alike_are_told_apart() -> None:
    spec = InputSpec(name="x", kind="features", shape=(4, 3))
    graph = capture_module(_Shared, [spec], name="shared")
    flows = gradient_flows(graph)
    for parameter in graph.parameters:
        flow = flows[TensorRef(parameter.node)]
        assert flow.gradient == parameter.gradient
        assert len(terms(graph, flow.sums)) == len(flow.sums) + 1 == 4
    assert decisions(graph).variables


def _reaches(graph: OperatorGraph, ref: TensorRef, node: int) -> bool:
    """Whether `node` uses `ref`, at once or behind operators that pass their gradient on (additions, views)."""
    if node in uses(graph, ref):
        return True
    passing = [u for u in uses(graph, ref) if not any(n.forward == u for n in graph.nodes)]
    return any(_reaches(graph, TensorRef(u), node) for u in passing if TensorRef(u) in graph.consumers)


def test_the_tied_embedding_has_a_station_that_sums_both_gradients() -> None:
    graph = captured("gpt2-tiny")
    tied = next(p for p in graph.parameters if p.aliases)
    station = station_of(graph, TensorRef(tied.node))
    (total,) = station.nodes
    assert TensorRef(total) == tied.gradient
    ops = {graph.nodes[ref.node].op for ref in graph.nodes[total].tensor_inputs}
    assert ops == {"aten.mm.default", "aten.embedding_dense_backward.default"}


@pytest.mark.parametrize("name", NETWORKS)
def test_backward_operators_follow_their_forward_operator(name: str) -> None:
    graph = captured(name)
    found = decisions(graph)
    checked = 0
    for index, node in enumerate(graph.nodes):
        variable = found.of_node[index]
        assert (variable < 0) == (node.role is Role.CONSTANT)
        if node.role is Role.OPERATOR and node.phase is Phase.BACKWARD and node.forward is not None:
            checked += 1
            assert variable == found.of_node[node.forward]
        if variable >= 0:
            assert index in found.variables[variable].nodes
    assert checked > 10


@pytest.mark.parametrize("name", NETWORKS)
def test_every_choice_has_a_rule_for_every_node_and_agrees_with_it(name: str) -> None:
    graph = captured(name)
    for variable in decisions(graph).variables:
        assert variable.choices
        for choice in variable.choices:
            assert len(choice.rules) == len(variable.nodes)
            placed = {**choice.reads, **choice.writes}
            for index, rule in zip(variable.nodes, choice.rules, strict=True):
                for ref, placement in zip(graph.nodes[index].tensor_inputs, rule.inputs, strict=True):
                    assert placed.get(ref, placement) == placement
                    if graph.nodes[ref.node].role is Role.CONSTANT:
                        assert placement != PARTIAL


@pytest.mark.parametrize("name", NETWORKS)
def test_every_variable_can_be_replicated(name: str) -> None:
    """One plan always exists: everything replicated, inputs too."""
    for variable in decisions(captured(name)).variables:
        placements = [{*c.reads.values(), *c.writes.values()} for c in variable.choices]
        assert {REPLICATE} in placements or set() in placements


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        # Batches at which activations have the shape of weights: 512 × 512; 2 × 64 tokens by 128, 4 × 64 by 128.
        ("mlp", (1, 2, 3, 64, 512, 784)),
        ("gpt2-tiny", (1, 2, 3, 4, 8, 64, 128)),
    ],
)
def test_decisions_do_not_depend_on_the_batch(name: str, batches: tuple[int, ...]) -> None:
    graph = captured(name)
    expected = decisions(at_batch(graph, 48))
    for batch in batches:
        assert decisions(at_batch(graph, batch)) == expected, batch


def test_decisions_do_not_grow_with_depth() -> None:
    assert decisions(captured("gpt2-tiny", 12)) == decisions(captured("gpt2-tiny", 96))
