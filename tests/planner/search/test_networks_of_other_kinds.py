"""Networks that are no transformers: embedding tables are split by rows, U-shapes are planned as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.cost.work import optimizer
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.networks.python_factory import network_of
from planner.planning.planning import plan_network
from planner.plans.plan import NodeRules
from planner.plans.request import PlanRequest
from planner.search.dynamic_programming import fastest
from planner.search.problem.costs import MeshCosts
from planner.search.problem.problem import Problem, Setting, node_rules
from planner.search.problem.variables import decisions
from planner.sharding.placement import PARTIAL, REPLICATE, Mesh, MeshAxis
from planner.sharding.rules import has_rule, rules_for
from simulator.profiles import load_profile
from tests.planner.sharding.small_networks import graph


def best(network: OperatorGraph, samples: int, *, batch_only: bool = False) -> tuple[dict[str, NodeRules], float]:
    """Rules of the fastest strategy on eight devices, by node, and its seconds."""
    costs = MeshCosts(load_profile("dgx-a100"), Mesh((MeshAxis("data", 8),)), bucket_bytes=25 << 20)
    setting = Setting(costs=costs, micro_batches=1, optimizer=optimizer("adam"), batch_only=batch_only)
    problem = Problem(at_batch(network, samples), decisions(network), setting)
    solution = fastest(problem)
    return node_rules(problem, solution)[0], solution.objective_s


def test_embedding_tables_are_split_and_the_perceptron_works_by_samples() -> None:
    """The wide table by rows, having no columns to split; the deep one by columns, which sends half as much."""
    network = load_network("zoo:widedeep").capture()
    rules, seconds = best(network, 16384)
    held = {p.name: rules[network.nodes[p.node].name][0].outputs for p in network.parameters}
    assert held["wide.weight"] == (0,)
    assert held["embedding.weight"] == (1,)
    lookups = {node.module: node for node in network.nodes if node.op == "aten.embedding.default"}
    by_rows = ((0, REPLICATE), (PARTIAL,))
    (chosen,) = rules[lookups["wide"].name]
    assert (chosen.inputs, chosen.outputs) == by_rows
    assert by_rows in {(rule.inputs, rule.outputs) for rule in rules_for(network, lookups["embedding"])}
    products = [node for node in network.nodes if node.op == "aten.addmm.default"]
    assert {rules[node.name][0].outputs for node in products} == {(0,)}
    assert seconds < 0.2 * best(network, 16384, batch_only=True)[1]


@pytest.mark.parametrize("samples", [8, 64])
def test_u_shapes_are_planned(samples: int) -> None:
    network = graph("u_shape")
    assert all(has_rule(node.op) for node in network.nodes)
    rules, seconds = best(network, samples)
    assert seconds <= best(network, samples, batch_only=True)[1]
    assert {node.name for node in network.nodes if node.role is not Role.CONSTANT} == rules.keys()


class Joined(nn.Module):
    """A product cut into columns that are joined again; the second input is read by nothing."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, columns), nn.Linear(columns, 2)

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat(self.first(x).split(1, dim=1), 1)).square().sum() / x.shape[0]


@pytest.mark.parametrize("columns", [3, pytest.param(995, marks=pytest.mark.slow)])
def test_operators_with_many_gradients_and_inputs_that_nothing_reads_are_planned(columns: int) -> None:
    network = network_of(Joined(columns), (torch.zeros(2, 4), torch.zeros(2, 3)))
    assert plan_network(PlanRequest(network=network, hardware="dgx-a100", devices=2, global_batch=4)).candidates
