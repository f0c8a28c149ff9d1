"""With dropout at work, plans train as one process does, in float64: every rank draws its part of one mask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.execution.made import make_plan, run
from tests.planner.execution.small import place


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "pins"),
    [
        (4, {"dp": 2, "tp": 2, "recompute": "full", "micro_batch": 2}),
        (2, {"tp": 2, "sequence_parallel": "true", "recompute": "selective"}),
        (2, {"cp": 2, "context_algorithm": "ring"}),
        (4, {"dp": 2, "tp": 2, "sequence_parallel": "true", "recompute": "full", "micro_batch": 2, "copies": 2}),
        (4, {"pp": 2, "dp": 2, "micro_batch": 2, "optimizer_sharding": "zero3"}),
    ],
)
def test_losses_are_those_of_one_process(devices: int, pins: dict[str, Any]) -> None:
    plan = make_plan(place("dropping"), devices, batch=8, **pins)
    report = run(plan)
    assert report.max_loss_difference is not None
    assert report.max_loss_difference < 1e-10
    assert report.losses[0] != report.losses[-1]
