"""The whole step as a program: a chain of segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.blueprint import Blueprint
from planner.lowering.instructions import (
    LoweredPlan,
    StoredParameter,
)
from planner.lowering.placed import LoweringOptions, PlacedGraph
from planner.lowering.replicas import data_axis, replicated_rules, with_replicas
from planner.lowering.resolved import step_columns
from planner.lowering.segment import SegmentWriter
from planner.lowering.start import start_instructions
from planner.lowering.turns import more_batches
from planner.lowering.writer import finished
from planner.plans.plan import NodeRules
from simulator.columns import KINDS, ProgramColumns, SegmentColumns
from simulator.program import (
    Buffer,
    Program,
    ProgramAxis,
    Segment,
    Task,
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


def lower_step(blueprint: Blueprint) -> ProgramColumns:
    """The step of a blueprint in columns; raises UnalikeError where it cannot stand for the whole network."""
    mesh, count = blueprint.source.options.mesh, blueprint.source.options.micro_batches
    kinds = [(True, True, 1)] if count == 1 else [(True, False, 1), (False, False, count - 2), (False, True, 1)]
    writers = []
    for first, last, repeat in kinds:
        if repeat:
            writer = SegmentWriter(blueprint, first=first, last=last)
            writer.write()
            name = "step" if first and last else "first" if first else "last" if last else "middle"
            writers.append((name, repeat, writer))
    axes = tuple(ProgramAxis(name=a.name, size=a.size, stride=mesh.stride(i)) for i, a in enumerate(mesh.axes))
    return step_columns(blueprint, writers, mesh.size, axes)


def lower_graph(graph: OperatorGraph, rules: Mapping[str, NodeRules], options: LoweringOptions) -> LoweredPlan:
    """Lower an unfolded graph with the strategies of its nodes, by name.

    Every tensor is redistributed at most once to each placement, from the version at hand that is
    cheapest to start from.
    """
    options, rules = spread(graph, rules, options)
    source = PlacedGraph(graph, rules, options, chain(graph))
    blueprint = Blueprint(source)
    columns = lower_step(blueprint)
    program = Program(
        name=graph.network,
        devices=columns.devices,
        axes=columns.axes,
        segments=tuple(
            Segment(name=segment.name, tasks=written_out(segment, blueprint.names), count=segment.count)
            for segment in columns.segments
        ),
        resident=(*source.resident(), *more_batches(source)),
    )
    return LoweredPlan(
        graph=graph,
        mesh=options.mesh,
        program=program,
        instructions=tuple(
            tuple([blueprint.instructions[draft] for draft in segment.which.tolist()]) for segment in columns.segments
        ),
        parameters=tuple(
            StoredParameter(name=p.name, value=graph.nodes[p.node].name, placements=source.stored[p.node])
            for p in graph.parameters
        ),
        inputs=source.inputs(range(len(graph.nodes))),
        loss=source.loss_value,
        micro_batches=options.micro_batches * options.copies,
        offload_optimizer=options.offload_optimizer,
        offload_to=options.offload_to,
        disk_parameters=source.on_disk(),
        host_parameters=tuple(graph.nodes[index].name for index in sorted(source.host.parameters | source.away)),
        start=start_instructions(source, [parameter.node for parameter in graph.parameters]),
        copies=options.copies,
    )


def written_out(segment: SegmentColumns, buffers: Sequence[str]) -> tuple[Task, ...]:
    """The tasks of a segment, each with what it waits for and its buffers."""
    allocates: list[list[Buffer]] = [[] for _ in range(segment.size)]
    releases: list[list[str]] = [[] for _ in range(segment.size)]
    given = segment.changes
    columns = (given.row, given.sign, given.buffer, given.size_bytes, given.kind)
    for row, sign, buffer, size, kind in zip(*(column.tolist() for column in columns), strict=True):
        if sign > 0:
            allocates[row].append(Buffer(name=buffers[buffer], size_bytes=size, kind=KINDS[kind]))
        else:
            releases[row].append(buffers[buffer])
    dependencies = segment.dependencies.tolist()
    return tuple([
        finished(
            segment.tasks[draft],
            after=tuple(dependencies[begin:end]),
            allocates=tuple(allocates[row]),
            releases=tuple(releases[row]),
        )
        for row, (draft, (begin, end)) in enumerate(
            zip(segment.which.tolist(), pairwise(segment.dependency_offsets.tolist()), strict=True)
        )
    ])  # fmt: skip
