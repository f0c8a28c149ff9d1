"""From a module to torch's joint forward-and-backward graph, on fake tensors."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from planner.graph.capture_errors import capture_error, user_source
from planner.graph.custom_operators import dropout_operator
from simulator.errors import NetworkError
from simulator.torch_versions import (
    shapes_of_weight_norm_gradients,
    untried_torch,
    whole_silu_gradients,
    zeros_beside_source,
)

Module = TypeVar("Module", bound=nn.Module)
MOST_PARAMETERS = 10_000
"""About as many as are traced in ten minutes on one core: a layer takes torch some 50 ms."""
MARKERS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049, 1051, 1061, 1063, 1069)
"""Primes to stand for the batch size: a dim that one of them divides is a batch dim."""

aten = torch.ops.aten


class Input(Protocol):
    """What tracing needs to know of a batch tensor; the batch dim comes before ``shape``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dims without the batch."""

    @property
    def dtype(self) -> str:
        """Element type, such as ``"float32"``."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A joint graph with the prime that stands for its batch size and the parameters' names.

    ``names`` lists the names of each parameter, tied ones together, in the module's order.
    """

    graph: fx.Graph
    marker: int
    names: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]


def trace(
    make: Callable[[], nn.Module], inputs: Sequence[Input], network: str, markers: Sequence[int] = MARKERS
) -> Trace:
    """Export the module that `make` returns and trace its loss forward and backward.

    Parameters and inputs are fake tensors: only their shapes exist.
    """
    with _quiet(), FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        module = make()
        count = sum(1 for _ in module.parameters())
        if count > MOST_PARAMETERS:
            raise NetworkError(
                f"network {network!r} has {count:,} parameters in layers that do not repeat, and at most "
                f"{MOST_PARAMETERS:,} are traced; put equal layers into one list of blocks, or stack their parameters"
            )
        _normalise(module)
        notes = _without_running_statistics(module) + _without_stochastic_depth(module)
        marker = _choose_marker(module, inputs, network, markers)
        example = tuple(torch.zeros(marker, *i.shape, dtype=getattr(torch, i.dtype)) for i in inputs)
        while True:
            try:
                exported = torch.export.export(module, example, strict=False)
                forward = exported.module()
                break
            except Exception as error:
                another = getattr(module, "another_form", None)
                if another is None or not another(error):
                    raise capture_error(network, error) from error
        _refuse_state(forward.graph, network)
        structure = exported.call_spec.out_spec
        if structure is not None and not structure.is_leaf():
            raise NetworkError(
                f"network {network!r} returns a {structure.type.__name__}; "
                "its forward pass must return one scalar, the mean loss"
            )
        notes += _prepare(forward)
        shapes_of_weight_norm_gradients()
        try:
            with ExitStack() as stack, whole_silu_gradients():
                joint = aot_export_joint_with_descriptors(stack, forward, example).graph_module
        except Exception as error:
            raise capture_error(network, error) from error
    zeros_beside_source(joint.graph)
    return Trace(graph=joint.graph, marker=marker, names=_parameter_names(module), notes=(*notes, *untried_torch()))


def unmaterialised(make: Callable[[], Module]) -> Module:
    """Make a module, and while a network is traced do so on the meta device.

    There, tensors that a constructor puts on the CPU by name are real, so that it may read numbers from them; where it
    reads other ones, those that count are real too. `trace` replaces those of the meta device.
    """
    if detect_fake_mode() is None:
        return make()
    with unset_fake_temporarily(), torch.device("meta"):
        try:
            return make()
        except (NotImplementedError, RuntimeError) as error:
            if "meta tensor" not in str(error):
                raise
        with _CountsAreReal():
            return make()


class _CountsAreReal(TorchFunctionMode):
    """Makes counting tensors on the CPU, whatever the device of others."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function of torch."""
        kwargs = dict(kwargs or {})
        if func in (torch.arange, torch.linspace, torch.tensor) and kwargs.get("device") is None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's own account of a failure off the terminal: the error raised says what matters."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(StringIO()), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _refuse_state(graph: fx.Graph, network: str) -> None:
    for node in graph.nodes:
        in_place = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
        target = node.args[0] if in_place and node.args else None
        if isinstance(target, fx.Node) and target.op == "get_attr":
            place = user_source(node.meta.get("stack_trace") or "")
            raise NetworkError(
                f"network {network!r} cannot be captured: {node.target} at {place} changes {target.target!r}; "
                "a training step keeps no state besides parameters: remove the assignment"
            )


