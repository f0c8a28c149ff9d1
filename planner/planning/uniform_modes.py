"""Software that has one mode of recomputation for all layers: which modes, and which of them a plan has."""

from __future__ import annotations

from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.options import recompute_modes
from planner.plans.capability import capability_of
from planner.plans.plan import Plan
from planner.plans.request import PlanRequest


def uniform_modes(request: PlanRequest) -> tuple[str, ...]:
    """Modes of which the request's software takes one for all layers; empty where the request or layers may choose."""
    table = capability_of(request.software) if request.software and not request.any_plan else None
    pinned = request.pins.recompute or request.pins.recompute_layers
    said = pinned or (request.marks is not None and request.marks.recompute)
    usual = request.parallel_mode == "auto_parallel" and request.search_mode == "dynamic_programming"
    if table is None or table.recompute_by_layer or said or request.hints or not usual:
        return ()
    return table.recompute


def mode_of(plan: Plan, graph: OperatorGraph) -> str | None:
    """The mode that all layers of a plan have; None where they differ."""
    units = chain(graph)
    modes = recompute_modes(plan, units.names()) if plan.recompute_ranges else {}
    rows = [name for unit in units.units if unit.run is not None for name in units.unrolled(unit)]
    found = {modes.get(name, "none") for name in rows or units.names()}
    return found.pop() if len(found) == 1 else None
