"""The step of a plan on one stage in columns, at a cost that grows with kinds of layers, not with layers."""

from __future__ import annotations

from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.lowering.bodies import step_body
from planner.lowering.copies import UnalikeError
from planner.lowering.options import lowering_options
from planner.lowering.program import lower_graph, lower_step
from planner.plans.plan import Plan, expanded_rules
from simulator.columns import ProgramColumns, columns


def lowered_step(plan: Plan, graph: OperatorGraph) -> ProgramColumns:
    """The program that `planner.lowering.lower_graph` makes of the whole network, tasks of equal layers written once.

    Networks whose layers share more than the tensors between neighbours are lowered whole.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    """
    try:
        return lower_step(step_body(plan, graph))
    except UnalikeError:
        whole = unfold(at_batch(graph, plan.samples))
        return columns(lower_graph(whole, expanded_rules(plan), lowering_options(plan, graph)).program)
