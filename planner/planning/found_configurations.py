"""What a search over configurations found: plans to simulate, and what pins, memory and links are worth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from planner.planning.beside import Beside
from planner.planning.configured import Configured, Scored
from planner.planning.explanations import PinCost, ShadowPrices, brought_along, describe, pin_costs, shadow_prices
from planner.planning.hosted import simulated_costs
from planner.planning.refining import threshold_cost_s
from planner.planning.rescoring import Field
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from planner.search.candidates import NEAR_ENOUGH, Known
from planner.search.configurations.explored import Explored, Placed

SURE = 3
"""So many of its plans are mostly simulated: others come from the search of operators."""


def least_objective_s(scored: Iterable[Scored]) -> float:
    """Return the shortest closed-form step of the plans that fit in simulation; infinite if none fits."""
    return min((one.placed.objective_s for one in scored), default=inf)


class FoundConfigurations:
    """What a search over configurations found, and what it says of pins, memory and links.

    With two `cores` a fork of this process begins at once to simulate its plans.
    """

    def __init__(
        self, search: Configured, pins: Pins, explored: Explored, wanted: int, request: PlanRequest, cores: int = 1
    ) -> None:
        self.search, self.pins, self.explored, self.asked = search, pins, explored, request.pins.said()
        contenders = search.contenders(explored, wanted)
        works: dict[Hashable, Callable[[], Any]] = {n: one.foretell for n, one in enumerate(contenders[:SURE])}
        if request.sensitivity and explored.found:
            works["prices"] = partial(shadow_prices, search, explored, self._best)
        works |= {n: one.foretell for n, one in enumerate(contenders)}
        self._beside = Beside(works, cores)
        # The closed form is that of a step.
        self.field = Field(
            contenders=[replace(one, foretell=partial(self._beside.value, n)) for n, one in enumerate(contenders)],
            usual=1.0,
        )
        self.prices: ShadowPrices | None = None
        self.costs: tuple[PinCost, ...] = ()

    def close(self) -> None:
        """End what is still worked out beside."""
        self._beside.close()

    @property
    def _best(self) -> Placed:
        return min(self.explored.found, key=lambda placed: placed.objective_s)

    @property
    def scored(self) -> list[Scored]:
        """What was simulated."""
        return self.field.scored

    @property
    def known(self) -> Known:
        """What it says to the search of single operators."""
        steps = tuple(placed.objective_s for placed in self.explored.found)
        return Known(steps_s=steps, passes_s=partial(self.search.passes_s, self.pins))

    def tell_sensitivity(self) -> None:
        """Find what memory, links and pins are worth."""
        if not self.explored.found:
            return
        self.prices = self._beside.value("prices", last=True)
        self.costs = tuple(self._pin_costs(self._best))

    def _pin_costs(self, best: Placed) -> Iterator[PinCost]:
        # Marked stages stay where they are.
        staged = bool(self.search.unit_pins.cuts)
        pins = replace(self.pins, pp=None, vpp=None) if staged else self.pins
        yield from pin_costs(self.search, pins, best, self.asked)
        first = next(iter(self.scored), None)
        if first is None:
            return
        kept, shape = self.pins.sharding_threshold_kb, describe(first.placed.configuration)
        if kept is not None and "sharding_threshold_kb" in self.asked:
            yield f"sharding_threshold_kb={kept}", threshold_cost_s(self.search, first), f"{shape} with no threshold"
        graph, hardware = self.search.graph, self.search.runs_on(first.plan.expert_overlap)
        for pin, seconds, where in simulated_costs(graph, hardware, first.plan, first.prediction, self.pins):
            more = brought_along(self.search, pins, best, pin.partition("=")[0], self.asked)
            yield (pin, seconds, f"{shape} {where}") if more is None else (pin, seconds + more[1], more[2])

    @property
    def leaves_operators(self) -> bool:
        """Whether plans of one stage that keep everything come near the best: their operators may be free as well.

        Strategies of each operator on the axes of a stage are chosen already, and what the data axis leaves to gain is
        less.
        """
        if not self.explored.found:
            return not self.explored.interrupted
        best = min(placed.objective_s for placed in self.explored.found)
        return not self.explored.interrupted and any(
            placed.configuration.pipeline == 1
            and placed.objective_s <= NEAR_ENOUGH * best
            and not any(
                bool(placed.tables.units[unit].recompute[pick])
                for unit, pick in zip(placed.tables.chain.positions, placed.partition.labels, strict=True)
            )
            for placed in self.explored.found
        )
