"""Accepts a network as a specification, a factory, a transformers model or a module."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from planner.graph import cache
from planner.networks.marks import is_module
from simulator.errors import ContextError

if TYPE_CHECKING:
    from planner.networks.network import Network

    Source: TypeAlias = str | Network


FORMS = (
    "a specification such as 'zoo:gpt2', a configuration or model of transformers, a factory that returns "
    "(module, inputs) or (module, inputs, loss), or a torch.nn.Module with inputs"
)


def source_of(network: Any, inputs: Any = None, loss: Any = None) -> str | Network:
    """Return the specification of a network, or the network itself where only this process has it.

    A configuration of transformers, or a model without `inputs`, is written to a ``config.json`` in the cache folder
    and named by ``hf:``, so that strategy files and other processes find it.

    Raises
    ------
    ContextError
        The network has none of the known forms, or inputs are missing or not wanted.
    """
    if inputs is None and loss is None and (config := _transformers_config(network)) is not None:
        return _stored_config(config)
    if is_module(network):
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


def _transformers_config(network: Any) -> Any:
    """Return the configuration of a transformers model, or one that is given itself; None for anything else."""
    if hasattr(network, "peft_config"):  # its adapters are trained, which the model's configuration does not say
        return None
    for found in (network, getattr(network, "config", None)):
        if callable(getattr(found, "to_diff_dict", None)) and bool(getattr(found, "model_type", None)):
            return found
    return None


def _stored_config(config: Any) -> str:
    text = json.dumps(config.to_diff_dict() | {"model_type": config.model_type}, indent=2, sort_keys=True, default=str)
    root = cache.folder() or Path(tempfile.gettempdir()) / "meshwright"
    folder = root / "configs" / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not (folder / "config.json").is_file():
        from simulator.whole_file import write_whole

        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.json", text + "\n")
    return f"hf:{folder}"


def _of_factory(factory: Callable[..., Any]) -> str:
    """Return the specification with which any process finds a function of a module."""
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
