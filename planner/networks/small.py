"""Networks of real depth in sizes that a few processor cores train: ``py:planner.networks.small:NAME``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.networks.zoo.mlp import MultilayerPerceptron
from planner.networks.zoo.resnet import ResNet

PERCEPTRON_WIDTHS = (1024, 4096, 1024, 4096, 1)
"""Wide and narrow in turn: each pair of layers can be cut by columns and by rows."""


def multilayer_perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A perceptron of 12.6 million parameters."""
    return MultilayerPerceptron(PERCEPTRON_WIDTHS), (torch.zeros(64, PERCEPTRON_WIDTHS[0]), torch.zeros(64, 1))


def tiny_perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A perceptron of 13 thousand parameters, for trials."""
    return MultilayerPerceptron((64, 64, 64, 64, 1)), (torch.zeros(16, 64), torch.zeros(16, 1))


def resnet50_small_images() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-50 on 32 x 32 images of ten classes, as CIFAR-10 has them."""
    return ResNet((3, 4, 6, 3), classes=10), (torch.zeros(32, 3, 32, 32), torch.zeros(32, dtype=torch.int64))
