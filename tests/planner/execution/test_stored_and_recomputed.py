"""Plans that have some activations of some units on the host run as one process does, in float64.

How states and all activations are stored, and what is kept of messages, is tested together with all else
(`test_combinations.py`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.execution.options import ExecuteOptions
from planner.execution.run import execute_plan
from planner.graph.chain import chain
from planner.networks.marks import Swap
from planner.plans.plan import OffloadRange
from tests.planner.lowering.plans import MEGATRON, one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize(
    ("axes", "mode", "schedule", "swap"),
    [
        ((("tensor", 2),), "selective", "", Swap(prefetch=3)),
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
