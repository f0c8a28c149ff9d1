"""Fused attention over a part of the keys, as an operator of its own in captured graphs.

torch's fused kernels of the CPU know whole and causal attention. A sliding window, chunks, a soft cap on the scores
and sinks would be captured as products with all scores in memory, and with the work of all of them. Kernels of GPUs
skip what is hidden (Dao, arXiv:2307.08691; FlexAttention, arXiv:2412.05496), so one operator each way stands for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


@cache
def masked_attention_operator() -> OpOverload:
    """Define `planner.graph.attention.MASKED` and its gradient for torch.

    It takes query, key and value ``(batch, heads, length, width)``, whether later keys are hidden, the window and the
    chunk (0 for none), the scale and the cap of the scores (0 for none), and sinks ``(heads,)`` or None; it returns
    the output and the log-sum-exp of the scores ``(batch, heads, length)``.
    """

    @torch.library.custom_op("meshwright::masked_attention", mutates_args=())
    def forward(
        query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, chunk: int, scale: float, cap: float,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return _attend(query, key, value, causal, window, chunk, scale, cap, sinks)

    @torch.library.custom_op("meshwright::masked_attention_backward", mutates_args=())
    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normaliser: Tensor, causal: bool,
        window: int, chunk: int, scale: float, cap: float, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        return _gradients(gradient, query, key, value, output, normaliser, causal, window, chunk, scale, cap, sinks)

    def forward_shapes(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return query.new_empty((*query.shape[:-1], value.shape[-1])), query.new_empty(query.shape[:-1])

    def backward_shapes(_: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
        sinks = others[-1]
        of_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), of_sinks

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, *ctx.pattern, sinks = inputs
        ctx.save_for_backward(query, key, value, *output, sinks)

    def gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        query, key, value, output, normaliser, sinks = ctx.saved_tensors
        found = backward(gradient, query, key, value, output, normaliser, *ctx.pattern, sinks)
        return (*found[:3], *(None,) * 5, None if sinks is None else found[3])

    forward.register_fake(forward_shapes)
    backward.register_fake(backward_shapes)
    forward.register_autograd(gradients, setup_context=keep)
    return torch.ops.meshwright.masked_attention.default


def _attend(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, chunk: int, scale: float, cap: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention written out in products; a sink is one more score that weighs nothing."""
    scores, seen = _scores(query, key, (causal, window, chunk), scale, cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    normaliser = scores.logsumexp(-1)
    if sinks is not None:
        normaliser = torch.logaddexp(normaliser, sinks.unsqueeze(-1).expand_as(normaliser))
    return (scores - normaliser.unsqueeze(-1)).exp() @ value, normaliser


def _scores(query: Tensor, key: Tensor, pattern: Sequence[Any], scale: float, cap: float) -> tuple[Tensor, Tensor]:
    scores = query @ key.mT * scale
    seen = visible(query.shape[-2], key.shape[-2], pattern, query.device)
    return cap * torch.tanh(scores / cap) if cap else scores, seen


def _gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, normaliser: Tensor, *pattern: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""Gradients of `_attend` for query, key, value and sinks.

    With weights :math:`P = e^{C - L}` of capped scores :math:`C = c \tanh(S / c)`:
    :math:`dV = P^T dO`, :math:`dC = P (dO V^T - D)` with :math:`D = \sum dO\, O`, :math:`dS = dC (1 - (C / c)^2)`, and
    for a sink :math:`-e^{s - L} D`, summed over samples and queries.
    """
    *mask, scale, cap, sinks = pattern
    scores, seen = _scores(query, key, mask, scale, cap)
    weights = (scores - normaliser.unsqueeze(-1)).exp().masked_fill(~seen, 0.0)
    shift = (gradient * output).sum(-1)
    slopes = weights * (gradient @ value.mT - shift.unsqueeze(-1))
    if cap:
        slopes = slopes * (1.0 - (scores / cap) ** 2)
    of_sinks = query.new_empty(0)
    if sinks is not None:
        of_sinks = -((sinks.unsqueeze(-1) - normaliser).exp() * shift).sum((0, 2))
    return slopes @ key * scale, slopes.mT @ query * scale, weights.mT @ gradient, of_sinks


def visible_keys(queries: int, keys: int, causal: bool, window: int, chunk: int) -> int:
    """Keys that all queries together attend to; both count from the same place."""
    total = 0
    for query in range(queries):
        first = max(query - window + 1, 0) if window else 0
        last = query + 1 if causal else min(query + window, keys) if window else keys
        if chunk:
            first, last = max(first, query // chunk * chunk), min(last, (query // chunk + 1) * chunk)
        total += max(min(last, keys) - first, 0)
    return total


def visible(queries: int, keys: int, pattern: Sequence[Any], device: torch.device) -> Tensor:
    """Which keys each query attends to, ``(queries, keys)``, for causal, window and chunk."""
    causal, window, chunk = pattern
    query, key = torch.arange(queries, device=device).unsqueeze(1), torch.arange(keys, device=device)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= query
    if window:
        seen &= (key > query - window) & (key < query + window)
    return seen & (key // chunk == query // chunk) if chunk else seen
