"""GPT-2 and GPT-3: decoders with learned positions, pre-normalisation and a tied embedding.

Query, key and value are three projections, so that heads can be sharded. Radford et al., "Language
Models are Unsupervised Multitask Learners" (2019); Brown et al., arXiv:2005.14165 (GPT-3's sparse
attention layers are dense here).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.networks.losses import mean_cross_entropy
from planner.networks.zoo.configs import GPTConfig


class Attention(nn.Module):
    """Causal self-attention of `heads` heads; a tensor rank has some of them, so the width gives their number."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, hidden)`` to the same shape."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a layer norm and beside a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, sequence, hidden)`` to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        widened = F.gelu(self.expand(self.feed_forward_norm(x)), approximate="tanh")
        return x + self.contract(widened)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT; ``forward`` is the mean cross entropy of the next token."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.positions, config.hidden)
        self.blocks = nn.ModuleList(Block(config.hidden, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        self._initialise(config.layers)

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attention.output.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, next_tokens: Tensor) -> Tensor:
        """Loss of tokens and next tokens, both ``(batch, sequence)``."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return mean_cross_entropy(self.head(self.norm(x)), next_tokens)
