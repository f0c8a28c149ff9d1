"""Plans that compute again or shard what they store run as one process does, in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from planner.execution.run import ExecuteOptions, execute_plan
from planner.graph.chain import chain
from planner.strategy.plan import OffloadRange, Swap
from tests.planner.lowering.plans import MEGATRON, one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

slow = pytest.mark.slow
AWAY = {"offload_optimizer": True, "offload_parameters": True}


@pytest.mark.parametrize(
    ("axes", "mode", "changes"),
    [
        pytest.param({"data": 2}, "full", {"optimizer_sharding": "zero3"}, marks=slow),
        pytest.param({"data": 2, "tensor": 2}, "full", {"optimizer_sharding": "zero3"}, marks=slow),
        pytest.param({"data": 2}, "none", {"optimizer_sharding": "zero2"}, marks=slow),
        pytest.param({"data": 4}, "none", {"optimizer_sharding": "zero3", "shard_size": 2}, marks=slow),
        pytest.param({"data": 4}, "selective", {"optimizer_sharding": "zero2", "shard_size": 2}, marks=slow),
        pytest.param({"tensor": 2}, "full", {}, marks=slow),
        pytest.param({"data": 2}, "none", {"optimizer_sharding": "zero3", "offload_optimizer": True}, marks=slow),
        pytest.param({"data": 2}, "none", {"optimizer": "lamb", "offload_optimizer": True}, marks=slow),
        pytest.param(
            {"data": 2},
            "none",
            {"optimizer_sharding": "zero2", "offload_optimizer": True, "offload_to": "disk"},
            marks=slow,
        ),
        pytest.param({"data": 2}, "none", {"optimizer_sharding": "zero2", **AWAY}, marks=slow),
        pytest.param({"data": 2, "tensor": 2}, "full", {"optimizer": "lamb", **AWAY}, marks=slow),
        pytest.param({"data": 2}, "none", {"optimizer_sharding": "zero2", "offload_to": "disk", **AWAY}, marks=slow),
    ],
)
def test_losses_are_those_of_one_process(axes: dict[str, int], mode: str, changes: dict[str, Any]) -> None:
    storage = "sharded" if "data" in axes else "replicated"
    plan = one_stage(axes=tuple(axes.items()), micro_batches=2, micro_batch=1, storage=storage)
    plan = replace(recomputing(plan, captured("gpt2-tiny"), mode) if mode != "none" else plan, **changes)
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, verify=True, precision="fp64"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1]


@slow
@pytest.mark.parametrize(("ranks", "mode"), [(1, "full"), (2, "selective"), (2, "full")])
def test_losses_are_those_of_one_process_where_messages_are_kept(ranks: int, mode: str) -> None:
    graph = captured("gpt2-tiny")
    plan = one_stage(axes=(("tensor", 2),), micro_batches=2, micro_batch=1, hints=MEGATRON)
    plan = recomputing(plan, graph, mode)
    plan = replace(plan, recompute_ranges=tuple(replace(part, messages=False) for part in plan.recompute_ranges))
    plan = pipelined(plan, graph, ranks, "1f1b") if ranks > 1 else plan
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, verify=True, precision="fp64"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10


@slow
@pytest.mark.parametrize(
    ("axes", "mode", "schedule", "swap"),
    [
        ((), "none", "", Swap()),
        ((("tensor", 2),), "selective", "", Swap(prefetch=3)),
        ((), "none", "1f1b", Swap()),
        ((("data", 2),), "full", "zb_h1", Swap()),
        ((), "none", "interleaved_1f1b", Swap(operators=(".expand/addmm", ".gelu"))),
    ],
)
def test_losses_are_those_of_one_process_where_activations_leave_the_device(
    axes: tuple[tuple[str, int], ...], mode: str, schedule: str, swap: Swap
) -> None:
    graph = captured("gpt2-tiny")
    plan = one_stage(axes=axes, micro_batches=4, micro_batch=1, hints=MEGATRON if dict(axes).get("tensor") else ())
    plan = recomputing(plan, graph, mode) if mode != "none" else plan
    names = [name for name in chain(graph).names() if name.startswith("blocks.")]
    plan = replace(plan, offload_ranges=(OffloadRange(first=names[0], last=names[-1], swap=swap),))
    if schedule:
        plan = pipelined(plan, graph, 2, schedule, virtual=2 if schedule == "interleaved_1f1b" else 1)
    report = execute_plan(plan, ExecuteOptions(strategy="unused", steps=3, verify=True, precision="fp64"))
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
