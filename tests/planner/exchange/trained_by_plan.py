"""Trains small modules by exported plans, as one rank that torchrun started, and in one process; prints both losses.

Arguments: a strategy file, and the exported file where the module is cut by it instead of by `apply`.
"""

from __future__ import annotations

import copy
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from planner.networks.zoo.configs import GPTConfig
from planner.networks.zoo.gpt import GPT

STEPS = 2
Loss = Callable[..., Tensor]


class Mixer(nn.Module):
    """A feed-forward layer beside a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, width)`` to the same shape."""
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Own(nn.Module):
    """A user's own module."""

    def __init__(self, width: int = 16, layers: int = 8) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(8, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, 8)`` to ``(batch, 4)``."""
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x)  # type: ignore[no-any-return]


def own() -> tuple[nn.Module, Sequence[Tensor], Loss]:
    """A factory, as ``py:`` names it."""
    return Own(), (torch.randn(2, 8), torch.randn(2, 4)), F.mse_loss


def made(network: str, batch: int) -> tuple[nn.Module, list[Tensor], Loss]:
    """A small module with the names of a planned network, a batch, and its loss."""
    torch.manual_seed(0)
    if network.startswith("py:"):
        module, _, loss = own()
        return module, [torch.randn(batch, 8), torch.randn(batch, 4)], lambda module, x, y: loss(module(x), y)
    tokens = [torch.randint(0, 64, (batch, 16)) for _ in range(2)]
    if network == "zoo:gpt2":
        sizes = GPTConfig(vocabulary=64, hidden=24, layers=12, heads=12, positions=16)
        return GPT(sizes).train(), tokens, lambda module, *given: module(*given)
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=16, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=16,
    )  # fmt: skip

    def loss_of(module: nn.Module, given: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(module(given).logits.flatten(0, 1), labels.flatten())

    return LlamaForCausalLM(config).train(), tokens, loss_of


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same for both."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def main(strategy: str, exported: str | None = None) -> None:
    """Train and print the losses of the ranks and of one process."""
    torch.set_num_threads(1)
    plan = json.loads(Path(strategy).read_text())
    module, batch, loss = made(plan["network"]["spec"], plan["batch"]["global"])
    alone = copy.deepcopy(module)
    if exported is None:
        from planner.exchange.pytorch import apply

        step = apply(module, strategy, loss)
    else:
        step = runpy.run_path(exported)["apply"](module, loss)
    degree = {axis["axis"]: axis["size"] for axis in plan["mesh"]}
    data = degree.get("data", 1)
    place = dist.get_rank() // degree.get("tensor", 1) % data
    mine = [tensor.chunk(data)[place] for tensor in batch]
    first, second = optimizer(step.parameters()), optimizer(alone.parameters())
    losses: list[tuple[float, float]] = []
    for _ in range(STEPS):
        found, expected = step(*mine), loss(alone, *batch)
        expected.backward()  # type: ignore[no-untyped-call]
        for one in (first, second):
            one.step()
            one.zero_grad()
        known = torch.tensor([0.0, 0.0] if found is None else [float(found), 1.0])
        dist.all_reduce(known)
        losses.append((float(known[0] / known[1]), float(expected)))
    if dist.get_rank() == 0:
        print(json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
