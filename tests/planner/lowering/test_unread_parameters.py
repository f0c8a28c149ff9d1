"""Parameters that the forward pass does not read, as a head that a task leaves aside: planned, held, never updated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from planner.networks.python_factory import network_of
from planner.planning.planning import plan_network
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest


class WithUnread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.layers[0].unread_inside = nn.Embedding(4, 4)
        self.unread = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().sum() / x.numel()


@pytest.mark.parametrize("pins", [{}, {"pp": "2", "dp": "2"}, {"optimizer_sharding": "zero3", "pp": "1"}], ids=str)
def test_a_network_with_parameters_that_nothing_reads_is_planned(pins: dict[str, str]) -> None:
    network = network_of(WithUnread(), torch.zeros(2, 16))
    found = plan_network(
        PlanRequest(network=network, hardware="dgx-a100", devices=4, global_batch=16, top=1, pins=Pins.read(pins))
    )
    assert len(found.candidates) == 1
    assert found.candidates[0].prediction.step_time_s > 0
