"""Where no plan that the closed form holds to fit does once it is simulated: the search again, given less memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from planner.planning.configured import Configured
from planner.plans.pins import Pins
from planner.search.configurations.explored import Explored
from planner.search.patience import Patience
from simulator.quantities import bytes_text

ROUNDS = 6
"""So many limits are searched under at most."""
NEAREST = 0.01
"""Limits that are no farther apart than this share of the memory are one."""


@dataclass(kw_only=True)
class TighterLimits:
    """Memory limits to search under, each lower by what the plans under the last one missed the memory by.

    Where nothing is found under one, the next lies between it and the last under which something was.

    Attributes
    ----------
    over : bytes of the least limit under which plans were found, none of which fits once it is simulated
    under : bytes of the greatest under which none was found
    step : bytes by which the nearest of those misses the memory

    >>> limits = TighterLimits(over=100.0)
    >>> limits.missed(100.0, 10.0)
    >>> limits.next
    90.0
    >>> limits.missed(90.0, 5.0)
    >>> limits.next
    85.0
    >>> limits.nothing(85.0)
    >>> limits.next
    87.5
    """

    over: float
    under: float = 0.0
    step: float = 0.0

    @property
    def next(self) -> float:
        """The limit to search under."""
        return max(self.over - self.step, (self.over + self.under) / 2)

    def missed(self, limit_bytes: float, by_bytes: float) -> None:
        """Plans were found under a limit, and the nearest missed the memory by so much."""
        self.over, self.step = limit_bytes, by_bytes

    def nothing(self, limit_bytes: float) -> None:
        """Nothing was found under a limit."""
        self.under = limit_bytes


def search_tighter(
    search: Configured, pins: Pins, first: Explored, wanted: int, patience: Patience
) -> Iterator[tuple[Configured, Explored]]:
    """Searches under lower limits with what each found, to be simulated before the next is asked for; until one fits.

    Bounds are those of the first search: plans of the space that need what lies between the limits may be faster, and
    none is faster than that. An interruption is noted in `first`.
    """
    whole = search.model().limit_bytes
    limits, explored = TighterLimits(over=whole), first
    limit = whole
    for _ in range(ROUNDS):
        if explored.missed:
            limits.missed(limit, min(explored.missed))
        elif explored.found:
            return  # something else than memory is in the way
        else:
            limits.nothing(limit)
        if limits.over - limits.under <= NEAREST * whole:
            return
        limit = limits.next
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
