"""Small networks for tests that train them on several processes."""

from __future__ import annotations

import torch
from torch import nn


def normalised() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    """A convolution with batch norm, whose statistics depend on the samples that are seen together."""
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )
    return network, (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))), nn.CrossEntropyLoss()


def with_own_head() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
    """The same without batch norm; the bias of the last layer is every rank's own."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
    network[3].bias.layerwise_parallel = True  # type: ignore[union-attr]
    return network, (torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))), nn.CrossEntropyLoss()
