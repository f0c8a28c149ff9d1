"""BERT as it is pre-trained: the loss is taken at the masked positions only, 20 of 128 tokens or 80 of 512."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from planner.networks.zoo.bert import Bert
from planner.networks.zoo.configs import BertConfig


class _Backbone(Bert):
    def __init__(self, config: BertConfig, predicted: int) -> None:
        super().__init__(config)
        self.predicted = predicted

    def forward(self, tokens: Tensor, original_tokens: Tensor) -> Tensor:
        """Loss at the first `predicted` tokens, which costs as much as at any others."""
        length = tokens.shape[1]
        positions = torch.arange(length, device=tokens.device)
        segments = torch.zeros(length, dtype=torch.long, device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions) + self.segment_embedding(segments)
        x = self.embedding_norm(x)
        for block in self.blocks:
            x = block(x)
        x = x[:, : self.predicted]
        logits = self.head(self.transform_norm(nn.functional.gelu(self.transform(x))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), original_tokens[:, : self.predicted].flatten())


def _make(config: BertConfig, length: int, predicted: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    tokens = torch.randint(config.vocabulary, (2, length))
    return _Backbone(config, predicted), (tokens, tokens)


def base_128() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """BERT base at 128 tokens."""
    config = BertConfig(vocabulary=30522, hidden=768, layers=12, heads=12, intermediate=3072, positions=512)
    return _make(config, 128, 20)


def large_512() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """BERT large at 512 tokens."""
    config = BertConfig(vocabulary=30522, hidden=1024, layers=24, heads=16, intermediate=4096, positions=512)
    return _make(config, 512, 80)
