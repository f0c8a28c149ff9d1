"""BERT with a masked-language head; the loss is taken at every position.

Devlin et al., arXiv:1810.04805. Segments are all zero, nothing is padded and there is no dropout.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.networks.losses import mean_cross_entropy
from planner.networks.zoo.configs import BertConfig


class Attention(nn.Module):
    """Self-attention over the whole sequence."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head = hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.output(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and a feed-forward layer, each beside a residual and before a norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config.hidden, config.heads)
        self.attention_norm = nn.LayerNorm(config.hidden, config.epsilon)
        self.expand = nn.Linear(config.hidden, config.intermediate)
        self.contract = nn.Linear(config.intermediate, config.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.hidden, config.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, hidden)`` to the same shape."""
        x = self.attention_norm(x + self.attention(x))
        return self.feed_forward_norm(x + self.contract(F.gelu(self.expand(x))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """A BERT; ``forward`` is the mean cross entropy of the tokens at all positions."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.position_embedding = nn.Embedding(config.positions, config.hidden)
        self.segment_embedding = nn.Embedding(config.token_types, config.hidden)
        self.embedding_norm = nn.LayerNorm(config.hidden, config.epsilon)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.hidden, config.hidden)
        self.transform_norm = nn.LayerNorm(config.hidden, config.epsilon)
        self.head = nn.Linear(config.hidden, config.vocabulary)
        self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, original_tokens: Tensor) -> Tensor:
        """Loss of (masked) tokens against the original ones, both ``(batch, length)``."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        segments = torch.zeros(length, dtype=torch.long, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions) + self.segment_embedding(segments)
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x)
        return mean_cross_entropy(self.head(self.transform_norm(F.gelu(self.transform(x)))), original_tokens)
