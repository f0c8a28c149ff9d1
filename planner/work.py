"""How much work and memory a local operator or an optimizer update takes: one count for search and lowering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import DTYPE_BYTES, Node, OperatorGraph
from simulator.errors import UnsupportedError
from simulator.program import Kernel

Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and moves for each trained number.

    ``states`` are float32 numbers kept beside the parameter; ``flops`` are those of one update.
    """

    name: str
    states: int
    flops: int


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(name="sgd", states=0, flops=2),
    "momentum": Optimizer(name="momentum", states=1, flops=4),
    "adam": Optimizer(name="adam", states=2, flops=12),
    "adamw": Optimizer(name="adamw", states=2, flops=14),
}


LOOKUPS: Mapping[str, int] = {"embedding": 0, "gather": 0, "index_select": 0, "nll_loss_forward": 0}
"""Operators that read only as much of one input as they return: its position."""

PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
"""Operators that multiply their last two inputs as matrices."""

SHAPE_ONLY: Mapping[str, int] = {"nll_loss_backward": 1}
"""Operators that need only the shape of one input: its position."""


def optimizer(name: str) -> Optimizer:
    """Look an optimizer up; raises UnsupportedError for one without an elementwise update."""
    if name not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise UnsupportedError(f"optimizer {name!r} is not supported yet; choose one of {known}")
    return OPTIMIZERS[name]


def state_bytes(update: Optimizer, dtype: str) -> int:
    """Bytes of optimizer state for each parameter element; low precision keeps a float32 copy as well."""
    size = max(4, DTYPE_BYTES[dtype])
    return update.states * size + (size if DTYPE_BYTES[dtype] < size else 0)


def update_traffic(update: Optimizer, dtype: str) -> int:
    """Bytes an update reads and writes for each element: parameter, gradient, and every state twice."""
    return 3 * DTYPE_BYTES[dtype] + 2 * state_bytes(update, dtype)


def traffic_bytes(graph: OperatorGraph, node: Node, shares: Sequence[Amount]) -> Amount:
    """Bytes a local operator reads and writes.

    Parameters
    ----------
    shares : sequence
        For each tensor input, then each output: the part of the tensor that is local.
    """
    total = shares[0] * 0.0
    if node.kernel is Kernel.VIEW:
        return total
    for size, share in zip(traffic_sizes(graph, node), shares, strict=True):
        total = total + share * size
    return total


def traffic_sizes(graph: OperatorGraph, node: Node) -> list[float]:
    """Bytes that an operator with whole tensors reads of each tensor input, then writes of each output."""
    inputs = node.tensor_inputs
    sizes = [float(graph.spec(ref).size_bytes) for ref in inputs]
    sizes += [float(spec.size_bytes) for spec in node.outputs]
    name = node.op.split(".")[1] if "." in node.op else ""
    if name in LOOKUPS:
        sizes[LOOKUPS[name]] = 0.0
        sizes[len(inputs)] *= 2
    elif name in SHAPE_ONLY:
        sizes[SHAPE_ONLY[name]] = 0.0
    return sizes


def product_shape(
    graph: OperatorGraph, node: Node, shares: Sequence[Amount], work: Amount
) -> tuple[Amount, Amount, Amount, Amount] | None:
    """Local batch, m, n and k of a matrix product; None for any other operator.

    Parameters
    ----------
    shares : sequence
        For each tensor input, then each output: the part of the tensor that is local.
    work : float or array
        The part of the multiplications that is local.
    """
    if not is_product(node):
        return None
    inputs = node.tensor_inputs
    left, right = graph.spec(inputs[-2]).shape, graph.spec(inputs[-1]).shape
    first, second, result = shares[len(inputs) - 2], shares[len(inputs) - 1], shares[len(inputs)]
    sizes = (float(prod(left[:-2])), float(left[-2]), float(right[-1]), float(left[-1]))
    return local_product(sizes, (first, second, result), work)


def is_product(node: Node) -> bool:
    """Whether an operator multiplies its last two inputs as matrices."""
    return node.kernel is Kernel.MATMUL and "." in node.op and node.op.split(".")[1] in PRODUCTS


def local_product(
    sizes: Sequence[Amount | float], shares: tuple[Amount, Amount, Amount], work: Amount
) -> tuple[Amount, Amount, Amount, Amount]:
    """Local batch, m, n and k of a matrix product.

    Parameters
    ----------
    sizes : sequence
        Batch, m, n and k of the whole product.
    shares : tuple
        Local parts of both factors and of the result.
    work : float or array
        The part of the multiplications that is local.
    """
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
