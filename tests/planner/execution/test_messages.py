"""The messages that run are those of the lowered program: kind, axis, bytes, order."""

from __future__ import annotations

from typing import Any

import pytest

from planner.execution.job import Job
from planner.execution.optimizers import hyperparameters
from planner.instructions import LoweredPlan
from planner.strategy.loading import lower_to_run
from simulator.calibration.launch import run_workers
from tests.planner.execution.made import make_plan
from tests.planner.execution.recording import planned_messages, record
from tests.planner.execution.small import place

slow = pytest.mark.slow
CASES = [
    pytest.param("zoo:mlp", 4, 16, {"dp": 2, "tp": 2}, {"all_reduce"}, marks=slow),
    pytest.param(place("gpt"), 4, 8, {"dp": 2, "tp": 2, "micro_batch": 2}, {"all_reduce"}, marks=slow),
    pytest.param(place("gpt"), 2, 8, {"dp": 2, "optimizer_sharding": "zero3"}, {"all_gather"}, marks=slow),
    pytest.param("zoo:gpt2-tiny", 2, 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": "true", "copies": 2},
                 {"all_gather", "reduce_scatter"}, marks=slow),
    pytest.param("zoo:gpt2-tiny", 2, 8, {"tp": 2, "micro_batch": 4, "sequence_parallel": "true", "recompute": "full",
                                         "recompute_messages": "false"}, {"all_gather"}, marks=slow),
    pytest.param(place("gpt"), 2, 8, {"cp": 2, "context_algorithm": "ring"}, {"send"}),
    pytest.param(place("llama"), 4, 8, {"cp": 4, "context_algorithm": "ring"}, {"send"}, marks=slow),
    pytest.param(place("llama"), 4, 8, {"cp": 2, "tp": 2, "context_algorithm": "all_to_all", "recompute": "full"},
                 {"all_to_all"}, marks=slow),
    pytest.param(place("resnet"), 2, 4, {"dp": 2}, {"all_reduce"}, marks=slow),
    pytest.param(place("mixtral"), 4, 8, {"ep": 2, "dp": 2}, {"reduce_scatter"}, marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("network", "devices", "batch", "pins", "kinds"), CASES)
def test_what_is_sent_is_what_is_timed(
    network: str, devices: int, batch: int, pins: dict[str, Any], kinds: set[str]
) -> None:
    plan = make_plan(network, devices, batch=batch, **pins)
    lowered = lower_to_run(plan, "plan.json", precision="fp64")
    assert isinstance(lowered, LoweredPlan)
    job = Job(
        lowered=lowered,
        network=plan.network,
        sequence_length=plan.sequence_length,
        optimizer=plan.optimizer,
        constants=hyperparameters(plan.optimizer),
        data="synthetic",
        seed=0,
        steps=2,
        warm_up_steps=0,
        device_type="cpu",
        timeout_s=60.0,
    )
    expected = planned_messages(lowered)
    assert kinds <= {kind for kind, *_ in expected}
    for steps in run_workers(record, (job,), devices):
        assert steps == [expected, expected]
