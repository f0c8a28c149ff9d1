"""The identity of a network: equal for equal graphs, on any machine."""

from __future__ import annotations

import hashlib
import json

from planner.graph.operator_graph import OperatorGraph
from planner.graph.serialization import argument_to_json


def fingerprint(graph: OperatorGraph) -> str:
    """Digest operators, arguments, shapes at batch 1, parameters, inputs and runs; not names or source lines."""
    if graph.batch_size != 1:
        raise ValueError(f"a fingerprint is taken at batch 1, not {graph.batch_size}")
    digest = hashlib.sha256()
    for node in graph.nodes:
        record = (
            node.op,
            node.role,
            node.phase,
            argument_to_json(node.args),
            [[key, argument_to_json(value)] for key, value in node.kwargs],
            [[spec.shape, spec.dtype, spec.batch_dims] for spec in node.outputs],
            node.forward,
        )
        digest.update(json.dumps(record).encode())
    parameters = [
        [p.name, p.node, p.gradient and [p.gradient.node, p.gradient.output], p.aliases] for p in graph.parameters
    ]
    inputs = [[i.name, i.node, i.kind, i.high] for i in graph.inputs]
    runs = [[r.prefix, r.count, r.first, r.second] for r in graph.runs]
    digest.update(json.dumps([parameters, inputs, [graph.loss.node, graph.loss.output], runs]).encode())
    return digest.hexdigest()
