"""What a setting changes in the tables of a problem, and what variables that are alike share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.cost.work import optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.networks import load_network
from planner.search.dynamic_programming import fastest
from planner.search.problem.costs import MeshCosts
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Problem, Setting
from planner.search.problem.variables import Decisions, Kind, decisions
from planner.sharding.inner_messages import inner_messages, message_bytes
from planner.sharding.placement import Mesh, MeshAxis
from simulator.profiles import load_profile
from tests.planner.search.made_networks import captured_module


class Normed(nn.Module):
    """A product, and a batch norm that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(16, 8), nn.Parameter(torch.ones(8))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(
            nn.functional.batch_norm(self.layer(features), None, None, self.scale, None, True), target
        )


@pytest.fixture(scope="module")
def gpt() -> tuple[OperatorGraph, Decisions]:
    graph = load_network("zoo:gpt2-tiny").capture()
    return graph, decisions(graph)


def setting(micro_batches: int = 1) -> Setting:
    mesh = Mesh((MeshAxis("data", 2), MeshAxis("tensor", 2)))
    costs = MeshCosts(load_profile("dgx-a100"), mesh, 25 * 2**20)
    return Setting(costs=costs, micro_batches=micro_batches, optimizer=optimizer("adamw"))


def test_variables_that_are_alike_cost_what_they_would_alone(gpt: tuple[OperatorGraph, Decisions]) -> None:
    graph, shared = gpt
    alone = replace(shared, alike=tuple(range(len(shared.variables))))
    assert len(set(shared.alike)) < len(shared.alike)
    graph = at_batch(graph, 8)
    found, expected = (Problem(graph, made, setting(2)) for made in (shared, alone))
    for mine, theirs in zip(found.unary, expected.unary, strict=True):
        assert np.array_equal(mine.time, theirs.time)
        assert np.array_equal(mine.memory, theirs.memory)
    assert found.pairs.keys() == expected.pairs.keys()
    for key, cost in expected.pairs.items():
        assert np.array_equal(found.pairs[key].time, cost.time)
        assert np.array_equal(found.pairs[key].memory, cost.memory)


@pytest.mark.parametrize(("data", "tensor", "shared"), [(2, 2, True), (32, 2, False), (2, 32, False), (3, 4, True)])
def test_variables_that_are_cut_alike_have_the_states_they_would_have_alone(
    data: int, tensor: int, shared: bool
) -> None:
    """Of the layers of a network with widths of 784, 1000 and 10 some divide by so many ranks, and some do not."""
    graph = at_batch(load_network("zoo:mlp").capture(), 96)
    made, counted = decisions(graph), set[int]()
    mesh = Mesh((MeshAxis("data", data), MeshAxis("tensor", tensor)))
    costs = MeshCosts(load_profile("dgx-a100"), mesh, 25 * 2**20)
    states = Parts(graph, made, replace(setting(), costs=costs))
    for number, variable in enumerate(made.variables):
        found = states.states(number)
        assert np.array_equal(found.choice, states._choices(variable, states._ports(variable)))
        for tensors, reads in ((variable.read, True), (variable.written, False)):
            for tensor, placed in tensors.items():
                assert np.array_equal(found.placements(tensor, reads=reads), placed[found.choice])
        counted.add(id(found.choice))
    assert (len(counted) < len(set(made.alike))) == shared


def test_the_work_alone_is_less_than_the_fastest_plan(gpt: tuple[OperatorGraph, Decisions]) -> None:
    problem = Problem(at_batch(gpt[0], 8), gpt[1], setting())
    assert 0 < problem.least_work_s <= fastest(problem).objective_s


def test_a_free_axis_may_shard_the_batch(gpt: tuple[OperatorGraph, Decisions]) -> None:
    graph = at_batch(gpt[0], 8)
    bound = Problem(graph, gpt[1], setting())
    free = Problem(graph, gpt[1], replace(setting(), free_axes=frozenset({"tensor"})))
    assert all(len(more) >= len(fewer) for more, fewer in zip(free.states, bound.states, strict=True))
    assert sum(map(len, free.states)) > sum(map(len, bound.states))
    assert fastest(free).objective_s <= fastest(bound).objective_s * (1 + 1e-9)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_sharded_gradients_are_scattered_every_micro_batch(
    gpt: tuple[OperatorGraph, Decisions], micro_batches: int
) -> None:
    """On the way from partial sums to shards the scattering counts M times, and a shard is what accumulates."""
    graph, made = gpt
    graph = at_batch(graph, 8)
    once, each = (
        Problem(graph, made, replace(setting(micro_batches), storage="sharded", sharded_gradients=said))
        for said in (False, True)
    )
    grown = 0
    for edge in made.edges:
        if made.variables[edge.target].kind is not Kind.PARAMETER:
            continue
        key = (min(edge.source, edge.target), max(edge.source, edge.target))
        scattered = each.parts.scatter_seconds(edge)
        spec, (rows, columns) = graph.spec(edge.tensor), each.parts.ends(edge)
        ways = each.setting.costs.redistribution(len(spec.shape), spec.size_bytes, fused=True, masks=False)
        whole = ways[rows[:, None], columns[None, :]]
        assert (scattered <= whole + 1e-15).all()
        added = scattered if key == (edge.source, edge.target) else scattered.T
        expected = once.pairs[key].time + (micro_batches - 1) * added
        assert np.allclose(each.pairs[key].time, expected, rtol=1e-12, atol=0.0)
        less = each.pairs[key].memory <= once.pairs[key].memory
        assert less[added > 0].all()
        grown += int((added > 0).sum())
    assert grown > 0


def test_sums_of_batch_norms_take_what_lowering_sends() -> None:
    graph = at_batch(captured_module(Normed, (16,), (8,)), 8)
    mesh = Mesh((MeshAxis("data", 4),))
    problem = Problem(
        graph, decisions(graph), replace(setting(), costs=MeshCosts(load_profile("dgx-a100"), mesh, 2**20))
    )
    waited = 0
    for states in problem.states:
        sent = np.zeros(len(states))
        for position, index in enumerate(states.variable.nodes):
            node = graph.nodes[index]
            for state, choice in enumerate(states.choice[0].tolist()):
                rule = states.variable.choices[choice].rules[position]
                shares = [1 / 4 if placed >= 0 else 1.0 for placed in (*rule.inputs, *rule.outputs)]
                for message in inner_messages(rule):
                    payload = np.array([message_bytes(graph, node, message, shares, 4)])
                    sent[state] += problem.setting.costs.message_time(message.collective, 0, payload)[0]
        work = problem._work[states.kind]
        assert np.allclose(work.time - work.kernels, sent, rtol=1e-9, atol=1e-15)
        waited += int((sent > 0).sum())
    assert waited > 0
