"""One rank's part of attention over a sequence that is sharded along a context axis.

Liu et al., arXiv:2310.01889 (ring); Jacobs et al., arXiv:2309.14509 (all to all). Positions are given, so that
any share of the sequence is masked right, in particular the two chunks of `planner.sharding.context.positions_of`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from planner.sharding.local_attention import attend, attend_backward

Parts = tuple[Tensor, ...]
PassOn = Callable[[Parts], Parts]
"""Sends tensors to the next rank of the axis and returns those of the rank before."""
Exchange = Callable[[Tensor, int, int], Tensor]
"""All-to-all: cuts a tensor along the first dim given, and joins what arrives along the second, in rank order."""


def visible(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal mask ``(queries, keys)`` of positions."""
    return keys.unsqueeze(0) <= queries.unsqueeze(1)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    r"""Merge attention over two sets of keys: outputs O and log-sum-exps L of their scores.

    :math:`L = \log(e^{L_1} + e^{L_2})`, :math:`O = e^{L_1 - L} O_1 + e^{L_2 - L} O_2`; a set of which a query
    sees nothing has :math:`L_i = -\infty` there.
    """
    total = torch.logaddexp(one[1], other[1])
    parts = [
        output.masked_fill(lse.isneginf().unsqueeze(-1), 0.0) * (lse - total).exp().nan_to_num(0.0).unsqueeze(-1)
        for output, lse in (one, other)
    ]
    return parts[0] + parts[1], total


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Callable[[int], Tensor] | None,
    *,
    rank: int,
    size: int,
    scale: float | None,
    pass_on: PassOn,
) -> tuple[Tensor, Tensor]:
    """Attend to the keys of every rank as they go round.

    Tensors ``(batch, heads, local length, width)``; ``positions`` of each rank's tokens, ``None`` without a
    causal mask. Returns the output and the log-sum-exp ``(batch, heads, local length)``.
    """
    merged: tuple[Tensor, Tensor] | None = None
    for turn in range(size):
        mask = _mask(positions, rank, (rank - turn) % size)
        found = attend(query, key, value, causal=False, mask=mask, scale=scale)
        merged = found if merged is None else merge(merged, found)
        if turn < size - 1:
            key, value = pass_on((key, value))
    assert merged is not None
    return merged


def ring_attention_backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    positions: Callable[[int], Tensor] | None,
    *,
    rank: int,
    size: int,
    scale: float | None,
    pass_on: PassOn,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `ring_attention` for ``saved``: gradient, query, key, value, output and log-sum-exp.

    Keys and values go round once more, the sums of their gradients behind them and in the end home.
    """
    gradient, query, key, value, output, normaliser = saved
    of_query = torch.zeros_like(query)
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    for turn in range(size):
        mask = _mask(positions, rank, (rank - turn) % size)
        found = attend_backward(gradient, query, key, value, output, normaliser, causal=False, mask=mask, scale=scale)
        of_query = of_query + found[0]
        of_key, of_value = of_key + found[1], of_value + found[2]
        if turn < size - 1:
            key, value, of_key, of_value = pass_on((key, value, of_key, of_value))
        else:
            of_key, of_value = pass_on((of_key, of_value))
    return of_query, of_key, of_value


def _mask(positions: Callable[[int], Tensor] | None, rank: int, other: int) -> Tensor | None:
    return None if positions is None else visible(positions(rank), positions(other))


_HEADS, _LENGTH = 1, 2


def exchanged_attention(
    query: Tensor, key: Tensor, value: Tensor, order: Tensor | None, *, scale: float | None, exchange: Exchange
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Attend with some heads over the whole sequence, between two all-to-alls.

    ``order`` are the positions of the tokens as they arrive, ``None`` without a causal mask. Returns the output
    ``(batch, heads, local length, width)``, the log-sum-exp of this rank's heads over the whole sequence, and
    the exchanged query, key, value and output, which the backward pass reads.
    """
    query, key, value = (exchange(tensor, _HEADS, _LENGTH) for tensor in (query, key, value))
    mask = None if order is None else visible(order, order)
    output, normaliser = attend(query, key, value, causal=False, mask=mask, scale=scale)
    return exchange(output, _LENGTH, _HEADS), normaliser, (query, key, value, output)


def exchanged_attention_backward(
    gradient: Tensor,
    kept: tuple[Tensor, Tensor, Tensor, Tensor],
    normaliser: Tensor,
    order: Tensor | None,
    *,
    scale: float | None,
    exchange: Exchange,
) -> tuple[Tensor, ...]:
    """Gradients of `exchanged_attention`: one all-to-all of the incoming gradient, one of each that goes back."""
    mask = None if order is None else visible(order, order)
    found = attend_backward(
        exchange(gradient, _HEADS, _LENGTH), *kept, normaliser, causal=False, mask=mask, scale=scale
    )
    return tuple(exchange(tensor, _LENGTH, _HEADS) for tensor in found)
