"""Removing from a traced graph what does no work: aliases, double transposes, views to the same shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from planner.graph.capture_errors import user_source
from simulator.errors import NetworkError

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
        if not isinstance(value, Tensor) or value.numel() == 0 or not bool((value == value.flatten()[0]).all()):
            place = user_source(node.meta.get("stack_trace") or "")
            raise NetworkError(
                f"cannot capture the constant tensor at {place}: its {value.numel()} values are not all equal; "
                "register it as a buffer of the module"
            )
        with graph.inserting_before(node):
            made = graph.call_function(
                aten.full.default, (list(value.shape), value.flatten()[0].item()), {"dtype": value.dtype}
            )
        made.meta = {key: item for key, item in node.meta.items() if key != "seq_nr"}
        node.replace_all_uses_with(made)


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
