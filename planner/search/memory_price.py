"""Keeping a plan that is not searched exactly under a memory limit, by a price of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.search.layered_tables import LayeredTables
from planner.search.solution import Solution

PRICE_PASSES = 4

AtPrice = Callable[[float, Sequence[int] | None], list[int]]
"""Finds states at a price in seconds per byte; improves on given states, if there are any."""


def within_limit(
    tables: LayeredTables, limit: float, at_price: AtPrice, least: Callable[[], Solution]
) -> Solution | None:
    """Find a plan whose memory fits; None where even the plan of least memory does not.

    The price of memory starts where the fast plan that does not fit and the smallest plan cost the same; it is
    raised while plans do not fit and lowered while they do, `PRICE_PASSES` times.

    Parameters
    ----------
    tables : LayeredTables
    limit : float
        Bytes; may be infinite.
    at_price : callable
    least : callable
        Makes the plan of least memory; asked for only where memory binds or no way from the start was found.
    """
    states = at_price(0.0, None)
    time, memory = tables.cost(states)
    if np.isfinite(time) and memory <= limit:
        return tables.solution(states)
    best = least()
    if not np.isfinite(best.objective_s) or best.memory_bytes > limit:
        return None
    smallest = tables.states_of(best)
    if not np.isfinite(time):
        states = at_price(0.0, smallest)
        time, memory = tables.cost(states)
        if memory <= limit and time < best.objective_s:
            return tables.solution(states)
    saved = max(best.objective_s - time, 1e-9 * best.objective_s)
    price, low, high = saved / max(memory - best.memory_bytes, 1.0), 0.0, np.inf
    for _ in range(PRICE_PASSES):
        fits = False
        for start in (states, smallest):
            found = at_price(price, start)
            time, memory = tables.cost(found)
            fits = memory <= limit
            if fits and time < best.objective_s:
                best, smallest = tables.solution(found), found
            if fits:
                break
        low, high = (low, price) if fits else (price, high)
        price = 4.0 * low if np.isinf(high) else (high / 4.0 if low == 0 else (low * high) ** 0.5)
    return best
