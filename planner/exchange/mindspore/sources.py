"""What a network may be given as: a specification, a factory, or a module with its inputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from simulator.errors import ContextError

if TYPE_CHECKING:
    from planner.networks.network import Network

    Source: TypeAlias = str | Network


FORMS = (
    "a specification such as 'zoo:gpt2', a factory that returns (module, inputs) or (module, inputs, loss), or a "
    "torch.nn.Module with inputs"
)


def source_of(network: Any, inputs: Any = None, loss: Any = None) -> str | Network:
    """The specification of a network, or the network itself where only this process has it.

    Raises
    ------
    ContextError
        It is none of these, or inputs are missing, or given where they are not wanted.
    """
    if callable(getattr(network, "named_modules", None)) and not isinstance(network, type):
        return _of_module(network, inputs, loss)
    if inputs is not None or loss is not None:
        raise ContextError(
            "inputs and loss go with a module; a specification or a factory brings its own: leave them out"
        )
    if isinstance(network, str) and network:
        return network
    if callable(network) and not isinstance(network, type):
        return _of_factory(network)
    raise ContextError(f"network {network!r:.80} is of type {type(network).__name__}; give {FORMS}")


def _of_factory(factory: Callable[..., Any]) -> str:
    """The specification with which any process finds a function of a module."""
    name, module = getattr(factory, "__qualname__", ""), getattr(factory, "__module__", "")
    if not name.isidentifier():
        raise ContextError(
            f"network {name or factory!r} is no function of a module, so that other processes cannot find it; define "
            "the factory at the top of a file"
        )
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise ContextError(f"network {name!r} was typed in; write the factory to a file and import it from there")
        module = Path(file).stem
    return f"py:{module}:{name}"


def _of_module(module: Any, inputs: Any, loss: Any) -> Network:
    from planner.networks.python_factory import network_of

    if inputs is None:
        raise ContextError(
            f"network {type(module).__name__} is a module, and its inputs are missing; give example inputs, inputs=(x, "
            "y), with the batch as dim 0"
        )
    return network_of(module, inputs, loss)
