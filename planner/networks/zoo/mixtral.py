"""Mixtral decoders: Llama blocks whose feed-forward layer is a mixture of experts. Jiang et al., arXiv:2401.04088."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.networks.zoo.configs import LlamaConfig, MixtralConfig
from planner.networks.zoo.experts import choose_experts, gated_experts, mix_experts
from planner.networks.zoo.llama import Attention, Llama, RootMeanSquareNorm


class Experts(nn.Module):
    """Gated feed-forward layers, of which every token takes the best few."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.chosen = config.chosen_experts
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate = nn.Parameter(torch.empty(config.experts, config.intermediate, config.hidden))
        self.up = nn.Parameter(torch.empty(config.experts, config.intermediate, config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.intermediate))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        tokens = x.flatten(0, 1)
        weights, index = choose_experts(self.router(tokens), self.chosen)
        mixed = mix_experts(
            tokens,
            index,
            weights,
            experts=self.gate.shape[0],
            length=x.shape[1],
            compute=lambda rows: gated_experts(rows, self.gate, self.up, self.down, F.silu),
        )
        return mixed.view(x.shape)


class Block(nn.Module):
    """Attention and a mixture of experts, each behind a norm and beside a residual."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.experts = Experts(config)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.experts(self.feed_forward_norm(x))  # type: ignore[no-any-return]


class Mixtral(Llama):
    """A Mixtral; ``forward`` is the mean cross entropy of the next token, without the router's auxiliary loss."""

    def block(self, config: LlamaConfig) -> nn.Module:
        """Make one block."""
        assert isinstance(config, MixtralConfig)
        return Block(config)
