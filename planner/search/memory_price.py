"""Keeping a plan that is not searched exactly under a memory limit, by a price of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from planner.search.problem.layered_tables import LayeredTables
from planner.search.problem.solution import Solution

PRICE_PASSES = 6

AtPrice = Callable[[float, Sequence[int] | None], list[int]]
"""Finds states at a price in seconds per byte; improves on given states, if there are any."""


def within_limit(
    tables: LayeredTables, limit: float, at_price: AtPrice, least: Callable[[], Solution]
) -> Solution | None:
    """Find a plan whose memory fits; None where even the plan of least memory does not.

    The price of memory is that at which the plan that does not fit and the best that does cost the same; plans found
    at it take the place of the one or the other, `PRICE_PASSES` times at most.

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
    for _ in range(PRICE_PASSES):
        price = max(best.objective_s - time, 0.0) / max(memory - best.memory_bytes, 1.0)
        moved = False
        for start in (states, smallest):
            found = at_price(price, start)
            seconds, needed = tables.cost(found)
            if needed <= limit and seconds < best.objective_s:
                best, smallest, moved = tables.solution(found), found, True
            elif limit < needed < memory:
                states, time, memory, moved = found, seconds, needed, True
        if not moved:
            break
    return spliced(tables, states, best, limit)


def spliced(tables: LayeredTables, over: Sequence[int], fits: Solution, limit: float) -> Solution:
    """Give as many first layers of each run as the limit allows the states of a faster plan that does not fit.

    The price of memory makes all equal layers switch at once; the best plan may lie in between.
    """
    best, starts = fits, list(tables.starts)
    faster = tables.solution(over)
    for run, length in enumerate(tables.lengths):
        low, high = 0, length
        while low < high:
            middle = (low + high + 1) // 2
            tried = [s | {middle + 1} if r == run else s for r, s in enumerate(starts)]
            parts = LayeredTables(tables.problem, tried)
            there = parts.states_of(faster)
            states = [
                there[i] if item.run == run and item.last <= middle else state
                for i, (item, state) in enumerate(zip(parts.instances, parts.states_of(fits), strict=True))
            ]
            seconds, needed = parts.cost(states)
            if not (np.isfinite(seconds) and needed <= limit):
                high = middle - 1
                continue
            low = middle
            if seconds < best.objective_s:
                best = parts.solution(states)
                kept = tried
        if best is not fits:
            fits, starts = best, kept
    return best
