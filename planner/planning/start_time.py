"""How long ranks send parameters before the first step: beside the step, which does not count it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from planner.graph.chain import chain
from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.options import lowering_options, spread
from planner.lowering.placed import PlacedGraph
from planner.lowering.sums import broadcasts
from planner.plans.plan import Plan, expanded_rules
from simulator.hardware import Hardware
from simulator.program import ProgramAxis
from simulator.timing import sharing_cores, task_times


def start_s(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> float:
    """Seconds before the first step of a plan, on the pipeline rank that sends longest; `graph` is folded or not."""
    if not plan.exchange.broadcast:
        return 0.0
    whole = unfold(graph)
    options, rules = spread(whole, expanded_rules(plan), lowering_options(plan, whole))
    source = PlacedGraph(whole, rules, options)
    return max(_seconds(source, nodes, hardware) for nodes in _of_ranks(plan, whole).values())


def _seconds(source: PlacedGraph, parameters: Iterable[int], hardware: Hardware) -> float:
    """Seconds of one message after the other: what a rank sends along an axis has come to it along those before."""
    tasks = [task for task, _ in broadcasts(source, parameters)]
    mesh = source.options.mesh
    axes = [ProgramAxis(name=a.name, size=a.size, stride=mesh.stride(i)) for i, a in enumerate(mesh.axes)]
    return float(task_times(tasks, axes, sharing_cores(hardware, mesh.size), mesh.size).sum())


def _of_ranks(plan: Plan, graph: OperatorGraph) -> Mapping[int, list[int]]:
    """Parameters by the pipeline rank that holds them, by their nodes."""
    if not plan.chunks:
        return {0: [parameter.node for parameter in graph.parameters]}
    units = chain(graph).units
    place = {unit.name: number for number, unit in enumerate(units)}
    trained = {parameter.node for parameter in graph.parameters}
    found: dict[int, dict[int, None]] = {}
    for chunk in plan.chunks:
        members = units[place[chunk.first] : place[chunk.last] + 1]
        held = found.setdefault(chunk.rank, {})
        held.update(dict.fromkeys(i for unit in members for i in unit.nodes if i in trained))
    return {rank: list(held) for rank, held in found.items()}
