"""What stays in float32 where a network trains in half the width: the statistics of root-mean-square norms.

Squares, their mean and the cube of its inverse root in the derivative leave the range of float16 and have few digits in
bfloat16, so every implementation of these norms computes them in float32 (Zhang and Sennrich, arXiv:1910.07467, name no
format; torch's ``rms_norm`` and the published modules of Llama widen their input). Kernels read narrow numbers and
write narrow numbers all the same: nothing of a layer's size that is kept for the backward pass grows.
"""

from __future__ import annotations

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from simulator.program import Kernel, Phase

INVERSE_ROOT = "aten.rsqrt.default"
"""A module that calls this operator itself is such a norm."""
STEPWISE = frozenset({Kernel.ELEMENTWISE, Kernel.REDUCTION, Kernel.COPY, Kernel.VIEW})


def wide_nodes(graph: OperatorGraph) -> frozenset[int]:
    """Nodes whose results stay in float32, by number, of a graph captured in float32.

    Forward these are the inverse root and what only leads to it. Backward, what computes the gradients of those,
    up to the operators whose results the rest of the network reads.
    """
    norms = {node.module for node in graph.nodes if node.op == INVERSE_ROOT and node.role is Role.OPERATOR}
    if not norms:
        return frozenset()
    inside = [
        index
        for index, node in enumerate(graph.nodes)
        if node.role is Role.OPERATOR and node.module in norms and node.kernel in STEPWISE
    ]
    forward: set[int] = set()
    for index in reversed(inside):
        node = graph.nodes[index]
        if node.phase is Phase.FORWARD:
            readers = [user for user in _readers(graph, index) if graph.nodes[user].phase is Phase.FORWARD]
            if node.op == INVERSE_ROOT or (readers and forward.issuperset(readers)):
                forward.add(index)
    backward: set[int] = set()
    """Backward, what reads numbers in float32, or narrow ones as if they were."""
    for index in reversed(inside):
        node = graph.nodes[index]
        if node.phase is Phase.BACKWARD and (node.forward in forward or _only_for(graph, index, backward)):
            backward.add(index)
    return frozenset(forward | {index for index in backward if _only_for(graph, index, backward)})


def _only_for(graph: OperatorGraph, index: int, users: set[int]) -> bool:
    readers = _readers(graph, index)
    return bool(readers) and users.issuperset(readers)


def _readers(graph: OperatorGraph, index: int) -> list[int]:
    outputs = range(len(graph.nodes[index].outputs))
    return [user for output in outputs for user in graph.consumers.get(TensorRef(index, output), ())]
