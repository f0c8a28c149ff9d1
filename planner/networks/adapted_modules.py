"""Modules of transformers with low-rank adapters beside frozen products, as PEFT makes them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from planner.networks.adapters import ALL_LINEAR, Adapters
from simulator.errors import NetworkError, UnsupportedError


class Adapted(nn.Module):
    """A product with frozen weights, and beside it one of low rank that is trained and adds nothing at first."""

    def __init__(self, base: nn.Linear | Conv1D, adapters: Adapters) -> None:
        super().__init__()
        inputs, outputs = _shape(base)
        self.base_layer, self.scaling = base, adapters.scaling
        self.lora_A = nn.Linear(inputs, adapters.rank, bias=False)
        self.lora_B = nn.Linear(adapters.rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling  # type: ignore[no-any-return]


def _shape(base: nn.Linear | Conv1D) -> tuple[int, int]:
    """Inputs and outputs; GPT-2 keeps its weights the other way round."""
    first, second = base.weight.shape
    return (second, first) if isinstance(base, nn.Linear) else (first, second)


def adapt(path: str, model: Any, adapters: Adapters) -> None:
    """Freeze a model and put adapters beside its products, in place; NetworkError names the file of a wrong target."""
    named = dict(model.named_modules())
    if adapters.targets == ALL_LINEAR:
        last = model.get_output_embeddings()
        chosen = [n for n, m in named.items() if isinstance(m, (nn.Linear, Conv1D)) and m is not last]
    else:
        chosen = [name for name in named if adapters.adapts(name)]
    _check(path, named, chosen, adapters)
    model.requires_grad_(False)
    for name in chosen:
        parent, _, child = name.rpartition(".")
        setattr(named[parent], child, Adapted(named[name], adapters))
    for name, module in named.items():
        if adapters.trains(name):
            module.requires_grad_(True)


def _check(path: str, named: dict[str, nn.Module], chosen: list[str], adapters: Adapters) -> None:
    products = sorted({n.rpartition(".")[2] for n, m in named.items() if isinstance(m, (nn.Linear, Conv1D))})
    for name in chosen:
        if not isinstance(named[name], (nn.Linear, Conv1D)):
            raise UnsupportedError(
                f"{path}: key 'target_modules' names {name!r}, a {type(named[name]).__name__}; adapters are supported "
                f"beside products: {', '.join(products)}"
            )
    names = () if isinstance(adapters.targets, str) else adapters.targets
    missing = [n for n in names if not any(found == n or found.endswith(f".{n}") for found in chosen)]
    if missing or not chosen:
        wrong = ", ".join(missing) or adapters.targets
        raise NetworkError(
            f"{path}: key 'target_modules' names {wrong}, which the network does not have; it has {', '.join(products)}"
        )
    lost = [n for n in adapters.saved if not any(found == n or found.endswith(f".{n}") for found in named)]
    if lost:
        raise NetworkError(
            f"{path}: key 'modules_to_save' names {', '.join(lost)}, which the network does not have; leave it out"
        )
