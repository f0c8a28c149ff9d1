"""What is said beside plans: of their network, of what a search left out, and of what the best plan does not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.graph.operator_graph import OperatorGraph, Role
from planner.planning.hosted import left_out
from planner.planning.one_stage import Candidate
from planner.plans.plan import Status
from planner.sharding.rules import has_rule
from simulator.quantities import percent_text


def interrupted(candidates: Sequence[Candidate], explored_gap: float | None) -> Iterator[str]:
    """Say how far the best plan so far is from the best, where the user has ended the search.

    Parameters
    ----------
    explored_gap : that of the search over configurations; None where there was none
    """
    if candidates:
        gap = candidates[0].plan.certificate.gap if explored_gap is None else explored_gap
        yield f"the search was interrupted: this is the best plan so far, at most {percent_text(gap)} from the best"


def without_rules(graph: OperatorGraph) -> tuple[str, ...]:
    """One message for each kind of operator that has no sharding rule."""
    found: dict[str, list[str]] = {}
    for node in graph.nodes:
        if node.role is Role.OPERATOR and not has_rule(node.op):
            found.setdefault(node.op, []).append(node.name)
    return tuple(
        f"operator {op} has no sharding rule and is replicated ({len(names)} times, first at {names[0]})"
        for op, names in sorted(found.items())
    )


def costs_left_out(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """A message where the closed form leaves out what pins of the best plan cost, and its gap is another for that."""
    names = left_out(candidates[0].plan) if candidates else ()
    if not names or candidates[0].plan.certificate.status is Status.OPTIMAL:
        return ()
    return (
        f"the search does not count what {' and '.join(names)} cost{'s' * (len(names) == 1)}: the gap is that of the "
        "simulated step; pin recompute, micro_batch and tp to try others",
    )


def idle_axes(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """A message for each mesh axis of the best plan along which no operator's work is split."""
    if not candidates:
        return ()
    plan = candidates[0].plan
    everything = [rules for part in (plan.rules, *(p.rules for p in plan.layers)) for rules in part.values()]
    return tuple(
        f"the best plan splits no work along the {axis.name} axis: its {axis.size} ranks all do the same, because "
        "messages would cost more than they save"
        for i, axis in enumerate(plan.mesh.axes)
        if not any(rules[i].splits_work for rules in everything)
    )
