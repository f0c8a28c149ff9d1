"""Which plans are simulated: as many as are wanted, and all others that may still be the first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.planning.prediction import Prediction, without_rounding
from planner.plans.plan import Plan
from planner.search.configurations.explored import Placed
from planner.search.configurations.step_model import StepModel
from planner.search.configurations.storage import Storages
from planner.search.patience import Patience

RESCORED = 5
"""Plans that are simulated at least, so that the best does not depend on how many are asked for."""


class Simulated(Protocol):
    """A plan with what it is predicted to do."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def prediction(self) -> Prediction:
        """Its figures."""


Scored = TypeVar("Scored", bound=Simulated)


def said_of(plan: Plan) -> tuple[object, ...]:
    """What a user is told of a plan: two of which the same is said are shown as one."""
    degrees = tuple((axis.name, axis.size) for axis in plan.mesh.axes)
    passes = (
        plan.pipeline,
        plan.virtual,
        plan.schedule,
        plan.micro_batch,
        plan.recompute,
        plan.context_algorithm,
        plan.expert_overlap,
    )
    return degrees, *passes, plan.optimizer_sharding, plan.shard_size, plan.offload_optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """A plan as it was found, and what it is predicted to do: None where it cannot be; ``refused`` may say why."""

    plan: Plan
    prediction: Prediction | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender(Generic[Scored]):
    """A plan that a search found.

    ``objective_s`` is what the search minimised; ``foretell`` simulates the plan, and changes nothing that anyone else
    reads; ``settle`` is given what it returns and the least step so far, and returns None for a plan that does not fit.
    """

    objective_s: float
    foretell: Callable[[], Foretold]
    settle: Callable[[Foretold, float], Scored | None]


@dataclass(kw_only=True)
class Field(Generic[Scored]):
    """The plans of one search, best first by its objective, and those of them that were simulated.

    ``usual`` is the simulated step over the objective of a plan that nothing delays which the objective does not count,
    infinite where it is not known. That one plan was delayed says nothing of the next.
    """

    contenders: Sequence[Contender[Scored]]
    usual: float = float("inf")
    scored: list[Scored] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Simulated steps over objectives."""
    tried: int = 0

    @property
    def next(self) -> Contender[Scored] | None:
        """The best plan that was not tried yet."""
        return self.contenders[self.tried] if self.tried < len(self.contenders) else None

    @property
    def expected_s(self) -> float:
        """The step that its next plan probably takes; nothing is known of a search before one was simulated."""
        if self.next is None:
            return float("inf")
        return self.next.objective_s * (sum(self.ratios) / len(self.ratios) if self.ratios else 0.0)

    def may_be_first(self, best_s: float) -> bool:
        """Whether its next plan may beat `best_s`, with an error of the objective like those seen, to `AGREES`."""
        if self.next is None:
            return False
        return not self.ratios or self.next.objective_s * min(self.usual, *self.ratios) * (1 - AGREES) < best_s

    def simulate(self, best_s: float) -> None:
        """Simulate the next plan."""
        contender = self.next
        assert contender is not None  # asked before
        found = contender.settle(contender.foretell(), best_s)
        self.tried += 1
        if found is not None:
            self.scored.append(found)
            self.ratios.append(found.prediction.step_time_s / contender.objective_s)


def rescore(fields: Sequence[Field[Any]], wanted: int, patience: Patience | None = None) -> bool:
    """Simulate the plans of several searches, those that promise most first; True where the user stopped it.

    Objectives of different searches count different things, so the first plan of each is simulated before they are
    compared. An interruption ends it as soon as there is a plan.

    Parameters
    ----------
    wanted
        Plans to simulate at least, all different, as far as there are so many; others are simulated where they may be
        the first.
    patience
        What interrupts do meanwhile.
    """
    patience = patience or Patience()
    stopped = False
    while any(one.next is not None for one in fields):
        scored = [plan for one in fields for plan in one.scored]
        stopped |= patience.asked and bool(scored)
        if scored and stopped:
            break
        best_s = min((plan.prediction.step_time_s for plan in scored), default=float("inf"))
        few = len({said_of(one.plan) for one in scored}) < wanted
        most = [one for one in fields if one.next is not None and (few or one.may_be_first(best_s))]
        if not most:
            break
        try:
            promising = min(most, key=lambda one: one.expected_s)
            with patience.breaking() if scored else nullcontext():
                promising.simulate(best_s)
        except KeyboardInterrupt:
            stopped = True
    return stopped


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
    picked = joined.picked(tables, chosen.labels)
    compute, update = (sum(seconds[picked].tolist()) for seconds in model.kernels_s(joined.labels, c, joined.trained))
    compute *= c.micro_batches
    own_s = c.micro_batches * (stored.forward_s + stored.backward_s + stored.stall_s) + stored.once_s
    own = sum(own_s[picked].tolist())
    left = sum(stored.left_s(picked[begin:end]) for begin, end in pairwise((0, *chosen.ends)))
    found = {
        "compute_s": compute / c.pipeline,
        "exposed_communication_s": (own + left - compute - update) / c.pipeline,
        "optimizer_s": update / c.pipeline,
    }
    found["bubble_s"] = placed.objective_s - sum(found.values())
    return without_rounding(found, placed.objective_s)


def differing_term(analytic: Mapping[str, float], simulated: Prediction) -> str:
    """The part of the step that differs most in the direction in which the steps differ, empty where they agree."""
    objective, step = sum(analytic.values()), simulated.step_time_s
    if not analytic or abs(objective - step) <= AGREES * step:
        return ""
    longer = 1.0 if objective > step else -1.0
    parts = dict.fromkeys((*analytic, *simulated.breakdown))
    return max(parts, key=lambda part: longer * (analytic.get(part, 0.0) - simulated.breakdown.get(part, 0.0)))
