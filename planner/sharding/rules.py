"""Which placements an operator may take along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.operator_graph import Node, OperatorGraph
from planner.sharding.placement import Placement


@dataclass(frozen=True, slots=True)
class Rule:
    """One strategy of an operator along one mesh axis.

    ``inputs`` are aligned with ``Node.tensor_inputs``, ``outputs`` with ``Node.outputs``.
    ``splits_work`` says that each rank does 1/size of the operator's work. ``reduced_elements`` is
    the number of elements that are all-reduced inside the operator (synchronised batch norm).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    splits_work: bool
    reduced_elements: int = 0


def rules_for(graph: OperatorGraph, node: Node) -> tuple[Rule, ...]:
    """List the rules of `node`, the fully replicated one first."""
    raise NotImplementedError


def has_rule(op: str) -> bool:
    """Whether `op` has rules of its own; if not it is replicated, and callers must say so."""
    raise NotImplementedError
