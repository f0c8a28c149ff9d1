"""Plans with pipeline stages run as one process does, in float64, with the messages that were lowered.

Schedules that are searched are tested together with all else (`test_combinations.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import PassInstructions, read_values, written_values
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.plans.plan import Plan
from simulator.profiles import load_profile
from simulator.program import Task
from tests.planner.lowering.plans import one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

slow = pytest.mark.slow
ZERO3 = {"optimizer_sharding": "zero3"}
CASES = [
    pytest.param({}, 2, "1f1b", {}, "none", {}),
    pytest.param({}, 2, "dualpipe", {"virtual": 2}, "none", {}, marks=slow),
    pytest.param({"data": 2}, 2, "interleaved_1f1b", {"virtual": 2}, "none", ZERO3, marks=slow),
]  # fmt: skip


def make(
    axes: dict[str, int], ranks: int, schedule: str, shape: dict[str, Any], mode: str, changes: dict[str, Any]
) -> Plan:
    """A plan of the smallest GPT-2 with these axes inside a stage."""
    graph = captured("gpt2-tiny")
    storage = "sharded" if changes.get("optimizer_sharding") else "replicated"
    plan = one_stage(axes=tuple(axes.items()), micro_batches=4, micro_batch=1, storage=storage)
    plan = replace(recomputing(plan, graph, mode) if mode != "none" else plan, **changes)
    return plan if ranks == 1 else pipelined(plan, graph, ranks, schedule, **shape)


@pytest.mark.parametrize(("axes", "ranks", "schedule", "shape", "mode", "changes"), CASES)
def test_losses_are_those_of_one_process(
    axes: dict[str, int], ranks: int, schedule: str, shape: dict[str, Any], mode: str, changes: dict[str, Any]
) -> None:
    plan = make(axes, ranks, schedule, shape, mode, changes)
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, verify=True, precision="fp64"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1]


@pytest.mark.parametrize(
    ("axes", "ranks", "schedule", "shape", "mode", "changes"),
    [
        ({"data": 2, "tensor": 2}, 2, "1f1b", {}, "selective", {"optimizer_sharding": "zero1"}),
        ({"data": 2}, 2, "zbv", {"virtual": 2}, "full", {"optimizer_sharding": "zero3"}),
        ({"data": 2}, 2, "interleaved_1f1b", {"virtual": 2}, "none", {"optimizer_sharding": "zero2"}),
        ({"data": 2, "tensor": 2}, 1, "none", {}, "selective", {"optimizer_sharding": "zero1"}),
        ({"data": 2}, 1, "none", {}, "none", {"optimizer_sharding": "zero2"}),
        ({"data": 2}, 1, "none", {}, "full", {"optimizer_sharding": "zero3"}),
    ],
)
def test_the_messages_that_run_are_those_that_are_timed(
    axes: dict[str, int], ranks: int, schedule: str, shape: dict[str, Any], mode: str, changes: dict[str, Any]
) -> None:
    """Kind, axis and bytes of every collective of every pass, in order."""
    plan = make(axes, ranks, schedule, shape, mode, changes)
    graph = checked_graph(plan, captured("gpt2-tiny"))
    timed = lower_pipeline(plan, graph, load_profile("dgx-a100"))
    executed = lower_stages(plan, graph)
    for stage, instructions in enumerate(executed.stages):
        for key, one in instructions.passes.items():
            tasks = [timed.work.tasks[number] for number in timed.work.passes[stage][key].numbers]
            collectives = [task for task in tasks if task.collective is not None]
            assert len(tasks) == len(one.instructions)
            assert [_kind(task) for task in collectives] == list(_kinds(one, executed.mesh.axes))


def _kind(task: Task) -> tuple[str, str]:
    return str(task.collective), task.axis


def _kinds(one: PassInstructions, axes: Any) -> Any:
    for instruction in one.instructions:
        if hasattr(instruction, "collective"):
            yield str(instruction.collective), axes[instruction.axis].name


def test_every_value_is_there_when_it_is_read() -> None:
    plan = make({"data": 2}, 2, "zb_h1", {}, "full", {"optimizer_sharding": "zero3"})
    executed = lower_stages(plan, checked_graph(plan, captured("gpt2-tiny")))
    for rank in executed.ranks:
        for number in rank.stages:
            stage = executed.stages[number]
            there = {entry.value for entry in (*rank.parameters, *stage.inputs)}
            there |= {c.value for c in (stage.arrives, stage.gradient_arrives) if c}
            for (_, variant), one in stage.passes.items():
                if variant == 0:
                    there |= {name for i in one.instructions for name in written_values(i)}
            for one in stage.passes.values():
                assert {name for i in one.instructions for name in read_values(i)} <= there | stage.lasting
