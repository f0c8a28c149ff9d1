"""Networks of the tests of marks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import planner


class Network(nn.Module):
    """The network of the double recursion case."""

    def __init__(self) -> None:
        super().__init__()
        self.flatten = nn.Flatten()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.relu1 = nn.ReLU()
        self.layer2 = nn.Linear(512, 512)
        self.relu2 = nn.ReLU()
        self.layer3 = nn.Linear(512, 1)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.relu1(self.layer1(self.flatten(image)))
        return self.layer3(self.relu2(self.layer2(hidden)))  # type: ignore[no-any-return]


def make_double_recursion() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """The network with its ReLUs recomputed, and its loss."""
    network = Network()
    planner.recompute(network.relu1)
    planner.recompute(network.relu2)
    return network, (torch.zeros(32, 1, 28, 28), torch.zeros(32, 1)), nn.L1Loss()
