"""The closed form's account of a step beside the simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from planner.prediction import Prediction, without_rounding
from planner.search.configurations.explored import Placed
from planner.search.configurations.step_model import StepModel, StoredWays, Whole, trained_parameters

AGREES = 0.05
"""Relative difference up to which both times are the same for a plan's purposes."""


def analytic_breakdown(placed: Placed, model: StepModel) -> dict[str, float]:
    """Seconds of the closed form by what ranks do, their mean, adding up to its objective.

    Communication that nothing hides is what passes take beyond their kernels, once a step what gathers of parameters
    and synchronisation take beyond the passes; what is left is waiting.
    """
    c, tables, chosen = placed.configuration, placed.tables, placed.partition
    units, whole, trained = model.labels(tables, c), Whole.of(tables), trained_parameters(tables)
    stored = [model.stored(unit, c, whole, count) for unit, count in zip(units, trained, strict=True)]
    kernels = [model.kernels_s(unit, c, count) for unit, count in zip(units, trained, strict=True)]
    picked = list(zip(tables.chain.positions, chosen.labels, strict=True))
    compute, update = (sum(float(kernels[unit][kind][label]) for unit, label in picked) for kind in (0, 1))
    compute *= c.micro_batches
    own = sum(_own_s(stored[unit], label, c.micro_batches) for unit, label in picked)
    left = sum(_left_s(stored, picked[first:last]) for first, last in pairwise((0, *chosen.ends)))
    found = {
        "compute_s": compute / c.pipeline,
        "exposed_communication_s": (own + left - compute - update) / c.pipeline,
        "optimizer_s": update / c.pipeline,
    }
    found["bubble_s"] = placed.objective_s - sum(found.values())
    return without_rounding(found, placed.objective_s)


def _own_s(ways: StoredWays, label: int, micro_batches: int) -> float:
    """Seconds that a unit keeps its rank busy."""
    passes = ways.forward_s[label] + ways.backward_s[label] + ways.stall_s[label]
    return float(micro_batches * passes + ways.once_s[label])


def _left_s(stored: list[StoredWays], picked: list[tuple[int, int]]) -> float:
    """Seconds that synchronisation goes on after the last backward pass of a chunk (`stages.fragments.joined`)."""
    behind = np.cumsum([0.0, *(stored[unit].backlog_s[label] for unit, label in picked[:-1])])
    queue = np.array([stored[unit].queue_s[label] for unit, label in picked])
    return max(0.0, float((behind + queue).max()))


def differing_term(analytic: Mapping[str, float], simulated: Prediction) -> str:
    """The part of the step that differs most in the direction in which the steps differ, empty where they agree."""
    objective, step = sum(analytic.values()), simulated.step_time_s
    if not analytic or abs(objective - step) <= AGREES * step:
        return ""
    longer = 1.0 if objective > step else -1.0
    parts = dict.fromkeys((*analytic, *simulated.breakdown))
    return max(parts, key=lambda part: longer * (analytic.get(part, 0.0) - simulated.breakdown.get(part, 0.0)))
