"""A graph as JSON, and the identity of a network: equal for equal graphs, on any machine."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from planner.graph.operator_graph import (
    Argument,
    BatchSize,
    NetworkInput,
    Node,
    OperatorGraph,
    Parameter,
    Role,
    Run,
    TensorRef,
    TensorSpec,
)
from simulator.program import Kernel, Phase

FORMAT = 2
Json = Any


def graph_to_json(graph: OperatorGraph) -> dict[str, Json]:
    """Turn a graph into JSON values; equal specs are written once."""
    specs: dict[TensorSpec, int] = {}
    nodes = [_node_to_json(node, specs) for node in graph.nodes]
    return {
        "format": FORMAT,
        "network": graph.network,
        "fingerprint": graph.fingerprint,
        "batch_size": graph.batch_size,
        "specs": [[spec.shape, spec.dtype, [int(b) for b in spec.batch_dims]] for spec in specs],
        "nodes": nodes,
        "parameters": [
            [p.name, p.node, None if p.gradient is None else [p.gradient.node, p.gradient.output], p.aliases]
            for p in graph.parameters
        ],
        "inputs": [[i.name, i.node, i.kind, i.high] for i in graph.inputs],
        "loss": [graph.loss.node, graph.loss.output],
        "runs": [[r.prefix, r.count, r.first, r.second] for r in graph.runs],
        "notes": graph.notes,
        "fusion": graph.fusion,
    }


def graph_from_json(value: dict[str, Json]) -> OperatorGraph:
    """Read what `graph_to_json` wrote; anything else raises `ValueError`, `KeyError` or `TypeError`."""
    if value["format"] != FORMAT:
        raise ValueError(f"graph format {value['format']!r} is not {FORMAT}")
    specs = [TensorSpec(shape=tuple(s), dtype=d, batch_dims=tuple(map(bool, b))) for s, d, b in value["specs"]]
    return OperatorGraph(
        network=value["network"],
        fingerprint=value["fingerprint"],
        batch_size=value["batch_size"],
        nodes=tuple(_node_from_json(item, specs) for item in value["nodes"]),
        parameters=tuple(
            Parameter(name=name, node=node, gradient=None if ref is None else TensorRef(*ref), aliases=tuple(aliases))
            for name, node, ref, aliases in value["parameters"]
        ),
        inputs=tuple(NetworkInput(name=n, node=i, kind=k, high=h) for n, i, k, h in value["inputs"]),
        loss=TensorRef(*value["loss"]),
        runs=tuple(Run(prefix=p, count=c, first=tuple(f), second=tuple(s)) for p, c, f, s in value["runs"]),
        notes=tuple(value["notes"]),
        fusion=value["fusion"],
    )


def argument_to_json(argument: Argument) -> Json:
    """Turn an argument into JSON values; references and batch sizes become tagged objects."""
    if isinstance(argument, TensorRef):
        return {"t": [argument.node, argument.output]}
    if isinstance(argument, BatchSize):
        return {"b": argument.multiple}
    if isinstance(argument, tuple):
        return [argument_to_json(item) for item in argument]
    return argument


def _argument_from_json(value: Json) -> Argument:
    if isinstance(value, list):
        return tuple(_argument_from_json(item) for item in value)
    if isinstance(value, dict):
        return TensorRef(*value["t"]) if "t" in value else BatchSize(value["b"])
    return value  # type: ignore[no-any-return]


def _node_to_json(node: Node, specs: dict[TensorSpec, int]) -> list[Json]:
    return [
        node.name,
        node.op,
        node.role,
        node.phase,
        node.kernel,
        argument_to_json(node.args),
        [[key, argument_to_json(item)] for key, item in node.kwargs],
        [specs.setdefault(spec, len(specs)) for spec in node.outputs],
        node.forward,
        node.module,
        node.source,
        node.flops,
        node.moved,
    ]


def _node_from_json(item: list[Json], specs: list[TensorSpec]) -> Node:
    name, op, role, phase, kernel, args, kwargs, outputs, forward, module, source, flops, moved = item
    return Node(
        name=name,
        op=op,
        role=Role(role),
        phase=Phase(phase),
        kernel=Kernel(kernel),
        args=tuple(_argument_from_json(a) for a in args),
        kwargs=tuple((key, _argument_from_json(a)) for key, a in kwargs),
        outputs=tuple(specs[i] for i in outputs),
        forward=forward,
        module=module,
        source=source,
        flops=flops,
        moved=tuple(moved),
    )


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
