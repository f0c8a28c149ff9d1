"""Losses in a form whose mean stays exact when the batch is sharded: a sum, divided by a count."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from planner.graph.custom_operators import alignment_loss_operator


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits ``(..., classes)`` against labels ``(...)``."""
    log_probabilities = F.log_softmax(logits.flatten(0, -2), dim=-1)
    return F.nll_loss(log_probabilities, labels.flatten(), reduction="sum") / labels.numel()


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute difference of two tensors of one shape."""
    return (outputs - targets).abs().sum() / targets.numel()


def mean_binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    r"""Mean of :math:`\log(1 + e^z) - y z` over logits z and labels y of 0 and 1, both of one shape."""
    return (F.softplus(logits) - labels.to(logits.dtype) * logits).sum() / labels.numel()


def mean_alignment_loss(logits: Tensor, text: Tensor, blank: int) -> Tensor:
    """Mean CTC loss per character of logits ``(batch, frames, classes)`` for transcripts ``(batch, length)``."""
    losses: Tensor = alignment_loss_operator()(F.log_softmax(logits, dim=-1), text, blank)
    return losses.sum() / text.numel()
