"""One rank's part of a softmax over classes that are cut among ranks (Shoeybi et al., arXiv:1909.08053, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from planner.sharding.local_call import LocalCall, LocalOperator, Parts, Peers, invoke
from planner.sharding.rule_notation import NARROW


def shared_log_softmax(call: LocalCall) -> LocalOperator:
    r"""Logarithm of the softmax of one's own classes, less what those of the others add.

    With :math:`z_i` the logarithm of the summed exponentials of rank i, a number each row, the whole sum is that of
    :math:`m = \max z_i`: :math:`z = m + \log \sum \exp(z_i - m)`.
    """
    dim, axes, dtype = call.arguments[1], _cut_axes(call), getattr(torch, call.outputs[0].dtype)
    run, half = invoke(call), call.inputs[0].dtype in NARROW

    def share(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        values = tensors[0]
        own = values.log_softmax(dim, torch.float32) if half else run(tensors, peers)[0]
        mine = values.amax(dim).to(own.dtype) - own.amax(dim)
        whole = mine
        for axis in axes:
            most = peers.largest(whole, axis)
            whole = most + peers.sum((whole - most).exp_(), axis).log_()
        return (own.sub_((whole - mine).unsqueeze(dim)).to(dtype),)

    return share


def shared_log_softmax_backward(call: LocalCall) -> LocalOperator:
    r"""Gradient of `shared_log_softmax`: :math:`g - e^y \sum g` for the gradient g of the result y."""
    dim, axes, dtype = call.arguments[2], _cut_axes(call), getattr(torch, call.outputs[0].dtype)

    def differentiate(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, result = (t.float() if call.inputs[0].dtype in NARROW else t for t in tensors)
        total = gradient.sum(dim)
        for axis in axes:
            total = peers.sum(total, axis)
        return (result.exp().mul_(total.neg_().unsqueeze(dim)).add_(gradient).to(dtype),)

    return differentiate


def _cut_axes(call: LocalCall) -> tuple[int, ...]:
    """Axes that cut the classes."""
    return tuple(axis for axis, rule in enumerate(call.rules) if rule.messages)
