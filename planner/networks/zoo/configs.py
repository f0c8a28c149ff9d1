"""Sizes of the built-in networks, and their parameter counts without building them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

CAPACITY = 1.25
"""Tokens an expert takes, as a multiple of its even share."""
_FEW, _EVEN = 64, 8


def places_of(length: int, chosen: int, experts: int) -> int:
    """Places of an expert for the tokens of a sequence; many are a multiple of 8, which ranks can share evenly.

    >>> places_of(16, 2, 4), places_of(4096, 8, 384), places_of(4096, 2, 2)
    (10, 112, 4096)
    """
    places = math.ceil(CAPACITY * chosen * length / experts)
    return min(length, places if places < _FEW else math.ceil(places / _EVEN) * _EVEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Sizes of a GPT-2 or GPT-3."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    positions: int

    @property
    def parameters(self) -> int:
        """Trained numbers, the tied embedding once."""
        block = 12 * self.hidden**2 + 13 * self.hidden
        return (self.vocabulary + self.positions) * self.hidden + self.layers * block + 2 * self.hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama; fewer key-value heads than heads mean grouped attention."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    positions: int
    rope_base: float = 10000.0
    epsilon: float = 1e-5

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return _dense_parameters(self)


def _dense_parameters(config: LlamaConfig) -> int:
    """Trained numbers with one feed-forward layer a block."""
    hidden = config.hidden
    attention = 2 * hidden**2 + 2 * hidden * (hidden // config.heads * config.key_value_heads)
    block = attention + 3 * hidden * config.intermediate + 2 * hidden
    return 2 * config.vocabulary * hidden + config.layers * block + hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Sizes of a Mixtral: a Llama in which every token takes `chosen_experts` of `experts` feed-forward layers."""

    experts: int
    chosen_experts: int

    @property
    def parameters(self) -> int:
        """Trained numbers, all experts counted."""
        more = 3 * self.hidden * self.intermediate * (self.experts - 1) + self.experts * self.hidden
        return _dense_parameters(self) + self.layers * more


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Sizes of a BERT with a masked-language head."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    intermediate: int
    positions: int
    token_types: int = 2
    epsilon: float = 1e-12

    @property
    def parameters(self) -> int:
        """Trained numbers, the tied embedding once."""
        embedding = (self.vocabulary + self.positions + self.token_types) * self.hidden + 2 * self.hidden
        attention = 4 * (self.hidden**2 + self.hidden) + 2 * self.hidden
        feed_forward = 2 * self.hidden * self.intermediate + self.intermediate + 3 * self.hidden
        head = self.hidden**2 + 3 * self.hidden + self.vocabulary
        return embedding + self.layers * (attention + feed_forward) + head


@dataclass(frozen=True, slots=True, kw_only=True)
class WideDeepConfig:
    """Sizes of a wide and deep network: hashed `rows` of `categories` features, `numbers`, and hidden layers."""

    rows: int
    categories: int
    numbers: int
    width: int
    hidden: tuple[int, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the perceptron, its input first."""
        return (self.categories * self.width + self.numbers, *self.hidden)

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return self.rows * (self.width + 1) + self.numbers + 1 + perceptron_parameters((*self.widths, 1))


def perceptron_parameters(widths: tuple[int, ...]) -> int:
    """Trained numbers of linear layers of these widths.

    >>> perceptron_parameters((784, 512, 512, 1))
    665089
    """
    return sum((a + 1) * b for a, b in pairwise(widths))
