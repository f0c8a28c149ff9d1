"""Values of a traced graph as specs and arguments, paths of its modules, and what does no work taken out."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from planner.graph.capture_errors import user_source
from planner.graph.chain import common_parts
from planner.graph.custom_operators import written_arguments, written_operator
from planner.graph.operator_graph import Argument, BatchSize, TensorRef, TensorSpec
from simulator.errors import NetworkError, UnsupportedError

NO_TENSOR = TensorSpec(shape=(0,), dtype="float32", batch_dims=(False,))
"""Stands for an output that the operator was told to leave out."""
_DROPPED_KEYWORDS = {"device", "layout", "pin_memory"}
_SIZED = {torch.ops.aten.view.default, torch.ops.aten.expand.default, torch.ops.aten.reshape.default}


@dataclass(frozen=True, slots=True)
class Recorder:
    """Translates fake tensors and arguments, given the prime that stands for the batch size."""

    marker: int

    def specs(self, value: Any) -> tuple[TensorSpec, ...]:
        """Specs of a node's outputs at batch 1."""
        values = value if isinstance(value, (tuple, list)) else (value,)
        return tuple(self._spec(item) if isinstance(item, Tensor) else NO_TENSOR for item in values)

    def _spec(self, value: Tensor) -> TensorSpec:
        grows = tuple(dim % self.marker == 0 and dim > 0 for dim in value.shape)
        return TensorSpec(
            shape=tuple(dim // self.marker if g else int(dim) for dim, g in zip(value.shape, grows, strict=True)),
            dtype=str(value.dtype).removeprefix("torch."),
            batch_dims=grows,
        )

    def arguments(
        self, node: fx.Node, index_of: Mapping[fx.Node, int]
    ) -> tuple[tuple[Argument, ...], tuple[tuple[str, Argument], ...]]:
        """Positional and keyword arguments of a call; sizes of views are explicit."""
        args = list(node.args)
        if node.target in _SIZED:
            args[1] = tuple(node.meta["val"].shape)
        keywords = sorted((k, v) for k, v in node.kwargs.items() if k not in _DROPPED_KEYWORDS and v is not None)
        return (
            tuple(self._argument(a, index_of) for a in args),
            tuple((k, self._argument(v, index_of)) for k, v in keywords),
        )

    def _argument(self, value: Any, index_of: Mapping[fx.Node, int]) -> Argument:
        if isinstance(value, fx.Node):
            return reference(value, index_of)
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(item, index_of) for item in value)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, (int, float)):
            whole = value != 0 and value == value and abs(value) != float("inf") and value % self.marker == 0
            return BatchSize(int(value) // self.marker) if whole else value
        if isinstance(value, (torch.dtype, torch.memory_format)):
            return str(value)
        if isinstance(value, (torch.device, torch.layout)):
            return None
        raise UnsupportedError(
            f"operator argument {value!r} of type {type(value).__name__} is not supported; use numbers"
        )


def reference(node: fx.Node, index_of: Mapping[fx.Node, int]) -> TensorRef:
    """Refer to a traced value; picking from a tuple becomes the output's number."""
    if node.target is operator.getitem:
        source, output = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(output, int)
        return TensorRef(index_of[source], output)
    return TensorRef(index_of[node])


_BLOCK = re.compile(r"^(?P<prefix>.*?)\.(?P<index>\d+)(?=\.|$)")
_REPEATED_CALL = re.compile(r"@\d+")
_ACCUMULATION = "Gradient addition node"


def is_backward(node: fx.Node) -> bool:
    """Whether a traced node belongs to the backward pass."""
    return str(node.meta.get("partitioner_tag", "")) == "is_backward"


def is_gradient_sum(node: fx.Node) -> bool:
    """Whether a traced node adds what several uses of one tensor send back."""
    return is_backward(node) and _ACCUMULATION in (node.meta.get("stack_trace") or "")


def block_of(path: str) -> str:
    """Path up to the outermost index, or "" if it has none.

    >>> block_of("layers.3.conv.0")
    'layers.3'
    """
    match = _BLOCK.match(path)
    return match[0] if match else ""


def module_paths(
    calls: Sequence[fx.Node], forward_of: Mapping[fx.Node, fx.Node], producers: Mapping[fx.Node, Sequence[fx.Node]]
) -> dict[fx.Node, str]:
    """Find the module path of every call.

    Torch knows it for most. A gradient sum goes to the block that completes it, a backward call to its
    forward call's module, and any other (made where torch keeps no record) to the only block that reads it.
    """
    paths: dict[fx.Node, str] = {}
    unknown: list[fx.Node] = []
    for node in calls:
        recorded = _recorded(node)
        if is_gradient_sum(node):
            paths[node] = _sum_path([paths.get(p, "") for p in producers[node]])
        elif recorded is not None:
            paths[node] = recorded
        elif node in forward_of:
            paths[node] = paths.get(forward_of[node], "")
        else:
            paths[node] = ""
            unknown.append(node)
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in calls:
        for producer in producers[node]:
            readers.setdefault(producer, []).append(node)
    for node in reversed(unknown):
        paths[node] = _reader_path([paths[reader] for reader in readers.get(node, [])])
    return paths


def _recorded(node: fx.Node) -> str | None:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    return _REPEATED_CALL.sub("", path)


def _sum_path(paths: Sequence[str]) -> str:
    common, block = ".".join(common_parts(paths)), block_of(paths[-1])
    return common if not block or (common + ".").startswith(block + ".") else block


def _reader_path(paths: Sequence[str]) -> str:
    blocks = {block_of(path) for path in paths}
    return ".".join(common_parts(paths)) if len(blocks) == 1 and "" not in blocks else ""


def unique_name(name: str, taken: dict[str, int]) -> str:
    """Return `name`, with ``.1``, ``.2``, … from its second use on, and remember it.

    >>> taken = {}
    >>> [unique_name("norm/add", taken) for _ in range(3)]
    ['norm/add', 'norm/add.1', 'norm/add.2']
    """
    count = taken.get(name, 0)
    taken[name] = count + 1
    return f"{name}.{count}" if count else name


aten = torch.ops.aten

_ALIASES = {
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
}
_CHECKS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
}
_RESHAPES = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default}


