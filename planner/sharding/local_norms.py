"""One rank's part of root-mean-square norms that are one operator each way; a rank has whole rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.sharding.local_call import LocalCall, LocalOperator, Parts, Peers


def rms_norm(call: LocalCall) -> LocalOperator:
    """Values over the root of their mean square, which is float32 where they are narrower, times a weight."""
    epsilon = float(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        values, weight = tensors
        scaled, _ = _scaled(values, epsilon)
        return (weight * scaled.to(values.dtype),)

    return run


def rms_norm_backward(call: LocalCall) -> LocalOperator:
    """Gradients of values and weight: ``r (w g - n mean(w g n))`` and ``sum(g n)``, n being the values times r."""
    epsilon = float(call.arguments[3])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, values, weight = tensors
        scaled, inverse = _scaled(values, epsilon)
        weighted = gradient.to(scaled.dtype) * weight
        of_weight = (gradient * scaled).flatten(0, -2).sum(0)
        of_values = inverse * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True))
        return of_values.to(values.dtype), of_weight.to(weight.dtype)

    return run


def _scaled(values: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * inverse, inverse
