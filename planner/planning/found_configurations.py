"""What a search over configurations found: plans to simulate, and what pins, memory and links are worth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
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
from planner.search.patience import Patience
from simulator.quantities import bytes_text

SURE = 3
"""Plans of it that are simulated in most cases; the others come from the search of operators."""


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


ROUNDS = 6
"""Memory limits that a search is repeated under, at most."""
NEAREST = 0.01
"""Limits that are no farther apart than this share of the memory are one."""


def search_tighter(
    search: Configured, pins: Pins, first: Explored, wanted: int, patience: Patience
) -> Iterator[tuple[Configured, Explored]]:
    """Searches under lower limits with what each found, to be simulated before the next is asked for; until one fits.

    Each limit is lower by what the plans under the last one missed the memory by; where nothing is found under one, the
    next lies between it and the last under which something was. Bounds are those of the first search: plans of the
    space that need what lies between the limits may be faster, and none is faster than that. An interruption is noted
    in `first`.
    """
    whole = search.model().limit_bytes
    explored, limit = first, whole
    over, under, step = whole, 0.0, 0.0
    for _ in range(ROUNDS):
        if explored.missed:
            over, step = limit, min(explored.missed)
        elif explored.found:
            return  # something else than memory is in the way
        else:
            under = limit
        if over - under <= NEAREST * whole:
            return
        limit = max(over - step, (over + under) / 2)
        tighter = replace(search, spared_bytes=search.spared_bytes + whole - limit)
        patience.found = False
        explored = tighter.explore(pins, wanted=wanted, patience=patience)
        explored.lower_bound_s = min(explored.lower_bound_s, first.lower_bound_s)
        first.interrupted |= explored.interrupted
        yield tighter, explored
        if first.interrupted:
            return


def told(search: Configured) -> tuple[str, ...]:
    """What was not searched under a lower limit than the memory of a device."""
    if not search.spared_bytes:
        return ()
    whole = search.hardware.device_memory_bytes
    return (
        f"plans that the closed form holds to fit the {bytes_text(whole)} of a device did not once they were "
        f"simulated: searched again as if it had {bytes_text(whole - search.spared_bytes)}; plans that need what lies "
        "between are not among those found, and the gap counts them as if they fitted",
    )
