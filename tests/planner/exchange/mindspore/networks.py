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


class Configured(nn.Module):
    """A column-wise and a row-wise linear layer, and one without a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = planner.shard(nn.Linear(64, 128), in_strategy=((2, 1), (4, 1)))
        self.relu = nn.ReLU()
        self.contract = planner.shard(nn.Linear(128, 64), in_strategy=((2, 4), (1, 4)))
        self.product = planner.shard(torch.matmul, in_strategy=((2, 1), (1, 4)), out_strategy=((2, 4),))
        self.matrix = nn.Parameter(torch.full((64, 32), 0.01))
        self.last = nn.Linear(32, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.contract(self.relu(self.expand(features)))
        return self.last(self.product(hidden, self.matrix))  # type: ignore[no-any-return]


def make_configured() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """The network and its loss."""
    return Configured(), (torch.zeros(32, 64), torch.zeros(32, 1)), nn.L1Loss()


def make_loose() -> tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]:
    """A network that calls a function with a strategy which none of its modules has."""
    product = planner.shard(torch.matmul, in_strategy=((2, 1), (1, 4)))

    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.ones(64, 1))

        def forward(self, features: Tensor) -> Tensor:
            return product(features, self.matrix)  # type: ignore[no-any-return]

    return Loose(), (torch.zeros(32, 64), torch.zeros(32, 1)), nn.L1Loss()
