"""What a graph says of its mixtures of experts."""

from __future__ import annotations

from planner.graph.operator_graph import OperatorGraph
from simulator.program import Kernel


def experts_of(graph: OperatorGraph) -> int:
    """Experts of the largest grouped product; 0 where there is none."""
    found = [
        graph.spec(node.tensor_inputs[-1]).shape[0]
        for node in graph.nodes
        if node.kernel is Kernel.MATMUL
        and "expert" in node.module
        and len(graph.spec(node.tensor_inputs[-1]).shape) == 3
    ]
    return max(found, default=0)


def experts_per_token(graph: OperatorGraph) -> int:
    """Experts that each token goes to, as routers choose them; 0 where no router says."""
    experts = experts_of(graph)
    found = [
        node.outputs[0].shape[-1]
        for node in graph.nodes
        if node.op == "aten.topk.default" and graph.spec(node.tensor_inputs[0]).shape[-1] == experts
    ]
    return max(found, default=0)
