"""One rank's part of attention that is written out in products, with the scores between them in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.sharding.local_call import LocalCall, LocalOperator, Parts, Peers


def scores(call: LocalCall) -> LocalOperator:
    """``x @ y^T``; a head of `y` may serve several of `x`."""
    return lambda tensors, peers: (tensors[0] @ _per_head(tensors[1], tensors[0]).mT,)


def weighted(call: LocalCall) -> LocalOperator:
    """``x @ y``, as `scores`."""
    return lambda tensors, peers: (tensors[0] @ _per_head(tensors[1], tensors[0]),)


def gathered(call: LocalCall) -> LocalOperator:
    """``x^T @ y``, added up over the heads that share one of the result."""
    heads = call.output_shape()[1]

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        found = tensors[0].mT @ tensors[1]
        batch, all_heads = found.shape[:2]
        if all_heads == heads:
            return (found,)
        return (found.reshape(batch, heads, all_heads // heads, *found.shape[2:]).sum(2),)

    return run


def hidden(call: LocalCall) -> LocalOperator:
    """Scores of later tokens as minus infinity; a rank has all tokens."""
    return lambda tensors, peers: (_seen(tensors[0]),)


def scaled_softmax(call: LocalCall) -> LocalOperator:
    """Weights of scores times a factor, perhaps without those of later tokens."""
    factor, causal = float(call.arguments[1]), bool(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        scaled = tensors[0] * factor
        return ((_seen(scaled) if causal else scaled).softmax(-1),)

    return run


def scaled_softmax_backward(call: LocalCall) -> LocalOperator:
    """``(g - sum(g w)) w`` times the factor, for the gradient g of the weights w."""
    factor = float(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, weights = tensors
        return (torch._softmax_backward_data(gradient, weights, -1, weights.dtype) * factor,)

    return run


def _seen(scores: Tensor) -> Tensor:
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    return scores.masked_fill(~visible, -torch.inf)


def _per_head(tensor: Tensor, like: Tensor) -> Tensor:
    """Repeat shared heads for each of those of `like`."""
    times = like.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)