def clean(graph: fx.Graph, marker: int) -> dict[fx.Node, fx.Node]:
    """Simplify a joint graph in place; return what stands in for each node that was replaced.

    ``marker`` is the prime that stands for the batch size: a factor that is the inverse of one of its
    multiples becomes a division, so that it can follow the batch size.
    """
    _compute_constants(graph)
    replaced: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in _CHECKS:
            graph.erase_node(node)
            continue
        substitute = _substitute(node)
        if substitute is not None:
            node.replace_all_uses_with(substitute)
            replaced[node] = substitute
            graph.erase_node(node)
        elif node.target is aten._unsafe_view.default:
            node.target = aten.view.default
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar):
            _divide_by_batch(node, marker)
    _erase_dead(graph)
    return replaced


def _compute_constants(graph: fx.Graph) -> None:
    """Replace tensors written out in the module's code by calls that make them."""
    for node in graph.nodes:
        if node.op != "get_attr" or not node.users:
            continue
        value = getattr(graph.owning_module, str(node.target))
        place = user_source(node.meta.get("stack_trace") or "")
        with graph.inserting_before(node):
            made = graph.call_function(*constant_call(value, place))
        made.meta = {key: item for key, item in node.meta.items() if key != "seq_nr"}
        node.replace_all_uses_with(made)


MOST_WRITTEN = 1 << 18
"""Numbers of a tensor that a graph holds at most where they differ."""


def constant_call(value: Any, place: str = "") -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """The operator that makes a real tensor which code at `place` holds, with its arguments.

    Raises
    ------
    NetworkError
        It is no plain tensor, or so large that a graph should not hold its numbers.
    """
    plain = isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_complex()
    if plain and value.numel() and bool((value == value.flatten()[0]).all()):
        return aten.full.default, (list(value.shape), value.flatten()[0].item()), {"dtype": value.dtype}
    if plain and value.numel() <= MOST_WRITTEN:
        return written_operator(), written_arguments(value), {}
    what = f"its {value.numel():,} values are not all equal" if plain else "its values are not known"
    raise NetworkError(f"cannot capture the constant tensor at {place}: {what}; register it as a buffer of the module")


def _substitute(node: fx.Node) -> fx.Node | None:
    """Return the node whose value `node` repeats, if there is one."""
    if not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source = node.args[0]
    before, after = source.meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return None
    if node.target in _ALIASES:
        return source
    if node.target is aten.t.default and source.target is aten.t.default:
        inner = source.args[0]
        assert isinstance(inner, fx.Node)
        return inner
    if node.target in _RESHAPES and before.shape == after.shape:
        return source
    same = before.shape == after.shape and before.dtype == after.dtype
    if node.target is aten.clone.default and same and before.stride() == after.stride():
        return source
    return source if node.target is aten._to_copy.default and same else None


def _divide_by_batch(node: fx.Node, marker: int) -> None:
    factor: Any = node.args[1]
    if not isinstance(factor, float) or factor == 0.0:
        return
    multiple = 1.0 / (factor * marker)
    if multiple >= 0.5 and abs(multiple - round(multiple)) < 1e-9 * multiple:
        node.target = aten.div.Tensor
        node.args = (node.args[0], round(multiple) * marker)


def _erase_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
