"""Mixtures of experts with static shapes, for the built-in networks and for those of transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.graph.custom_operators import expert_places_operator
from planner.networks.zoo.configs import places_of


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
    capacity = places_of(length, chosen, experts)
    x = hidden_states.view(-1, length, hidden)
    rows = index.view(-1, length * chosen)
    place, kept, token = expert_places_operator()(rows, chosen, experts, capacity)
    taken = x.gather(1, token.unsqueeze(-1).expand(-1, -1, hidden))
    by_expert = taken.view(-1, experts, capacity, hidden).transpose(0, 1).flatten(1, 2)
    out = compute(by_expert).view(experts, -1, capacity, hidden).transpose(0, 1).flatten(1, 2)
    returned = out.gather(1, place.unsqueeze(-1).expand(-1, -1, hidden))
    weighted = returned * (weights.view(-1, length * chosen) * kept).unsqueeze(-1)
    mixed: Tensor = weighted.view(-1, chosen, hidden).sum(1)
    return mixed


def gated_experts(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Feed the rows ``(experts, rows, hidden)`` of each expert through its gated layer.

    Gates and what they open have weights of their own, ``(experts, intermediate, hidden)``: ranks that share an expert
    then cut both by the same columns, and exchange nothing between the products.
    """
    opened = act(torch.bmm(x, gate.transpose(1, 2))) * torch.bmm(x, up.transpose(1, 2))
    return torch.bmm(opened, down.transpose(1, 2))
