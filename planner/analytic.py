"""The closed form's account of a step beside the simulated one."""

from __future__ import annotations

from collections.abc import Mapping

from planner.prediction import Prediction
from planner.search.configurations.branch_and_bound import Placed

AGREES = 0.05
"""Relative difference up to which both times are the same for a plan's purposes."""


def analytic_breakdown(placed: Placed, simulated: Prediction) -> dict[str, float]:
    """Seconds of the closed form by what ranks do, their mean, adding up to its objective.

    Communication is that inside stages; what synchronises gradients beyond the passes counts as waiting, and the
    update as simulated.
    """
    c, tables = placed.configuration, placed.tables
    units = [tables.units[unit] for unit in tables.chain.positions]
    picked = list(zip(units, placed.partition.labels, strict=True))
    passes = sum(float(u.forward_s[i] + u.backward_s[i]) for u, i in picked) * c.micro_batches / c.pipeline
    messages = sum(float(u.forward_communication_s[i] + u.backward_communication_s[i]) for u, i in picked)
    exposed = messages * c.micro_batches / c.pipeline
    found = {
        "compute_s": passes - exposed,
        "exposed_communication_s": exposed,
        "optimizer_s": simulated.breakdown.get("optimizer_s", 0.0),
    }
    return {**found, "bubble_s": placed.objective_s - sum(found.values())}


def differing_term(analytic: Mapping[str, float], simulated: Prediction) -> str:
    """The part of the step in which both differ most, empty where the steps agree."""
    objective, step = sum(analytic.values()), simulated.step_time_s
    if not analytic or abs(objective - step) <= AGREES * step:
        return ""
    return max(analytic, key=lambda part: abs(analytic[part] - simulated.breakdown.get(part, 0.0)))
