"""Networks of every kind the rule table is for, small enough to check every rule of every operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.graph.capture import capture_module
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.networks.zoo.configs import WideDeepConfig
from planner.networks.zoo.wide_deep import WideAndDeep


@dataclass(frozen=True, kw_only=True)
class BatchTensor:
    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    high: int | None = None


def tokens(length: int, vocabulary: int) -> tuple[BatchTensor, ...]:
    return tuple(
        BatchTensor(name=name, kind=kind, shape=(length,), dtype="int64", high=vocabulary)
        for name, kind in (("ids", "tokens"), ("following", "next_tokens"))
    )


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.Sigmoid(), nn.Linear(8, 1))

    def forward(self, values: Tensor, target: Tensor) -> Tensor:
        return F.l1_loss(self.layers(values), target)


class Image(nn.Module):
    """Every kind of convolution, batch norm, pooling and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 7, stride=2, padding=3, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.grouped = nn.Conv2d(8, 8, 1, groups=2)
        self.head = nn.Linear(8, 12)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norms[0](self.first(image))), 3, 2, 1)
        x = F.relu(self.norms[1](self.second(x)) + x)
        x = F.avg_pool2d(self.grouped(self.depthwise(x)), 2)
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), label)


class Gpt(nn.Module):
    """Pre-norm block, fused query-key-value projection, tied embedding."""

    def __init__(self, width: int = 16, heads: int = 4, vocabulary: int = 24, length: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        batch, length, width = x.shape
        parts = self.attention(self.norms[0](x)).split(width, -1)
        q, k, v = (p.view(batch, length, self.heads, -1).transpose(1, 2) for p in parts)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.projection(attended)
        x = x + self.narrow(F.gelu(self.wide(self.norms[1](x)), approximate="tanh"))
        return F.cross_entropy(self.head(self.norms[2](x)).flatten(0, 1), following.flatten())


class Llama(nn.Module):
    """Root-mean-square norms, rotary positions, shared key-value heads, gated layer, a loss by gather."""

    def __init__(self, width: int = 16, vocabulary: int = 24) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.scale = nn.Parameter(torch.ones(width))
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, width // 2, bias=False), nn.Linear(width, width // 2, bias=False)
        self.gate, self.up = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.down = nn.Linear(32, width, bias=False)

    def norm(self, x: Tensor) -> Tensor:
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[2], dtype=torch.float32)[:, None] * 0.1 ** torch.arange(half)[None]
        angles = torch.cat((angles, angles), -1)
        return x * angles.cos() + torch.cat((-x[..., half:], x[..., :half]), -1) * angles.sin()

    def forward(self, ids: Tensor, following: Tensor) -> Tensor:
        x = self.words(ids)
        batch, length, width = x.shape
        y = self.norm(x)
        q, k, v = (layer(y).view(batch, length, -1, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (p[:, :, None].expand(batch, 2, 2, length, 4).reshape(batch, 4, length, 4) for p in (self.rotate(k), v))
        attended = F.scaled_dot_product_attention(self.rotate(q), k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(batch, length, width))
        y = self.norm(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        scores = self.head(self.norm(x)).flatten(0, 1).log_softmax(-1)
        return -scores.gather(1, following.flatten().unsqueeze(1)).sum() / following.numel()


class Bert(nn.Module):
    """Post-norm block, padding mask (attention falls apart into products and softmax), pooled first token."""

    def __init__(self, width: int = 16, heads: int = 4, vocabulary: int = 24) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.norms = nn.Embedding(vocabulary, width), nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow = nn.Linear(width, 32), nn.Linear(32, width)
        self.pool, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        x = self.words(ids)
        batch, length, width = x.shape
        q, k, v = (layer(x).view(batch, length, self.heads, -1).transpose(1, 2) for layer in self.attention[:3])
        mask = (ids != 0)[:, None, None, :].expand(batch, 1, length, length)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = self.norms[0](x + self.attention[3](attended.transpose(1, 2).reshape(batch, length, width)))
        x = self.norms[1](x + self.narrow(F.gelu(self.wide(x))))
        return F.cross_entropy(self.head(torch.tanh(self.pool(x[:, 0]))), label)


class UShape(nn.Module):
    """Down and up again: group and instance norms, transposed convolution, resizing of both kinds, joined levels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.down, self.down_norm = nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8)
        self.up, self.joined = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(16, 8, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = F.relu(self.first_norm(self.first(image)))
        y = F.silu(self.down_norm(self.down(F.max_pool2d(x, 2))))
        z = self.joined(torch.cat((self.up(F.avg_pool2d(y, 2)), y), 1))
        z = z + F.interpolate(F.avg_pool2d(z, 2), size=z.shape[2:], mode="bilinear", align_corners=False)
        z = self.last(torch.cat((F.interpolate(z, scale_factor=2, mode="nearest"), x), 1))
        return (z - target).abs().sum() / target.numel()


def wide_and_deep() -> nn.Module:
    return WideAndDeep(WideDeepConfig(rows=16, categories=4, numbers=4, width=8, hidden=(16, 8)))


_LABEL = BatchTensor(name="label", kind="label", dtype="int64", high=2)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[BatchTensor, ...]]] = {
    "mlp": (
        Perceptron,
        (
            BatchTensor(name="values", kind="features", shape=(12,)),
            BatchTensor(name="target", kind="target", shape=(1,)),
        ),
    ),
    "image": (
        Image,
        (
            BatchTensor(name="image", kind="image", shape=(4, 32, 32)),
            BatchTensor(name="label", kind="label", dtype="int64", high=12),
        ),
    ),
    "u_shape": (
        UShape,
        (
            BatchTensor(name="image", kind="image", shape=(4, 16, 16)),
            BatchTensor(name="target", kind="target", shape=(4, 16, 16)),
        ),
    ),
    "wide_deep": (
        wide_and_deep,
        (
            BatchTensor(name="numbers", kind="features", shape=(4,)),
            BatchTensor(name="categories", kind="categories", shape=(4,), dtype="int64", high=16),
            _LABEL,
        ),
    ),
    "gpt": (Gpt, tokens(8, 24)),
    "llama": (Llama, tokens(8, 24)),
    "bert": (Bert, (tokens(8, 24)[0], _LABEL)),
}


@cache
def graph(name: str, batch: int = 8) -> OperatorGraph:
    """Joint graph of a small network in float64."""
    make, inputs = NETWORKS[name]
    return at_precision(at_batch(capture_module(make, inputs, name=name), batch), "float64")
