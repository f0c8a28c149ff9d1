"""Networks from a user's Python function."""

from __future__ import annotations

import copy
import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from planner.graph.capture_errors import is_library, short_path
from planner.networks.inputs import InputSpec
from planner.networks.marks import marked_layerwise, marks_of
from planner.networks.network import Family, Network
from planner.networks.sharded_call import know_calls
from simulator.errors import InputError, NetworkError

CONTRACT = (
    "return (module, inputs), where module(*inputs) is the scalar mean loss, or (module, inputs, loss), "
    "where the loss is loss(module(*inputs[:-1]), inputs[-1]); inputs are tensors with the batch as dim 0, or a dict "
    "of them by the names of the forward pass"
)


IN_MEMORY = "module"
"""Source of a network that only this process has."""


class WithLoss(nn.Module):
    """A module with its loss: the last input is what the loss compares the output with."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.module = module
        self.loss = loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """Loss of the inputs."""
        return self.loss(self.module(*inputs[:-1]), inputs[-1])


class Named(nn.Module):
    """A module whose inputs have names; where its forward pass returns an object with a loss, that is the result."""

    def __init__(self, module: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.module = module
        self.names = names

    def forward(self, *inputs: Tensor) -> Any:
        """Result for inputs in the order of the names."""
        found = self.module(**dict(zip(self.names, inputs, strict=True)))
        loss = None if isinstance(found, Tensor) else getattr(found, "loss", None)
        return found if loss is None else loss


def factory(place: str, sequence_length: int | None) -> tuple[Callable[[], Network], Callable[[int | None], nn.Module]]:
    """What describes the network of the factory ``MODULE:FACTORY`` by calling it, and what makes its module.

    The current directory is searched. Shapes come from the example inputs, whose batch size does not matter.
    """
    module_name, _, factory_name = place.partition(":")

    def called() -> tuple[nn.Module, tuple[Tensor, ...]]:
        return _call(place, _find(module_name, factory_name))

    def look() -> Network:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # drawn labels bound the classes, which must be the same in every process
            module, example = called()
        return described(f"py:{place}", factory_name, module, example, sequence_length, lambda: module)

    return look, lambda depth: called()[0]


def network_of(module: nn.Module, inputs: Any, loss: Callable[[Any, Tensor], Tensor] | None = None) -> Network:
    """Describe a module of this process; its graph is captured of copies, so that it stays as it is.

    Raises
    ------
    NetworkError
        Inputs or loss are not as a factory returns them.
    """
    place = f"{IN_MEMORY}:{type(module).__name__}"
    given = (module, inputs) if loss is None else (module, inputs, loss)
    whole, example = _call(place, lambda: given)

    def copied() -> nn.Module:
        with unset_fake_temporarily():
            return copy.deepcopy(whole)

    return replace(described(f"py:{place}", type(module).__name__, whole, example, None, copied), spec=place)


def described(
    spec: str,
    name: str,
    module: nn.Module,
    example: tuple[Tensor, ...],
    sequence_length: int | None,
    make: Callable[[], nn.Module],
) -> Network:
    """Describe the network of a module whose shapes are those of example inputs; ``make`` makes the module anew."""
    inputs = tuple(_describe(spec, i, len(example), tensor) for i, tensor in enumerate(example))
    _check_batch(spec, example)
    _check_length(spec, inputs, sequence_length)
    parameters = sum(p.numel() for p in module.parameters())
    family = _family(inputs)
    return Network(
        name=name,
        spec=spec,
        family=family,
        description=f"{type(module).__name__} of {parameters:,} parameters from {spec.partition(':')[2]}",
        default_global_batch=example[0].shape[0],
        default_optimizer="adamw" if family == "language" else "sgd",
        sequence_length=inputs[0].shape[0] if family == "language" else None,
        inputs=inputs,
        make=lambda depth: make(),
        marks=marks_of(module),
        layerwise=marked_layerwise(module),
    )


def _find(module_name: str, factory_name: str) -> Callable[[], Any]:
    spec = f"py:{module_name}:{factory_name}"
    if not module_name or not factory_name:
        raise NetworkError(
            f"network {spec.removesuffix(':')!r} is incomplete; write py:MODULE:FACTORY, such as py:my_network:make"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.startswith(error.name):
            raise NetworkError(
                f"network {spec!r}: no module {error.name!r} in {here} or installed; check the name"
            ) from error
        raise NetworkError(f"network {spec!r}: {module_name} needs module {error.name!r}; install it") from error
    except (Exception, SystemExit) as error:
        raise NetworkError(f"network {spec!r}: importing {module_name} fails: {_failure(error)}; correct it") from error
    factory = getattr(module, factory_name, None)
    if not callable(factory):
        found = ", ".join(sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_")))
        raise NetworkError(
            f"network {spec!r}: {module_name} has no function {factory_name!r}; it has {found or 'none'}"
        )
    return factory  # type: ignore[no-any-return]


def _call(place: str, factory: Callable[[], Any]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    try:
        with unset_fake_temporarily():
            result = factory()
    except (Exception, SystemExit) as error:
        raise NetworkError(f"network 'py:{place}': the factory fails: {_failure(error)}; correct it") from error
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3) or not isinstance(result[0], nn.Module):
        raise NetworkError(f"network 'py:{place}': the factory returns {_kind(result)}; it must {CONTRACT}")
    module, inputs = result[0], result[1]
    know_calls(module)
    inputs = (inputs,) if isinstance(inputs, Tensor) else inputs
    names = tuple(inputs) if isinstance(inputs, Mapping) else ()
    inputs = tuple(inputs.values()) if isinstance(inputs, Mapping) else inputs
    if not isinstance(inputs, (tuple, list)) or not inputs or not all(isinstance(i, Tensor) for i in inputs):
        raise NetworkError(f"network 'py:{place}': the factory's inputs are {_kind(inputs)}; it must {CONTRACT}")
    if not all(isinstance(name, str) for name in names):
        raise NetworkError(f"network 'py:{place}': the factory's inputs have the names {names}; it must {CONTRACT}")
    if names:
        module = Named(module, names if len(result) == 2 else names[:-1])
    if len(result) == 2:
        return module, tuple(inputs)
    if not callable(result[2]) or len(inputs) < 2:
        raise NetworkError(
            f"network 'py:{place}': the factory's loss is {_kind(result[2])} for {len(inputs)} inputs; "
            f"it must {CONTRACT}"
        )
    return WithLoss(module, result[2]), tuple(inputs)


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _failure(error: BaseException) -> str:
    """What was raised, and on which line of the user's; this module's own are none of them."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__} at {short_path(error.filename)}:{error.lineno}: {error.msg}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    frames = [f for f in frames if not is_library(f.filename)]
    place = f" at {short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}: {error}"


