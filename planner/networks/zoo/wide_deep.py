"""Wide and deep networks for click rates. Cheng et al., arXiv:1606.07792."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from planner.networks.losses import mean_binary_cross_entropy
from planner.networks.zoo.configs import WideDeepConfig


class WideAndDeep(nn.Module):
    """A linear model of hashed categories and numbers beside a perceptron of their embeddings.

    All categorical features share one table, as hashing makes of them rows of one range. ``forward`` is the mean
    binary cross entropy.
    """

    def __init__(self, config: WideDeepConfig) -> None:
        super().__init__()
        self.wide = nn.Embedding(config.rows, 1)
        self.wide_numbers = nn.Linear(config.numbers, 1)
        self.embedding = nn.Embedding(config.rows, config.width)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(config.widths))
        self.head = nn.Linear(config.widths[-1], 1)
        for table in (self.wide, self.embedding):
            nn.init.normal_(table.weight, std=0.01)

    def forward(self, numbers: Tensor, categories: Tensor, label: Tensor) -> Tensor:
        """Loss of ``(batch, numbers)`` and row numbers ``(batch, categories)`` against ``(batch,)`` of 0 and 1."""
        hidden = torch.cat((self.embedding(categories).flatten(1), numbers), dim=1)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        wide = self.wide(categories).sum(1) + self.wide_numbers(numbers)
        return mean_binary_cross_entropy((wide + self.head(hidden)).squeeze(1), label)
