"""Tensors that wait for the backward pass, and which variables read them there."""

from __future__ import annotations

from collections.abc import Mapping

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.search.problem.variables import Decisions
from simulator.program import Kernel, Phase


def saved_tensors(graph: OperatorGraph, decisions: Decisions) -> dict[TensorRef, set[int]]:
    """Forward tensors that backward operators read, with the variables of those; views count as their base."""
    nodes = graph.nodes
    found: dict[TensorRef, set[int]] = {}
    for ref, users in graph.consumers.items():
        kept = nodes[ref.node].role is Role.OPERATOR and nodes[ref.node].phase is Phase.FORWARD
        readers = {decisions.of_node[u] for u in users if nodes[u].phase is Phase.BACKWARD} - {-1}
        if kept and readers:
            found[ref] = readers
    return {ref: readers for ref, readers in found.items() if not _is_view_of(graph, ref, found)}


def _is_view_of(graph: OperatorGraph, ref: TensorRef, saved: Mapping[TensorRef, set[int]]) -> bool:
    """Whether `ref` only views a tensor that is kept anyway: another saved one, a parameter or an input."""
    while graph.nodes[ref.node].kernel is Kernel.VIEW and graph.nodes[ref.node].role is Role.OPERATOR:
        ref = graph.nodes[ref.node].tensor_inputs[0]
        if ref in saved or graph.nodes[ref.node].role is not Role.OPERATOR:
            return True
    return False