def _normalise(module: nn.Module) -> None:
    """Let every tensor of a module be float32 (or whole numbers) on the CPU, tied ones still tied."""
    made: dict[int, Tensor] = {}

    def replacement(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            empty = torch.empty(tensor.shape, dtype=dtype, device="cpu")
            trained = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if trained else empty
        return made[id(tensor)]

    for child in module.modules():
        for tensors in (child._parameters, child._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor.device.type != "cpu" or (tensor.is_floating_point() and tensor.dtype != torch.float32):
                    tensors[name] = replacement(tensor)  # type: ignore[assignment]


def _parameter_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values())


def _choose_marker(module: nn.Module, inputs: Sequence[Input], network: str, markers: Sequence[int]) -> int:
    dims = {dim for tensor in (*module.parameters(), *module.buffers()) for dim in tensor.shape}
    dims |= {dim for spec in inputs for dim in spec.shape}
    for marker in markers:
        if all(dim % marker or dim == 0 for dim in dims):
            return marker
    raise NetworkError(f"network {network!r}: its dims are multiples of every prime in {MARKERS}; change one dim")


def _without_running_statistics(module: nn.Module) -> list[str]:
    """Let batch norm use the batch's statistics only, as training does; running ones would be state."""
    found = False
    for child in module.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.running_mean is not None:
            child.track_running_stats = False
            child.running_mean = child.running_var = child.num_batches_tracked = None
            found = True
    return ["batch norm keeps no running statistics: training uses those of the batch"] if found else []


def _without_stochastic_depth(module: nn.Module) -> list[str]:
    """Keep every block: which ones a step leaves out is drawn anew each time."""
    found = False
    for child in module.modules():
        if type(child).__name__.endswith(_STOCHASTIC_DEPTHS):
            for name in ("drop_prob", "p"):
                found |= bool(getattr(child, name, 0.0))
                if hasattr(child, name):
                    setattr(child, name, 0.0)
    return ["stochastic depth is left out"] if found else []


_STOCHASTIC_DEPTHS = ("DropPath", "StochasticDepth")
"""How names of its modules end: each library has its own."""


def _prepare(module: fx.GraphModule) -> list[str]:
    """Remove guards from an exported module, let dropout draw by place, and put losses and means in exact form."""
    notes: list[str] = []
    for node in list(module.graph.nodes):
        if node.op == "call_module" and not node.users:
            module.graph.erase_node(node)
        elif node.target in (aten.dropout.default, aten.dropout_.default) and node.args[1] and node.args[2]:
            node.args, node.target = node.args[:2], dropout_operator()
        elif node.target in _DROPOUTS:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
            if node.args[1]:
                notes.append(f"dropout ({node.args[1]}) is left out")
        elif node.target is aten.scaled_dot_product_attention.default:
            notes += _without_attention_dropout(node)
        elif node.target in _EXACT:
            node.target = _EXACT[node.target]
        elif _reduces_to_mean(node):
            node.args, node.target = (node.target, *node.args), _exact_reduction
    module.recompile()
    return list(dict.fromkeys(notes))


def _without_attention_dropout(node: fx.Node) -> list[str]:
    probability = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    if not probability:
        return []
    if len(node.args) > 4:
        node.update_arg(4, 0.0)
    else:
        node.update_kwarg("dropout_p", 0.0)
    return [f"dropout ({probability}) is left out"]


def _reduction_place(op: OpOverload) -> int:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("reduction") if "reduction" in names and op is not aten.ctc_loss.IntList else -1


def _reduces_to_mean(node: fx.Node) -> bool:
    place = _reduction_place(node.target) if isinstance(node.target, OpOverload) else -1
    if place < 0:
        return False
    given = node.args[place] if place < len(node.args) else node.kwargs.get("reduction", 1)
    return bool(given == 1)


def _exact_reduction(op: OpOverload, *args: Any, **kwargs: Any) -> Tensor:
    """Call an elementwise loss without its mean, and take the mean apart."""
    place = _reduction_place(op)
    if place < len(args):
        return _exact_mean(op(*args[:place], 0, *args[place + 1 :], **kwargs))
    return _exact_mean(op(*args, **{**kwargs, "reduction": 0}))


def _exact_mean(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return x.sum(dtype=dtype) / x.numel()


def _exact_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    plain = weight is None and label_smoothing == 0.0 and not labels.is_floating_point()
    if reduction != 1 or not plain:
        return aten.cross_entropy_loss.default(logits, labels, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]
    return _exact_nll(F.log_softmax(logits, dim=1 if logits.dim() > 1 else 0), labels, None, 1, ignore_index)


def _exact_nll(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
) -> Tensor:
    if reduction != 1 or weight is not None:
        return aten.nll_loss_nd.default(scores, labels, weight, reduction, ignore_index)  # type: ignore[no-any-return]
    return F.nll_loss(scores, labels, reduction="sum", ignore_index=ignore_index) / labels.numel()


def _exact_squared_error(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    difference = x - y
    squares = difference * difference
    return squares if reduction == 0 else squares.sum() if reduction == 2 else _exact_mean(squares)


def _exact_absolute_error(x: Tensor, y: Tensor, reduction: int = 1) -> Tensor:
    errors = (x - y).abs()
    return errors if reduction == 0 else errors.sum() if reduction == 2 else _exact_mean(errors)


_DROPOUTS = {
    *(aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default),
    *(aten.dropout_.default, aten.feature_dropout_.default, aten.alpha_dropout_.default),
}
_EXACT: dict[Any, Callable[..., Tensor]] = {
    aten.mean.default: _exact_mean,
    aten.cross_entropy_loss.default: _exact_cross_entropy,
    aten.nll_loss.default: _exact_nll,
    aten.nll_loss_nd.default: _exact_nll,
    aten.mse_loss.default: _exact_squared_error,
    aten.l1_loss.default: _exact_absolute_error,
}
"""Mean losses as a sum divided by a count: both stay exact when the batch is sharded."""
