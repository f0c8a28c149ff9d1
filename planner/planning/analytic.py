"""The closed form's account of a step beside the simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.planning.prediction import Prediction, without_rounding
from planner.search.configurations.explored import Placed
from planner.search.configurations.step_model import StepModel, StoredWays
from planner.search.configurations.storage import Storages

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
AGREES = 0.05
"""Relative difference up to which both times are the same for a plan's purposes."""


def analytic_breakdown(placed: Placed, model: StepModel) -> dict[str, float]:
    """Seconds of the closed form by what ranks do, their mean, adding up to its objective.

    Communication that nothing hides is what passes take beyond their kernels, once a step what gathers of parameters
    and synchronisation take beyond the passes; what is left is waiting.
    """
    c, tables, chosen = placed.configuration, placed.tables, placed.partition
    joined = model.joined(tables, c)
    stored = model.stored(joined.labels, Storages.of([c]), joined.whole, joined.trained).of(0)
    first = np.concatenate(([0], joined.ends))
    picked = first[np.array(tables.chain.positions)] + np.array(chosen.labels)
    compute, update = (sum(seconds[picked].tolist()) for seconds in model.kernels_s(joined.labels, c, joined.trained))
    compute *= c.micro_batches
    own = sum(_own_s(stored, c.micro_batches)[picked].tolist())
    left = sum(stored.left_s(picked[begin:end]) for begin, end in pairwise((0, *chosen.ends)))
    found = {
        "compute_s": compute / c.pipeline,
        "exposed_communication_s": (own + left - compute - update) / c.pipeline,
        "optimizer_s": update / c.pipeline,
    }
    found["bubble_s"] = placed.objective_s - sum(found.values())
    return without_rounding(found, placed.objective_s)


def _own_s(ways: StoredWays, micro_batches: int) -> FloatArray:
    """Seconds (ways,) that a unit keeps its rank busy."""
    return np.asarray(micro_batches * (ways.forward_s + ways.backward_s + ways.stall_s) + ways.once_s)


def differing_term(analytic: Mapping[str, float], simulated: Prediction) -> str:
    """The part of the step that differs most in the direction in which the steps differ, empty where they agree."""
    objective, step = sum(analytic.values()), simulated.step_time_s
    if not analytic or abs(objective - step) <= AGREES * step:
        return ""
    longer = 1.0 if objective > step else -1.0
    parts = dict.fromkeys((*analytic, *simulated.breakdown))
    return max(parts, key=lambda part: longer * (analytic.get(part, 0.0) - simulated.breakdown.get(part, 0.0)))
