"""Tables of embeddings in the memory of the host: trained there as one process trains them, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from planner.execution.run import ExecutionReport
from tests.planner.execution.made import make_plan, run
from tests.planner.execution.small import TABLE_ROWS, place

slow = pytest.mark.slow
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
WIDE, LLAMA, TIED = place("wide_and_deep"), place("llama"), "zoo:gpt2-tiny"
"""The last one's table of tokens is that of its output layer as well."""


def trained(network: str, devices: int, device: str = "cpu", **pins: object) -> ExecutionReport:
    """Three steps with tables on the host, beside one process that has everything in one place."""
    optimizer = pins.pop("optimizer", None)
    plan = make_plan(network, devices, batch=8, precision="fp64", host_embeddings="true", **pins)
    plan = replace(plan, optimizer=str(optimizer)) if optimizer else plan
    assert plan.host_embeddings
    report = run(plan, device=device)
    assert report.max_loss_difference is not None
    assert report.losses[0] != report.losses[-1]
    return report


@pytest.mark.parametrize(
    ("network", "devices", "pins"),
    [
        pytest.param(WIDE, 2, {"dp": 2, "optimizer_sharding": "zero2", "offload_optimizer": "true"}, marks=slow),
        pytest.param(TIED, 4, {"pp": 2, "dp": 2, "optimizer_sharding": "zero3", "micro_batches": 2}, marks=slow),
    ],
)
def test_losses_are_those_of_one_process(network: str, devices: int, pins: dict[str, object]) -> None:
    assert trained(network, devices, **pins).max_loss_difference < 1e-10


@slow
@NO_GPU
def test_a_device_holds_no_table_and_trains_as_one_that_does() -> None:
    report = trained(WIDE, 1, device="cuda", offload_optimizer="false")
    assert report.max_loss_difference < 1e-10
    assert report.measured_peak_memory_bytes < TABLE_ROWS * 8 * torch.float64.itemsize
