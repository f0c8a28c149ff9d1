"""Llama decoders: rotary positions, root-mean-square norms, gated feed-forward, grouped attention.

Touvron et al., arXiv:2307.09288; rotary positions: Su et al., arXiv:2104.09864.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.networks.losses import mean_cross_entropy
from planner.networks.zoo.configs import LlamaConfig


class RootMeanSquareNorm(nn.Module):
    """Scale to unit root mean square, which is computed in float32 where tensors are narrower, then by a weight."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., hidden)`` to the same shape."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(x.dtype)


def rotary_table(length: int, dim: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``(length, dim)`` of every position's rotation angles, rounded once, at the end."""
    exponents = torch.arange(0, dim, 2, device=like.device, dtype=torch.float64) / dim
    positions = torch.arange(length, device=like.device, dtype=torch.float64)
    angles = positions.unsqueeze(1) * torch.pow(base, -exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of ``x`` ``(batch, heads, length, dim)`` by their position's angles."""
    cosine, sine = table
    left, right = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-right, left), dim=-1) * sine


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several heads may share a key and a value."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        head = config.hidden // config.heads
        self.head, self.groups = head, config.heads // config.key_value_heads
        self.query = nn.Linear(config.hidden, config.heads * head, bias=False)
        self.key = nn.Linear(config.hidden, config.key_value_heads * head, bias=False)
        self.value = nn.Linear(config.hidden, config.key_value_heads * head, bias=False)
        self.output = nn.Linear(config.heads * head, config.hidden, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        query, key = rotate(query, table), rotate(key, table)
        mixed = F.scaled_dot_product_attention(query, self._share(key), self._share(value), is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _share(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return x
        batch, heads, length, head = x.shape
        return x.unsqueeze(2).expand(batch, heads, self.groups, length, head).flatten(1, 2)


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each behind a norm and beside a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.gate = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down = nn.Linear(config.intermediate, config.hidden, bias=False)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x), table)
        y = self.feed_forward_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))  # type: ignore[no-any-return]


class Llama(nn.Module):
    """A Llama; ``forward`` is the mean cross entropy of the next token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim, self.rope_base = config.hidden // config.heads, config.rope_base
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(self.block(config) for _ in range(config.layers))
        self.norm = RootMeanSquareNorm(config.hidden, config.epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def block(self, config: LlamaConfig) -> nn.Module:
        """Make one block."""
        return Block(config)

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        """Loss of tokens and next tokens, both ``(batch, length)``."""
        x = self.token_embedding(tokens)
        table = rotary_table(tokens.shape[1], self.head_dim, self.rope_base, like=x)
        for block in self.blocks:
            x = block(x, table)
        return mean_cross_entropy(self.head(self.norm(x)), next_tokens)
