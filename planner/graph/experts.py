"""What a graph says of its mixtures of experts."""

from __future__ import annotations

import math

from planner.graph.operator_graph import OperatorGraph
from simulator.errors import InputError
from simulator.program import Kernel

MOST_IMBALANCE = 1e3


def check_imbalance(ratio: float) -> float:
    """The ratio of the busiest rank's tokens to an even share; InputError where it is none."""
    if not (math.isfinite(ratio) and 1.0 <= ratio <= MOST_IMBALANCE):
        raise InputError(
            f"expert imbalance {ratio:g} is not between 1 and {MOST_IMBALANCE:g}: it is the tokens of the busiest rank "
            "of experts over an even share; use 1 where a router spreads them evenly"
        )
    return ratio


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
