"""The one choice that every variable has along a context axis, on which nothing is searched."""

from __future__ import annotations

from planner.graph.operator_graph import TensorRef
from planner.search.problem.variables import Choice, Decisions, Kind, Variable
from planner.sharding.context import ContextAxis
from planner.sharding.placement import REPLICATE, Placement


def context_choices(decisions: Decisions, axis: ContextAxis) -> tuple[Choice, ...]:
    """Give each variable's choice along a context axis, aligned with ``decisions.variables``.

    What one variable writes the others read as it is, so nothing is redistributed along the axis but the
    parameters' gradients: partial, and read whole, they are summed once a step.
    """
    placed: dict[TensorRef, Placement] = {
        TensorRef(node, output): placement
        for node, rule in enumerate(axis.rules)
        for output, placement in enumerate(rule.outputs)
    }
    return tuple(_choice(variable, axis, placed) for variable in decisions.variables)


def _choice(variable: Variable, axis: ContextAxis, placed: dict[TensorRef, Placement]) -> Choice:
    first = variable.choices[0]
    whole = variable.kind is Kind.PARAMETER
    return Choice(
        rules=tuple(axis.rules[node] for node in variable.nodes),
        reads={tensor: REPLICATE if whole else placed[tensor] for tensor in first.reads},
        writes={tensor: placed[tensor] for tensor in first.writes},
    )
