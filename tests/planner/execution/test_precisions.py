"""Plans in low precision are as near to float64 as one process in that precision is."""

from __future__ import annotations

from typing import Any

import pytest

from planner.execution.verification import ROUNDING, TOLERANCES, relative_difference
from tests.planner.execution.made import make_plan, run
from tests.planner.execution.small import place

MULTIPLE = 3.0
"""How much more than one process's own error sums in another order may make, beside one rounding of the loss."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "precision", "devices", "pins"),
    [
        ("gpt", "bf16", 4, {"dp": 2, "tp": 2, "optimizer_sharding": "zero1"}),
        ("llama", "fp16", 2, {"dp": 2, "optimizer_sharding": "zero1", "micro_batch": 2}),
    ],
)
def test_no_worse_than_one_process(network: str, precision: str, devices: int, pins: dict[str, Any]) -> None:
    plan = make_plan(place(network), devices, batch=8, precision=precision, **pins)
    found = run(plan, precision=precision, steps=5)
    exact = run(plan, verify=False, steps=5).losses

    def error(losses: tuple[float, ...]) -> float:
        return max(relative_difference(*pair) for pair in zip(losses, exact, strict=True))

    assert found.max_loss_difference is not None
    assert found.max_loss_difference <= TOLERANCES[precision]
    assert error(found.losses) <= MULTIPLE * error(found.reference_losses) + ROUNDING[precision]
    assert 0 < error(found.losses) <= TOLERANCES[precision]
