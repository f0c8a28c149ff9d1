"""One rank that holds the whole network: the best way to run every unit under the memory limit, with a proof.

What a rank needs while one unit goes backward is the most of all units, what it needs else their sum. For a given limit
on the former, ways through the chain are carried from unit to unit; of those that end in the same boundary state only
such are kept as no other one beats in time, memory and what the synchronisation of gradients has left to do. Equal
blocks with many ways would have too many of them: a price of a byte (Lagrange; Handler and Zang, Networks 10, 1980)
bounds what any completion costs, and what cannot beat the best choice known is left out. Limits are taken together and
parted where their bound lies below the best choice. Where the bytes of equal units lie on evenly spaced places, a table
over those places says what is best (`planner.search.stages.byte_grid`); else, and where what was rounded is too much,
first few ways are followed, then more, until nothing is left open.
"""

from __future__ import annotations

import heapq

import numpy as np

from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    IntArray,
    undominated_of_each,
)
from planner.search.stages.priced_chain import ChosenWays, PricedChain, PricedWays
from planner.search.stages.segments import ROUNDING
from planner.search.stages.task import PartitionTask

BEAMS = (16, 64, 256)
"""Ways through the first units that are kept in a boundary state, one try after the other."""
LONG = 256
"""A longer chain is followed only with as few ways as take no more work than the most ways of one of this length."""
CLOSE = 1e-9
"""Relative difference to the best choice from which on a way is not followed."""


def choose(
    task: PartitionTask, width: int, enough_s: float = np.inf, close: float = CLOSE
) -> tuple[IntArray | None, float]:
    """The best way of every unit of a task of one piece, (units,) numbers in its kind, and a bound on all others.

    At last `width` ways through the first units are kept in a boundary state, where `BEAMS` leave something open; fewer
    on chains longer than `LONG`, of which something may stay open.

    The bound is the seconds of the best unless every try left out more than it may. Without a way that fits the bound
    is infinite where there is none. Of what takes `enough_s` and more some choice will do, and the bound is no more.
    Ways that could be better by less than `close`, relative to the best found, are not followed.
    """
    kinds = _kinds(task)
    beams = (*BEAMS, *((width,) if width > BEAMS[-1] else ()))
    if task.units > LONG:
        beams = tuple(beam for beam in BEAMS if beam * task.units <= BEAMS[-1] * LONG) or BEAMS[:1]
    peaks = np.unique(np.concatenate([kind.peak for kind in kinds]))
    peaks = peaks[(peaks >= max(float(kind.peak.min()) for kind in kinds)) & (peaks <= task.limit_bytes)]
    best: ChosenWays | None = None
    allowed = task.limit_bytes * (1 + ROUNDING)
    left_out, heap = np.inf, list[tuple[float, int, int, int, PricedChain]]()

    def opened(bound: float, first: int, last: int) -> None:
        units = [kind.below(peaks[last]) for kind in kinds]
        chain = PricedChain(units, task.counts, allowed - float(peaks[first]))
        if np.isfinite(chain.bound_s):
            heapq.heappush(heap, (max(bound, chain.bound_s), first, last, 0, chain))

    if len(peaks):
        opened(0.0, 0, len(peaks) - 1)
    while heap:
        bound, first, last, tries, chain = heapq.heappop(heap)
        limit_s = np.inf if best is None else min(best.seconds * (1 - close), enough_s)
        if bound >= limit_s or tries > len(beams):
            left_out = min(left_out, bound)
            continue
        parted, found, missed = first < last and chain.binds, None, bound
        if not tries and peaks[last] - peaks[first] <= chain.spacing:
            choices, missed = chain.spaced(limit_s)
            fits = (c for c in choices if c.peak + c.standing <= allowed and c.seconds < limit_s)
            found = min(fits, key=lambda choice: choice.seconds, default=None)
        elif not tries and not chain.binds:
            choice = chain.straight()
            found = choice if choice.peak + choice.standing <= allowed and choice.seconds < limit_s else None
        elif not parted and tries:
            found, missed = chain.followed(limit_s, beams[tries - 1])
        if found is not None and found.peak + found.standing <= allowed:
            best = found
        elif tries and (parted or found is not None):
            # What is best with the least of these limits does not fit with the others.
            bound = max(bound, min(missed, bound if found is None else found.seconds))
            opened(bound, first, (first + last) // 2)
            opened(bound, (first + last) // 2 + 1, last)
            continue
        if np.isfinite(missed):
            heapq.heappush(heap, (max(bound, missed), first, last, tries + 1, chain))
    return (None, left_out) if best is None else (best.ways, min(left_out, best.seconds, enough_s))


def _kinds(task: PartitionTask) -> list[PricedWays]:
    """The ways of each kind that no other one beats on this rank."""
    states = np.unique(np.concatenate([[-1], *(side for kind in task.kinds for side in (kind.entry, kind.exit))]))
    found, roomy = [], task.roomy
    for kind in task.kinds:
        v = kind.values
        held = float(task.in_flight[0]) * v[:, ACTIVATION] + v[:, RESIDENT]
        seconds = v[:, FILL] + v[:, STEADY]
        values = np.stack([seconds, v[:, QUEUE], v[:, BACKLOG], held], axis=1)
        # What takes less time may leave as much more to synchronise.
        whole = [seconds, seconds + v[:, QUEUE], seconds + v[:, BACKLOG], *(() if roomy else (held, v[:, TRANSIENT]))]
        entries, exits = np.searchsorted(states, kind.entry), np.searchsorted(states, kind.exit)
        rows = undominated_of_each(np.stack(whole, axis=1), entries * len(states) + exits)
        found.append(PricedWays(values[rows], v[rows, TRANSIENT], entries[rows], exits[rows], rows))
    return found
