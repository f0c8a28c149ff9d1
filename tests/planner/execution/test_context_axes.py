"""Plans that cut sequences train as one process does, in float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.execution.made import make_plan, run
from tests.planner.execution.small import place

slow = pytest.mark.slow
RING, EXCHANGE = ({"context_algorithm": name} for name in ("ring", "all_to_all"))


@pytest.mark.parametrize(
    ("network", "devices", "pins"),
    [
        pytest.param("gpt", 2, {"cp": 2, **RING}, marks=slow),
        pytest.param("llama", 4, {"cp": 4, **RING}, marks=slow),
        pytest.param("llama", 4, {"cp": 4, **EXCHANGE, "recompute": "selective"}, marks=slow),
        pytest.param("gpt", 4, {"cp": 2, "dp": 2, **EXCHANGE, "optimizer_sharding": "zero3"}, marks=slow),
        pytest.param("llama", 4, {"cp": 2, "tp": 2, **RING, "sequence_parallel": "true"}, marks=slow),
        pytest.param("llama", 4, {"cp": 2, "pp": 2, **EXCHANGE, "micro_batch": 2, "recompute": "full"}, marks=slow),
    ],
)  # fmt: skip
def test_losses_are_those_of_one_process(network: str, devices: int, pins: dict[str, Any]) -> None:
    plan = make_plan(place(network), devices, batch=8, **pins)
    assert plan.degree("context") == pins["cp"]
    assert plan.context_algorithm == pins["context_algorithm"]
    report = run(plan)
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1]
