"""A known truth: experts are split over devices where their weights are heavy, and attention stays data parallel."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.cost.work import optimizer, traffic_sizes
from planner.graph.capture import capture_module
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.scaling import at_batch, at_precision
from planner.networks.decoder.graph import decoder_graph
from planner.networks.decoder.mixtral import ZooMixtral
from planner.networks.zoo.configs import MixtralConfig
from planner.networks.zoo.table import language_inputs
from planner.planning.configured import Configured, Scored
from planner.plans.pins import Pins
from planner.plans.plan import NodeRules, expanded_rules
from planner.search.dynamic_programming import fastest
from planner.search.problem.costs import MeshCosts
from planner.search.problem.problem import Problem, Setting, node_rules
from planner.search.problem.variables import decisions
from planner.sharding.placement import REPLICATE, Mesh, MeshAxis
from simulator.profiles import load_profile
from simulator.program import Kernel

HEAVY = MixtralConfig(
    vocabulary=1024,
    hidden=1024,
    layers=2,
    heads=16,
    key_value_heads=8,
    intermediate=4096,
    positions=512,
    experts=8,
    chosen_experts=2,
)
LIGHT = replace(HEAVY, intermediate=16, chosen_experts=4)
LENGTH = 256
PLAN: dict[str, object] = {
    "network": "experts", "fingerprint": "", "sequence_length": LENGTH, "hardware": "dgx-a100", "hardware_hash": "",
    "precision": "bf16", "optimizer": "adamw", "global_batch": 64, "bucket_bytes": 25 << 20,
}  # fmt: skip


@cache
def network(config: MixtralConfig) -> OperatorGraph:
    inputs = language_inputs(config.vocabulary, LENGTH, masked=False)
    graph = decoder_graph(ZooMixtral(config=config), config.layers, inputs, name="experts", notes=())
    return at_precision(graph, "bfloat16")


def best(config: MixtralConfig, axes: tuple[MeshAxis, ...], samples: int) -> tuple[OperatorGraph, dict[str, NodeRules]]:
    """Rules of the fastest strategy, by node."""
    graph = network(config)
    costs = MeshCosts(load_profile("dgx-a100"), Mesh(axes), bucket_bytes=25 << 20)
    setting = Setting(costs=costs, micro_batches=1, optimizer=optimizer("adamw"))
    problem = Problem(at_batch(graph, samples), decisions(graph), setting)
    return graph, node_rules(problem, fastest(problem))[0]


@pytest.mark.parametrize("devices", [4, 8])
def test_experts_are_split_over_devices(devices: int) -> None:
    graph, rules = best(HEAVY, (MeshAxis("data", devices),), samples=8)
    products = [node for node in graph.nodes if node.op == "aten.bmm.default"]
    assert len(products) == 3 * 6
    for node in products:
        (rule,) = rules[node.name]
        assert (rule.inputs, rule.outputs) == ((0, 0), (0,)), node.name
    for node in graph.nodes:
        if node.kernel is Kernel.ATTENTION:
            assert set(rules[node.name][0].inputs) == {0}, node.name
        if node.role is Role.PARAMETER and len(node.outputs[0].shape) == 3:
            assert rules[node.name][0].outputs == (0,)


def test_experts_are_split_along_an_axis_of_their_own() -> None:
    graph, rules = best(HEAVY, (MeshAxis("data", 2), MeshAxis("expert", 4)), samples=8)
    for node in graph.nodes:
        if node.op == "aten.bmm.default":
            assert rules[node.name][1].inputs == (0, 0), node.name
        if node.kernel is Kernel.ATTENTION:
            assert set(rules[node.name][1].inputs) == {0}, node.name


def test_light_experts_stay_data_parallel() -> None:
    graph, rules = best(LIGHT, (MeshAxis("data", 8),), samples=64)
    for node in graph.nodes:
        if node.op == "aten.bmm.default" and node.phase == "forward":
            assert rules[node.name][0].inputs == (1, REPLICATE), node.name


def test_plans_with_an_expert_axis_are_simulated_on_every_sample_of_the_batch() -> None:
    search = Configured(
        graph=network(HEAVY), hardware=load_profile("dgx-a100"), devices=8, global_batch=64,
        optimizer=optimizer("adamw"), dtype="bfloat16", bucket_bytes=25 << 20, sequence=LENGTH, base=PLAN,
    )  # fmt: skip
    pins = Pins(ep=4, tp=1, micro_batch=2)
    for stages in (1, 2):
        found = search.scored(search.explore(replace(pins, pp=stages), solves=2), 1)[0]
        samples = 64 // found.plan.micro_batches
        assert samples == found.plan.samples
        assert check_flops(found) == pytest.approx(1.0, rel=1e-6)


def test_an_index_that_repeats_for_every_number_of_a_row_is_read_once() -> None:
    """Gathering rows for experts moves each row once in and once out, and a whole number for each."""
    graph = network(HEAVY)
    gathers = [node for node in graph.nodes if node.op in ("aten.gather.default", "aten.scatter_add.default")]
    wide = [node for node in gathers if "experts" in node.module]
    assert {node.op for node in wide} == {"aten.gather.default", "aten.scatter_add.default"}
    for node in wide:
        index = node.tensor_inputs[1]
        rows = graph.spec(index).elements / graph.spec(index).shape[-1]
        assert traffic_sizes(graph, node)[1] == 8 * rows, node.name


class FirstToken(nn.Module):
    """One trained token in front of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(24, 8), nn.Parameter(torch.zeros(1, 1, 8))

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        words = self.words(ids)
        scores = torch.cat((self.first.expand(ids.shape[0], 1, 8), words), 1) @ self.words.weight.T
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), following.flatten())


