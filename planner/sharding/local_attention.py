"""Attention on devices that lack the fused CPU kernels the graphs are captured with.

CUDA has a fused kernel of its own for half precision without a mask (`_has_flash`), which keeps the same log-sum-exp.
Everything else is written out in products, which keep all scores in memory while they run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planner.sharding.local_call import LocalCall, LocalOperator, Peers, invoke, operator
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD

FLASH = "aten._scaled_dot_product_flash_attention.default"
FLASH_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"
WIDEST_FLASH, FLASH_ALIGNMENT, FLASH_SINCE = 256, 8, (8, 0)
"""Widest heads of the kernel, what their width is a multiple of, and the first architecture that has it."""


def attention(call: LocalCall) -> LocalOperator:
    """Fused attention on CPU, `attend` elsewhere."""
    causal = bool(call.arguments[4]) if len(call.arguments) > 4 else False
    return _by_device(call, attend, causal)


def attention_backward(call: LocalCall) -> LocalOperator:
    """Gradient of fused attention on CPU, `attend_backward` elsewhere."""
    return _by_device(call, attend_backward, bool(call.arguments[7]))


def _by_device(call: LocalCall, elsewhere: Callable[..., tuple[Tensor, ...]], causal: bool) -> LocalOperator:
    fused = invoke(call)
    scale, masked = call.keywords.get("scale"), call.keywords.get("attn_mask") is not None

    def run(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        if tensors[0].is_cpu:
            return fused(tensors, peers)
        mask = tensors[-1] if masked else None
        return elsewhere(*tensors[: len(tensors) - masked], causal=causal, mask=mask, scale=scale)

    return run


def attend_anywhere(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Fused attention on CPU, `attend` elsewhere, for pieces of a sequence."""
    if not query.is_cpu:
        return attend(query, key, value, causal=causal, mask=None, scale=scale)
    output, normaliser = operator(ATTENTION)(query, key, value, 0.0, causal, scale=scale)
    return output, normaliser


def attend_backward_anywhere(
    asking: Sequence[Tensor], key: Tensor, value: Tensor, *, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of `attend_anywhere`, given the gradient, query, output and normaliser of some queries.

    The last two may be those over more keys than these.
    """
    gradient, query, output, normaliser = asking
    if not query.is_cpu:
        return attend_backward(gradient, query, key, value, output, normaliser, causal=causal, mask=None, scale=scale)
    of_query, of_key, of_value = operator(ATTENTION_BACKWARD)(
        gradient, query, key, value, output, normaliser, 0.0, causal, scale=scale
    )
    return of_query, of_key, of_value


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    r"""Attention :math:`O = P V`, :math:`P = e^{S - L}` with scores S and their log-sum-exp L.

    Query ``(batch, heads, length, width)``; returns O and L ``(batch, heads, length)``.
    """
    if mask is None and _has_flash(query):
        output, normaliser, *_ = operator(FLASH)(query, key, value, 0.0, causal, False, scale=scale)
        return output, normaliser
    key, value = _per_head(key, query), _per_head(value, query)
    scores = _scores(query, key, causal, mask, scale)
    normaliser = scores.logsumexp(-1)
    return (scores - normaliser.unsqueeze(-1)).exp_().to(value.dtype) @ value, normaliser


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    normaliser: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Gradients of `attend`: :math:`dV = P^T dO` and :math:`dS = P (dO V^T - \sum dO \, O)`."""
    if mask is None and _has_flash(query):
        lengths = query.shape[-2], key.shape[-2]
        # Nothing is dropped: the kernel does not look at the state of its random numbers.
        state = (torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ()))
        of_query, of_key, of_value = operator(FLASH_BACKWARD)(
            gradient, query, key, value, output, normaliser, None, None, *lengths, 0.0, causal, *state, scale=scale
        )
        return of_query, of_key, of_value
    wide_key, wide_value = _per_head(key, query), _per_head(value, query)
    weights = (_scores(query, wide_key, causal, mask, scale) - normaliser.unsqueeze(-1)).exp_()
    shift = (gradient * output).sum(-1, keepdim=True, dtype=weights.dtype)
    slopes = (weights * (gradient @ wide_value.mT - shift)).to(query.dtype) * _scale(query, scale)
    of_key, of_value = slopes.mT @ query, weights.to(query.dtype).mT @ gradient
    return slopes @ wide_key, _summed(of_key, key), _summed(of_value, value)


def _has_flash(query: Tensor) -> bool:
    """Whether the device of a query has the fused kernel for it."""
    width = query.shape[-1]
    fits = query.dtype in (torch.float16, torch.bfloat16) and width <= WIDEST_FLASH and width % FLASH_ALIGNMENT == 0
    return fits and query.is_cuda and torch.cuda.get_device_capability(query.device) >= FLASH_SINCE


def _scores(query: Tensor, key: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    scores = query @ key.mT * _scale(query, scale)
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
        scores = scores.masked_fill_(~visible, -torch.inf)
    if mask is not None:
        scores = scores.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1]) ** -0.5 if scale is None else scale


def _per_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Repeat shared key or value heads for each of their query heads."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def _summed(gradient: Tensor, shared: Tensor) -> Tensor:
    """Add the gradients of the query heads that share a head."""
    batch, heads = shared.shape[:2]
    return gradient.reshape(batch, heads, -1, *gradient.shape[2:]).sum(2)
