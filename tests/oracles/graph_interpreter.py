"""Runs an operator graph on real tensors in one process, the plainest way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from planner.graph.operator_graph import Argument, BatchSize, Node, OperatorGraph, Role, TensorRef
from tests.planner.sharding.alone import call_operator


def run_graph(
    graph: OperatorGraph, module: nn.Module, inputs: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the loss and every parameter's gradient of an unfolded graph at its batch size."""
    named = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    values: list[tuple[Any, ...]] = []
    given = {item.node: tensor for item, tensor in zip(graph.inputs, inputs, strict=True)}
    with torch.no_grad():
        for index, node in enumerate(graph.nodes):
            if node.role is Role.INPUT:
                value: Any = given[index]
            elif node.op in ("parameter", "constant"):
                value = named[node.name].detach()
            else:
                value = _call(graph, node, values)
            outputs = value if isinstance(value, (tuple, list)) else (value,)
            _check(node, outputs)
            values.append(tuple(outputs))
    gradients = {
        p.name: None if p.gradient is None else values[p.gradient.node][p.gradient.output] for p in graph.parameters
    }
    return values[graph.loss.node][graph.loss.output], gradients


def autograd(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients as torch's own autograd gives them."""
    module.zero_grad(set_to_none=True)
    loss = module(*inputs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters()}


def random_inputs(graph: OperatorGraph, seed: int, bounds: Mapping[str, int] = {}) -> list[Tensor]:
    """Draw a batch of the graph's batch size."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for item in graph.inputs:
        spec = graph.nodes[item.node].outputs[0]
        if spec.dtype == "int64":
            tensors.append(torch.randint(item.high or bounds[item.name], spec.shape, generator=generator))
        else:
            tensors.append(torch.randn(spec.shape, dtype=getattr(torch, spec.dtype), generator=generator))
    return tensors


def assert_equals_autograd(
    graph: OperatorGraph, module: nn.Module, seed: int, *, rtol: float = 1e-10, atol: float = 1e-14
) -> None:
    """Loss and gradients of a graph in float64 are those of its module; the tolerances are of the gradients."""
    inputs = random_inputs(graph, seed)
    loss, gradients = autograd(module, inputs)
    graph_loss, graph_gradients = run_graph(graph, module, inputs)
    torch.testing.assert_close(graph_loss, loss, rtol=1e-12, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(graph_gradients[name], gradient, rtol=rtol, atol=atol)


def _call(graph: OperatorGraph, node: Node, values: list[tuple[Any, ...]]) -> Any:
    if node.op.startswith("meshwright."):
        return call_operator(graph, node, [values[ref.node][ref.output] for ref in node.tensor_inputs])
    namespace, name, overload = node.op.split(".")
    operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    args = [_resolve(argument, graph, values) for argument in node.args]
    kwargs = {key: _resolve(argument, graph, values) for key, argument in node.kwargs}
    if node.op == "aten.view.default":
        return args[0].reshape(args[1])
    return operator(*args, **kwargs)


def _resolve(argument: Argument, graph: OperatorGraph, values: list[tuple[Any, ...]]) -> Any:
    if isinstance(argument, TensorRef):
        return values[argument.node][argument.output]
    if isinstance(argument, BatchSize):
        return argument.multiple * graph.batch_size
    if isinstance(argument, tuple):
        return [_resolve(item, graph, values) for item in argument]
    if isinstance(argument, str) and argument.startswith("torch."):
        return getattr(torch, argument.removeprefix("torch."))
    return argument


def _check(node: Node, outputs: Sequence[Any]) -> None:
    for spec, value in zip(node.outputs, outputs, strict=True):
        if value is not None:
            found = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            assert found == (spec.shape, spec.dtype), f"{node.name}: {found} is not {spec}"