def test_what_grows_with_the_batch_because_it_is_repeated_counts_whole() -> None:
    graph = capture_module(FirstToken, language_inputs(24, 16, masked=False), name="first")
    repeated = [
        (node, place)
        for node in graph.nodes
        if node.role is Role.OPERATOR
        for place, ref in enumerate(node.tensor_inputs)
        if graph.nodes[ref.node].op == "aten.expand.default"
        and not any(graph.spec(graph.nodes[ref.node].tensor_inputs[0]).batch_dims)
        and any(graph.spec(ref).batch_dims)
    ]
    assert repeated
    for node, place in repeated:
        counted = traffic_sizes(graph, node)[place]
        assert counted in (0, graph.spec(node.tensor_inputs[place]).size_bytes), node.name


def test_tokens_travel_and_weights_only_where_a_pin_allows_it_and_they_are_lighter() -> None:
    """With few tokens on each rank weights would be the more, with many the less."""
    search = Configured(
        graph=network(replace(HEAVY, intermediate=64)), hardware=load_profile("dgx-a100"), devices=8, global_batch=256,
        optimizer=optimizer("adamw"), dtype="bfloat16", bucket_bytes=25 << 20, sequence=LENGTH, base=PLAN,
    )  # fmt: skip
    pins = Pins(ep=4, tp=1, pp=1, micro_batch=32)
    read, seconds = {}, {}
    for said in (None, "any", "tokens"):
        found = search.scored(search.explore(replace(pins, expert_messages=said), solves=2), 1)[0]
        axis = [one.name for one in found.plan.mesh.axes].index("expert")
        rules = [rule[axis] for name, rule in expanded_rules(found.plan).items() if "/bmm" in name]
        read[said] = {placed for rule in rules for placed in rule.inputs}
        seconds[said] = found.placed.objective_s
    assert read["tokens"] == read[None] == {0}
    assert REPLICATE in read["any"]
    assert seconds[None] == seconds["tokens"] > seconds["any"]


def test_tensor_ranks_have_whole_experts_or_a_part_of_each_where_it_is_pinned() -> None:
    """Dealt out over both axes, or cut by the width of either matrix."""
    search = Configured(
        graph=network(HEAVY), hardware=load_profile("dgx-a100"), devices=8, global_batch=64,
        optimizer=optimizer("adamw"), dtype="bfloat16", bucket_bytes=25 << 20, sequence=LENGTH, base=PLAN,
    )  # fmt: skip
    pins = Pins(ep=2, tp=2, pp=1, micro_batch=8, expert_messages="tokens")
    cut, seconds = {}, {}
    for said in (None, "width", "whole"):
        found = search.scored(search.explore(replace(pins, expert_cut=said), solves=2), 1)[0]
        names = [one.name for one in found.plan.mesh.axes]
        stored = [
            rule
            for name, rule in expanded_rules(found.plan).items()
            if name.endswith((".experts.gate", ".experts.up", ".experts.down"))
        ]
        assert {rule[names.index("expert")].outputs for rule in stored} == {(0,)}
        tensor = names.index("tensor")
        cut[said] = {rule[tensor].outputs[0] for rule in stored}
        opened = [rule[tensor] for name, rule in expanded_rules(found.plan).items() if name.endswith("/silu")]
        if said == "width":  # gates and what they open are cut alike, so that nothing travels between the products
            assert opened
            assert all({*rule.inputs, *rule.outputs} == {2} for rule in opened)
        seconds[said] = found.placed.objective_s
    assert cut["whole"] == {0}
    assert cut["width"] <= {1, 2}
    assert seconds[None] == pytest.approx(min(seconds["width"], seconds["whole"]))


def check_flops(found: Scored) -> float:
    """Operations that the prediction counts in a step over those of the network on the batch of 64."""
    prediction, hardware = found.prediction, load_profile("dgx-a100")
    counted = prediction.mfu * prediction.step_time_s * hardware.peak("bfloat16") * 8
    graph = at_batch(network(HEAVY), 64)
    nodes = zip(graph.nodes, graph.multiplicity, strict=True)
    return counted / sum(times * node.flops for node, times in nodes if node.role is Role.OPERATOR)
