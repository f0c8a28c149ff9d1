"""States of parameters are shared over all ranks that hold copies of them, on whatever axis these lie."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.pipeline import lower_pipeline
from planner.networks import load_network
from planner.planning.planning import plan_network
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.pins import Pins
from planner.plans.plan import Plan, expanded_rules
from planner.plans.request import PlanRequest
from planner.search.problem.states import SHARING
from simulator.errors import InputError
from simulator.profiles import load_profile
from simulator.program import BufferKind, Collective
from tests.planner.execution.small import place
from tests.planner.lowering.steps import lowered_of, steps

HARDWARE = "dgx-a100"
STATES = 8
"""Bytes that AdamW keeps of a float32 parameter."""


def planned(name: str, **pins: str) -> tuple[Plan, OperatorGraph]:
    network = load_network(place(name))
    graph = network.capture()
    asked = PlanRequest(
        network=network, hardware=HARDWARE, devices=4, global_batch=16, precision="fp32", pins=Pins.read(pins), top=1,
        sensitivity=False,
    )  # fmt: skip
    return plan_network(asked, graph=graph).candidates[0].plan, graph


@pytest.mark.parametrize(
    ("name", "level", "pins"),
    [
        ("llama", "zero1", {"cp": "4", "dp": "1"}),
        ("mixtral", "zero3", {"ep": "2", "dp": "2", "tp": "2"}),
        pytest.param(
            "llama", "zero2", {"cp": "2", "dp": "2", "sharding_threshold_kb": "0"}, marks=pytest.mark.slow
        ),
        pytest.param("mixtral", "zero1", {"ep": "4", "dp": "4"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_matrices_are_stored_once_over_their_replicas(name: str, level: str, pins: dict[str, str]) -> None:
    """Before, context and expert ranks had whole copies, and with one rank of the data axis there was no plan."""
    plan, graph = planned(name, pp="1", micro_batch="1", optimizer_sharding=level, **pins)
    rules, mesh = expanded_rules(plan), plan.mesh
    whole = [mesh.axes.index(axis) for axis in mesh.axes if axis.name in ("data", *SHARING)]
    lowered = lowered_of(plan, graph)
    held = 0.0
    for parameter in lowered.graph.parameters:
        node = lowered.graph.nodes[parameter.node]
        placed = [rule.outputs[0] for rule in rules[node.name]]
        if len(node.outputs[0].shape) > 1:
            assert all(placed[axis] >= 0 for axis in whole), node.name
        cut = prod(axis.size for axis, dim in zip(mesh.axes, placed, strict=True) if dim >= 0)
        held += STATES * node.outputs[0].elements / cut
    sizes = lower_pipeline(plan, graph, load_profile(HARDWARE)).sizes
    assert float(np.sum(sizes.resident[BufferKind.OPTIMIZER_STATE])) == pytest.approx(held)
    sent = {i.collective for _, i in steps(lowered) if hasattr(i, "collective")}
    assert {Collective.ALL_GATHER, Collective.REDUCE_SCATTER} <= sent


def test_states_that_are_not_sharded_stay_whole_on_every_axis() -> None:
    plan, graph = planned("mixtral", pp="1", ep="4", dp="4", micro_batch="1", optimizer_sharding="none")
    (axis,) = plan.mesh.axes
    rules, nodes = expanded_rules(plan), lowered_of(plan, graph).graph
    assert axis.name == "expert"
    for node in (nodes.nodes[parameter.node] for parameter in nodes.parameters):
        of_experts = len(node.outputs[0].shape) == 3
        assert (rules[node.name][0].outputs[0] >= 0) == of_experts, node.name


def test_ep_beyond_the_data_parallel_ranks_deals_whole_experts_to_tensor_ranks() -> None:
    """It was refused, though recipes of Megatron-LM with an expert tensor size of one have it."""
    plan, graph = planned("mixtral", pp="1", tp="2", dp="2", ep="4", micro_batch="1", optimizer_sharding="zero1")
    assert [(axis.name, axis.size) for axis in plan.mesh.axes] == [("expert", 2), ("tensor", 2)]
    assert plan.expert_ranks == 4
    assert plan_from_text(plan_to_text(plan)).plan.expert_ranks == 4
    rules, nodes = expanded_rules(plan), lowered_of(plan, graph).graph
    held = [nodes.nodes[parameter.node] for parameter in nodes.parameters]
    cuts = {tuple(rule.outputs[0] for rule in rules[n.name]) for n in held if len(n.outputs[0].shape) == 3}
    assert cuts == {(0, 0)}


def test_ep_that_neither_data_nor_tensor_ranks_make_is_refused() -> None:
    with pytest.raises(InputError, match=r"pins dp=1 ep=4: ep must divide dp, or .*; use ep=2"):
        planned("mixtral", tp="2", pp="2", dp="1", ep="4")
    with pytest.raises(InputError, match="ep must divide dp"):
        planned("mixtral", tp="2", pp="1", dp="2", ep="4", expert_cut="width")
