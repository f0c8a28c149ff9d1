"""Shapes of local kernels whose time depends on them: matrix products, convolutions, fused attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.graph.fusion import product_parts
from planner.graph.operator_graph import Node, OperatorGraph, TensorSpec
from simulator.program import CONVOLUTIONS, PRODUCTS, Kernel

Amount = TypeVar("Amount", float, NDArray[np.float64])
_MULTIPLYING = frozenset({"mm", "addmm", "bmm", "baddbmm", "scores", "weighted", "gathered"})
"""Operators that multiply their last two inputs as matrices."""
_LEFT_TRANSPOSED, _RIGHT_TRANSPOSED = frozenset({"gathered"}), frozenset({"scores"})
_BACKWARD_ATTENTION = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShape:
    """An operator's whole shape, in the order of `simulator.program.Task.shape`.

    ``growth`` says of each size with how many dims it grows with the batch. ``ports`` are the tensors whose local
    parts say which sizes are cut, counted over tensor inputs, then outputs: both factors and the result of the
    product that the operator comes to.
    """

    sizes: tuple[float, float, float, float]
    growth: tuple[int, int, int, int]
    ports: tuple[int, int, int]


def is_product(node: Node) -> bool:
    """Whether an operator multiplies its last two inputs as matrices, in a kernel that is its own."""
    return node.timed_as in PRODUCTS and _name(node) in _MULTIPLYING


def kernel_shape(graph: OperatorGraph, node: Node) -> KernelShape | None:
    """Shape of the whole operator; None where its time does not depend on it."""
    if is_product(node):
        return _product(graph, node)
    if node.kernel in CONVOLUTIONS and node.flops > 0:
        return _convolution(graph, node)
    if node.kernel is Kernel.ATTENTION and node.flops > 0:
        return _attention(graph, node)
    return None


def local_kernel(
    kernel: Kernel, sizes: Sequence[Amount | float], shares: tuple[Amount, Amount, Amount], work: Amount
) -> tuple[Amount, Amount, Amount, Amount]:
    """Local sizes of a kernel.

    Attention is cut into whole rows of scores, so that what is local counts as heads.

    Parameters
    ----------
    sizes : sequence
        Those of `KernelShape`.
    shares : tuple
        Local parts of the tensors that ``KernelShape.ports`` names.
    work : float or array
        The part of the operations that is local.
    """
    if kernel is Kernel.ATTENTION:
        heads, *others = sizes
        whole = work * 0.0
        queries, keys, head_size = (whole + other for other in others)
        return heads * work, queries, keys, head_size
    return _local_product(sizes, shares, work)


def _local_product(
    sizes: Sequence[Amount | float], shares: tuple[Amount, Amount, Amount], work: Amount
) -> tuple[Amount, Amount, Amount, Amount]:
    first, second, result = shares
    # With parts b, m, n, k of the four dims the tensors' shares are bmk, bkn and bmn, the work's is bmnk.
    batch = first * second * result / (work * work)
    parts = (
        batch,
        np.sqrt(first * result / (second * batch)),
        np.sqrt(second * result / (first * batch)),
        np.sqrt(first * second / (result * batch)),
    )
    # Rounded, so that no error of the roots begins another tile.
    b, m, n, k = (np.round(size * part, 6) for size, part in zip(sizes, parts, strict=True))
    return b, m, n, k


def _product(graph: OperatorGraph, node: Node) -> KernelShape:
    """Batch, m, n and k."""
    inputs = node.tensor_inputs
    left, right = graph.spec(inputs[-2]), graph.spec(inputs[-1])
    rows, depth = (-1, -2) if _name(node) in _LEFT_TRANSPOSED else (-2, -1)
    columns = -2 if _name(node) in _RIGHT_TRANSPOSED else -1
    filled = product_parts(node, node.moved) if node.moved else (1.0, 1.0, 1.0)
    return KernelShape(
        sizes=(
            float(prod(left.shape[:-2])),
            filled[0] * left.shape[rows],
            filled[1] * right.shape[columns],
            filled[2] * left.shape[depth],
        ),
        growth=(
            sum(left.batch_dims[:-2]),
            int(left.batch_dims[rows]),
            int(right.batch_dims[columns]),
            int(left.batch_dims[depth]),
        ),
        ports=(len(inputs) - 2, len(inputs) - 1, len(inputs)),
    )


def _convolution(graph: OperatorGraph, node: Node) -> KernelShape | None:
    """Groups, output positions, output channels of a group, input channels of a group times the window's area."""
    inputs = node.tensor_inputs
    if _name(node) == "convolution":
        image, weight, result = graph.spec(inputs[0]), graph.spec(inputs[1]), node.outputs[0]
        ports = (0, 1, len(inputs))
    else:
        result, image, weight = (graph.spec(ref) for ref in inputs[:3])
        ports = (1, 2, 0)
    channels, depth = result.shape[1], prod(weight.shape[1:])
    if weight.shape[0] != channels or not depth:
        return None  # Transposed: its weights are laid out by input channels.
    groups = image.shape[1] // weight.shape[1]
    positions = float(result.shape[0] * prod(result.shape[2:]))
    grows = result.batch_dims[0] + sum(result.batch_dims[2:])
    return KernelShape(
        sizes=(float(groups), positions, channels / groups, float(depth)), growth=(0, grows, 0, 0), ports=ports
    )


def _attention(graph: OperatorGraph, node: Node) -> KernelShape:
    """Heads of all sequences, queries, keys that a query attends to on average, head size."""
    inputs = node.tensor_inputs
    backward = "backward" in _name(node)
    query: TensorSpec = graph.spec(inputs[1] if backward else inputs[0])
    heads, queries, size = float(prod(query.shape[:-2])), float(query.shape[-2]), float(query.shape[-1])
    products = 4.0 * heads * queries * size * (_BACKWARD_ATTENTION if backward else 1.0)
    return KernelShape(
        sizes=(heads, queries, node.flops / products, size),
        growth=(sum(query.batch_dims[:-2]), 0, 0, 0),
        ports=(0, 1, len(inputs)),
    )


def _name(node: Node) -> str:
    return node.op.split(".")[1] if "." in node.op else ""
