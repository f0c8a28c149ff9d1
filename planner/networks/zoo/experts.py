"""Mixtures of experts with static shapes, for the built-in networks and for those of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.networks.zoo.configs import CAPACITY


def choose_experts(logits: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """Weights and numbers ``(tokens, chosen)`` of the best experts by logits ``(tokens, experts)``, in their dtype."""
    best, index = torch.topk(F.softmax(logits, dim=-1), chosen, dim=-1)
    return best / best.sum(-1, keepdim=True), index


def mix_experts(
    hidden_states: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    experts: int,
    length: int,
    compute: Callable[[Tensor], Tensor],
) -> Tensor:
    """Mix experts: each takes a fixed number of each sequence's tokens, in order.

    Lepikhin et al., arXiv:2006.16668: a token beyond an expert's capacity skips it. Routing looks at one
    sequence at a time, so that samples stay independent and the batch can be sharded.

    Parameters
    ----------
    hidden_states, index, weights
        ``(tokens, hidden)``, and the experts of each token with their weights, ``(tokens, chosen)``.
    experts
        How many there are.
    length
        Tokens of a sequence.
    compute
        Runs every expert on its own rows: ``(experts, rows, hidden)`` to the same shape.
    """
    chosen, hidden = index.shape[-1], hidden_states.shape[-1]
    capacity = min(length, math.ceil(CAPACITY * chosen * length / experts))
    x = hidden_states.view(-1, length, hidden)
    slot, kept = _slots(index.view(-1, length * chosen), experts, capacity)
    token = _tokens_of_slots(slot, chosen, experts * capacity)
    padded = F.pad(x, (0, 0, 0, 1))
    taken = padded.gather(1, token.unsqueeze(-1).expand(-1, -1, hidden))
    by_expert = taken.view(-1, experts, capacity, hidden).transpose(0, 1).flatten(1, 2)
    out = compute(by_expert).view(experts, -1, capacity, hidden).transpose(0, 1).flatten(1, 2)
    returned = out.gather(1, slot.clamp(max=experts * capacity - 1).unsqueeze(-1).expand(-1, -1, hidden))
    weighted = returned * (weights.view(-1, length * chosen) * kept).unsqueeze(-1)
    return weighted.view(-1, chosen, hidden).sum(1)


def gated_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Feed the rows ``(experts, rows, hidden)`` of each expert through its gated layer.

    Gates and what they open have weights of their own, ``(experts, intermediate, hidden)``: ranks that share an expert
    then cut both by the same columns, and exchange nothing between the products.
    """
    opened = act(torch.bmm(x, gate.transpose(1, 2))) * torch.bmm(x, up.transpose(1, 2))
    return torch.bmm(opened, down.transpose(1, 2))


def _slots(index: Tensor, experts: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Place of each choice ``(batch, choices)`` in its expert's buffer, or behind all; and whether it has one."""
    mine = (index.unsqueeze(-1) == torch.arange(experts, device=index.device)).to(index.dtype)
    position = ((mine.cumsum(1) - 1) * mine).sum(-1)
    kept = position < capacity
    return torch.where(kept, index * capacity + position, experts * capacity), kept


def _tokens_of_slots(slot: Tensor, chosen: int, slots: int) -> Tensor:
    """Token in each buffer place ``(batch, slots)``; empty places take the padding token."""
    choices = slot.shape[1]
    tokens = (torch.arange(choices, device=slot.device) // chosen).expand(slot.shape[0], choices)
    empty = slot.new_full((slot.shape[0], slots + 1), choices // chosen)
    return empty.scatter(1, slot, tokens)[:, :slots]
