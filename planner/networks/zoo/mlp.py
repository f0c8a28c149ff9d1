"""The classic small network: 784-512-512-1 with ReLU."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

from planner.networks.losses import mean_absolute_error


class MultilayerPerceptron(nn.Module):
    """Linear layers with ReLU between them; ``forward`` is the mean absolute error."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        """Loss of features ``(batch, widths[0])`` against targets ``(batch, widths[-1])``."""
        hidden = features
        for layer in self.layers[:-1]:
            hidden = layer(hidden).relu()
        return mean_absolute_error(self.layers[-1](hidden), target)