def _describe(spec: str, index: int, count: int, tensor: Tensor) -> InputSpec:
    if tensor.dim() == 0:
        raise NetworkError(f"network {spec!r}: input {index} is a scalar; every input has the batch as dim 0")
    whole = not tensor.is_floating_point()
    if whole and tensor.dtype not in (torch.int64, torch.int32):
        raise NetworkError(f"network {spec!r}: input {index} is {tensor.dtype}; use float32, int64 or int32")
    last = index == count - 1 and count > 1
    high = None
    if whole:
        kind = ("next_tokens" if tensor.dim() == 2 else "label") if last else "tokens"
        high = None if tensor.is_meta else int(tensor.max()) + 1
    else:
        kind = "target" if last else "image" if tensor.dim() == 4 else "features"
    dtype = str(tensor.dtype).removeprefix("torch.") if whole else "float32"
    return InputSpec(name=f"input_{index}", kind=kind, shape=tuple(tensor.shape[1:]), dtype=dtype, high=high)


def _check_batch(spec: str, example: tuple[Tensor, ...]) -> None:
    sizes = [tensor.shape[0] for tensor in example]
    if len(set(sizes)) != 1 or sizes[0] == 0:
        raise NetworkError(f"network {spec!r}: dim 0 of the inputs is {sizes}; it must be one batch size for all")


def _check_length(spec: str, inputs: tuple[InputSpec, ...], sequence_length: int | None) -> None:
    lengths = [i.shape[0] for i in inputs if i.kind in ("tokens", "next_tokens") and i.shape]
    if sequence_length is not None and set(lengths) != {sequence_length}:
        found = f"tokens of lengths {lengths}" if lengths else "no tokens"
        raise InputError(
            f"network {spec!r} has {found} in its example inputs, not {sequence_length}; change the example inputs"
        )


def _family(inputs: tuple[InputSpec, ...]) -> Family:
    kinds = {i.kind for i in inputs}
    return "language" if "tokens" in kinds else "image" if "image" in kinds else "features"
