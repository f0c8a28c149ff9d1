"""A network of your own.

From this folder: ``meshwright plan py:my_network:autoencoder --hw dgx-a100 --devices 8``

A factory returns a module and example inputs; the module gives the mean loss. The batch is dim 0 of each input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Autoencoder(nn.Module):
    """Squeezes images of 28 × 28 through 32 numbers and compares them with what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 32))
        self.decoder = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 784))

    def forward(self, images: Tensor) -> Tensor:
        """Mean squared error of the reconstruction; `images` is (batch, 784)."""
        return ((self.decoder(self.encoder(images)) - images) ** 2).mean()


def autoencoder() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The module and a batch of example inputs."""
    return Autoencoder(), (torch.rand(256, 784),)
