"""Gradients whose parameters are marked with one group travel in one message, in the plan, the program and the run."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import planner
from planner import AutoParallelContext, ContextError
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.chain import chain
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import Communicate
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.networks.marks import Marks, marks_of
from planner.planning.placing import PlacedMarks
from planner.plans.file import plan_from_text, plan_to_text
from planner.plans.plan import Plan
from simulator.pipeline_operators import LAST
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.schedules import ActionKind

CLUSTER = "dgx-a100"
GROUPS = {"layers.0": 1, "layers.1.weight": 1, "layers.1.bias": 0, "layers.2.weight": 0}
QUICK: dict[str, Any] = {"sensitivity": False, "top": 1}


def plan_with(fusion: dict[str, int], devices: int = 4, **pins: str) -> Plan:
    context = AutoParallelContext(parallel_mode="auto_parallel", device_num=devices)
    asked = {"tp": "1", "dp": str(devices), "optimizer_sharding": "none", **pins}
    return planner.plan("zoo:mlp", CLUSTER, context, pins=asked, marks=Marks(fusion=fusion), **QUICK).plan


def messages(plan: Plan, collective: Collective) -> list[list[str]]:
    """Parameters whose gradients travel in each message, in order."""
    passes = lower_stages(plan, checked_graph(plan)).stages[0].passes
    return [
        [name.partition(".gradient")[0].partition("/")[0] for name in step.targets]
        for step in passes[ActionKind.BACKWARD, LAST].instructions
        if isinstance(step, Communicate) and step.collective is collective and "gradient" in step.targets[0]
    ]


@pytest.fixture(scope="module")
def grouped() -> Plan:
    return plan_with(GROUPS)


def test_groups_travel_together_and_zeros_alone(grouped: Plan) -> None:
    found = sorted(sorted(names) for names in messages(grouped, Collective.ALL_REDUCE))
    assert found == [
        ["layers.0.bias", "layers.0.weight", "layers.1.weight"],
        ["layers.1.bias"],
        ["layers.2.bias"],
        ["layers.2.weight"],
    ]


@pytest.mark.parametrize(("fusion", "count"), [(GROUPS, 4), ({"layers": 0}, 6), ({"layers": 1}, 1)])
def test_the_program_that_is_timed_has_these_messages(fusion: dict[str, int], count: int) -> None:
    plan = plan_with(fusion)
    assert len(messages(plan, Collective.ALL_REDUCE)) == count
    work = lower_pipeline(plan, checked_graph(plan), load_profile("dgx-a100")).work
    timed = [work.tasks[number] for number in work.of_pass(ActionKind.BACKWARD, 0, LAST).numbers]
    assert sum(task.collective is Collective.ALL_REDUCE and "gradient" in task.name for task in timed) == count


@pytest.mark.slow
def test_groups_are_executed(grouped: Plan) -> None:
    report = execute_plan(grouped, ExecuteOptions(strategy="unused", steps=2, verify=True, precision="fp64"))
    assert report.verified


def test_scattered_gradients_follow_their_groups() -> None:
    found = plan_with({"layers": 1}, optimizer_sharding="zero1")
    scattered = messages(found, Collective.REDUCE_SCATTER)
    assert len([names for names in scattered if len(names) > 1]) == 1
    apart = plan_with({f"layers.{n}": n for n in range(3)}, optimizer_sharding="zero1")
    assert len(messages(apart, Collective.REDUCE_SCATTER)) > len(scattered)


def test_groups_are_written_and_read(grouped: Plan) -> None:
    again = plan_from_text(plan_to_text(grouped)).plan
    assert again == grouped
    assert dict(again.exchange.fusion_groups)["layers.1.bias"] == 0


def test_layers_of_a_run_have_groups_of_their_own() -> None:
    graph = load_network("zoo:gpt2").capture()
    marks = Marks(fusion={f"blocks.{n}": n // 4 + 1 for n in range(12)})
    found = PlacedMarks(marks, graph, chain(graph)).fusion()
    assert {found[f"blocks.{n}.expand.weight"] for n in range(4)} == {1}
    assert found["blocks.11.expand.weight"] == 3
    assert "token_embedding.weight" not in found


def test_marks_of_modules_and_parameters() -> None:
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weight: Any = network[1].weight
    planner.set_comm_fusion(network, 1)
    planner.set_comm_fusion(network[1], 2)
    planner.set_comm_fusion(network[0].bias, 3)
    weight.comm_fusion = 4
    assert marks_of(network).fusion == {"": 1, "1": 2, "0.bias": 3, "1.weight": 4}
    weight.comm_fusion = "4"
    with pytest.raises(ContextError, match="comm_fusion of parameter '1.weight'='4' is of type str"):
        marks_of(network)


def test_groups_of_nothing_are_refused() -> None:
    with pytest.raises(ContextError, match="comm_fusion marks 'layer.0', where no parameter is trained; near are"):
        plan_with({"layer.0": 1})


# Pipelines


def stage_messages(plan: Plan, collective: Collective) -> list[list[list[str]]]:
    """Parameters whose gradients travel in each message of the last micro-batch, for each chunk."""
    return [
        [
            [target.partition(".gradient")[0] for target in step.targets]
            for step in stage.passes[ActionKind.BACKWARD, LAST].instructions
            if isinstance(step, Communicate) and step.collective is collective and ".gradient" in step.targets[0]
        ]
        for stage in lower_stages(plan, checked_graph(plan)).stages
    ]


def test_a_group_that_spans_stages_is_divided_by_stage() -> None:
    plan = plan_with({**GROUPS, "layers.2.bias": 1}, dp="2", pp="2")
    assert plan.pipeline == 2
    chunks = stage_messages(plan, Collective.ALL_REDUCE)
    members = [[name for name, group in plan.exchange.fusion_groups if group == 1] for _ in chunks]
    found = [sorted(sorted(names) for names in chunk) for chunk in chunks]
    held = [{name for names in chunk for name in names} for chunk in chunks]
    assert set().union(*held) == {f"layers.{n}.{kind}" for n in range(3) for kind in ("weight", "bias")}
    for chunk, own, group in zip(found, held, members, strict=True):
        together = sorted(own & set(group))
        assert together  # the group has gradients on both stages
        assert chunk == sorted([together, *([name] for name in own - set(together))])
