"""Graphs of one operator, for operators and shapes that the small networks do not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.graph.operator_graph import Argument, Node, OperatorGraph, Role, TensorRef, TensorSpec
from planner.sharding.local_call import operator
from simulator.program import Kernel, Phase
from simulator.torch_versions import shapes_of_weight_norm_gradients


@dataclass(frozen=True)
class Given:
    """A tensor argument; `batch` is the dim that grows with the batch."""

    shape: tuple[int, ...]
    dtype: str = "float64"
    batch: int | None = None


def indices(*shape: int) -> Given:
    return Given(shape, "int64")


def one_node(op: str, *args: Any, batch_output: int | None = None, **kwargs: Any) -> tuple[OperatorGraph, Node]:
    """Graph of one call; output specs come from a run on the meta device."""
    nodes: list[Node] = []

    def record(value: Any) -> Argument:
        if isinstance(value, list | tuple):
            return tuple(record(item) for item in value)
        if not isinstance(value, Given):
            return str(value) if isinstance(value, torch.dtype) else value
        dims = tuple(d == value.batch for d in range(len(value.shape)))
        spec = TensorSpec(shape=value.shape, dtype=value.dtype, batch_dims=dims)
        nodes.append(_node(f"input{len(nodes)}", "input", Role.INPUT, (), (), (spec,)))
        return TensorRef(len(nodes) - 1)

    arguments = tuple(record(value) for value in args)
    keywords = tuple((name, record(value)) for name, value in kwargs.items())
    shapes_of_weight_norm_gradients()
    result = operator(op)(*map(_meta, args), **{name: _meta(value) for name, value in kwargs.items()})
    results = (result,) if isinstance(result, Tensor) else tuple(result)
    nodes.append(_node("node", op, Role.OPERATOR, arguments, keywords, tuple(_spec(r, batch_output) for r in results)))
    graph = OperatorGraph(
        network="one", fingerprint="", batch_size=8, nodes=tuple(nodes), parameters=(), inputs=(), loss=TensorRef(0)
    )
    return graph, nodes[-1]


def _node(
    name: str,
    op: str,
    role: Role,
    args: tuple[Argument, ...],
    kwargs: tuple[tuple[str, Argument], ...],
    outputs: tuple[TensorSpec, ...],
) -> Node:
    return Node(
        name=name,
        op=op,
        role=role,
        phase=Phase.FORWARD,
        kernel=Kernel.ELEMENTWISE,
        args=args,
        kwargs=kwargs,
        outputs=outputs,
    )


def _spec(result: Tensor | None, batch: int | None) -> TensorSpec:
    if result is None:
        return TensorSpec(shape=(0,), dtype="float64", batch_dims=(False,))
    dims = tuple(d == batch for d in range(result.ndim))
    return TensorSpec(shape=tuple(result.shape), dtype=str(result.dtype).removeprefix("torch."), batch_dims=dims)


def _meta(value: Any) -> Any:
    if isinstance(value, Given):
        return torch.empty(value.shape, dtype=getattr(torch, value.dtype), device="meta")
    if isinstance(value, list | tuple):
        return [_meta(item) for item in value]
    return value
