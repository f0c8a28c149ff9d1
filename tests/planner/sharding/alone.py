"""Operators run by one rank that meets no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from planner.graph.operator_graph import Node, OperatorGraph
from planner.sharding.local_call import Moment, Parts
from planner.sharding.local_operator import prepare


def call_operator(graph: OperatorGraph, node: Node, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run a whole operator on whole tensors.

    Every number, also those that depend on the batch, is that of `graph`.
    """
    return prepare(graph, node, (), (), ())(tensors, Alone())


class Alone:
    """The peers of a rank that meets none."""

    def __init__(self) -> None:
        self.moment = Moment()

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the tensor: there is nothing to add."""
        return tensor

    def largest(self, tensor: Tensor, axis: int) -> Tensor:
        """Return the tensor: there is nothing to compare it with."""
        return tensor

    def pass_on(self, tensors: Parts, axis: int) -> Callable[[], Parts]:
        """Get one's own tensors back."""
        return lambda: tensors

    def exchange(self, tensors: Parts, axis: int, split: int, join: int, *, all_to_all: bool = True) -> Parts:
        """Keep all pieces."""
        return tensors
