"""The whole step as a program: a chain of segments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.graph.operator_graph import OperatorGraph
from planner.instructions import (
    LoweredInput,
    LoweredPlan,
    StoredParameter,
)
from planner.lowering.body import Body
from planner.lowering.placed import LoweringOptions, PlacedGraph
from planner.lowering.replicas import data_axis, replicated_rules, with_replicas
from planner.lowering.segment import SegmentWriter
from planner.strategy.plan import NodeRules
from simulator.program import (
    Program,
    ProgramAxis,
    Segment,
)


def spread(
    graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions
) -> tuple[LoweringOptions, Mapping[str, NodeRules]]:
    """Options and rules with the data axis split where only a part of it shares shards."""
    place = data_axis(options.mesh)
    if not options.shard_size or (place is not None and options.mesh.axes[place].size == options.shard_size):
        return options, rules
    mesh = with_replicas(options.mesh, options.shard_size)
    return replace(options, mesh=mesh, shard_size=0), replicated_rules(graph, rules, options.mesh)


def lower_graph(graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions) -> LoweredPlan:
    """Lower an unfolded graph with the strategies of its nodes, by name.

    Every tensor is redistributed at most once to each placement, from the version at hand that is
    cheapest to start from.
    """
    options, rules = spread(graph, rules, options)
    source = PlacedGraph(graph, rules, options)
    count = options.micro_batches
    kinds = [(True, True, 1)] if count == 1 else [(True, False, 1), (False, False, count - 2), (False, True, 1)]
    segments, instructions = [], []
    body = Body(source)
    for first, last, repeat in kinds:
        if repeat:
            writer = SegmentWriter(source, body, first=first, last=last)
            tasks, made = writer.write()
            name = "step" if first and last else "first" if first else "last" if last else "middle"
            segments.append(Segment(name=name, tasks=tasks, count=repeat))
            instructions.append(made)
    program = Program(
        name=graph.network,
        devices=options.mesh.size,
        axes=tuple(
            ProgramAxis(name=a.name, size=a.size, stride=options.mesh.stride(i))
            for i, a in enumerate(options.mesh.axes)
        ),
        segments=tuple(segments),
        resident=tuple(source.resident()),
    )
    return LoweredPlan(
        graph=graph,
        mesh=options.mesh,
        program=program,
        instructions=tuple(instructions),
        parameters=tuple(
            StoredParameter(name=p.name, value=graph.nodes[p.node].name, placements=source.stored[p.node])
            for p in graph.parameters
        ),
        inputs=tuple(
            LoweredInput(name=i.name, value=graph.nodes[i.node].name, placements=source.stored[i.node])
            for i in graph.inputs
        ),
        loss=source.loss_value,
        micro_batches=count,
    )
