"""A function with a strategy: a module of its own, so that its operator has a path in the network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from simulator.errors import NetworkError


class ShardedCall(nn.Module):
    """Calls a function of tensors and changes nothing of it.

    It has to be an attribute of a module of the network, or its strategy would be for nothing.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.known = False
        """Whether a network has it among its modules."""

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """What the function returns."""
        if not self.known and any(isinstance(value, FakeTensor) for value in inputs):
            name = getattr(self.function, "__name__", repr(self.function))
            raise NetworkError(
                f"shard({name}, …) is called and no module of the network has it; keep it as an attribute, self.{name} "
                f"= planner.shard({name}, …), and call that"
            )
        return self.function(*inputs, **options)

    def extra_repr(self) -> str:
        """Name of the function."""
        return getattr(self.function, "__name__", repr(self.function))


def know_calls(network: nn.Module) -> None:
    """Let the calls with a strategy that a network has be called while it is captured."""
    for module in network.modules():
        if isinstance(module, ShardedCall):
            module.known = True
