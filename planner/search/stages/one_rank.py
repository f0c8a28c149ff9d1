"""One rank that holds the whole network: the best way to run every unit under the memory limit, with a proof.

What a rank needs while one unit goes backward is the most of all units, what it needs else their sum. For a given limit
on the former, ways through the chain are carried from unit to unit; of those that end in the same boundary state only
such are kept as no other one beats in time, memory and what the synchronisation of gradients has left to do. Equal
blocks with many ways would have too many of them: a price of a byte (Lagrange; Handler and Zang, Networks 10, 1980)
bounds what any completion costs, and what cannot beat the best choice known is left out. Limits are taken together and
parted where their bound lies below the best choice. First few ways are followed, then more, until nothing is left open.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    FloatArray,
    IntArray,
    dominated,
)
from planner.search.stages.segments import ROUNDING, PartitionTask

BEAMS = (16, 64, 256)
"""Ways through the first units that are kept in a boundary state, one try after the other."""
PRICES = 16
"""Prices of a byte that are tried at once."""
ROUNDS = 3
"""How often the prices are set closer to the best one."""
CLOSE = 1e-9
"""Relative difference to the best choice from which on a way is not followed."""
TIME, LEFT, BEHIND, STANDING = range(4)
"""Columns of a way: seconds, exposed and outstanding synchronisation, standing bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Ways of one unit: values (ways, 4), bytes while it goes backward, places of its states, numbers in the task."""

    values: FloatArray
    peak: FloatArray
    entry: IntArray
    exit: IntArray
    number: IntArray

    def below(self, peak: float) -> _Kind:
        """Those that need at most so much while the unit goes backward."""
        rows = np.flatnonzero(self.peak <= peak)
        return _Kind(self.values[rows], self.peak[rows], self.entry[rows], self.exit[rows], self.number[rows])


@dataclass(frozen=True, slots=True, eq=False)
class _Choice:
    """The way of every unit, (units,) numbers in its kind, their seconds, and both kinds of bytes."""

    ways: IntArray
    seconds: float
    standing: float
    peak: float


def choose(task: PartitionTask, width: int) -> tuple[IntArray | None, float]:
    """The best way of every unit of a task of one piece, (units,) numbers in its kind, and a bound on all others.

    At last `width` ways through the first units are kept in a boundary state, where `BEAMS` leave something open.

    The bound is the seconds of the best unless every try left out more than it may. Without a way that fits the bound
    is infinite where there is none.
    """
    kinds = _kinds(task)
    beams = (*BEAMS, *((width,) if width > BEAMS[-1] else ()))
    peaks = np.unique(np.concatenate([kind.peak for kind in kinds]))
    peaks = peaks[(peaks >= max(float(kind.peak.min()) for kind in kinds)) & (peaks <= task.limit_bytes)]
    best: _Choice | None = None
    left_out, heap = np.inf, list[tuple[float, int, int, int, _Chain]]()

    def opened(bound: float, first: int, last: int) -> None:
        units = [kind.below(peaks[last]) for kind in kinds]
        chain = _Chain(units, task.counts, task.limit_bytes * (1 + ROUNDING) - float(peaks[first]))
        if np.isfinite(chain.bound_s):
            heapq.heappush(heap, (max(bound, chain.bound_s), first, last, 0, chain))

    if len(peaks):
        opened(0.0, 0, len(peaks) - 1)
    while heap:
        bound, first, last, tries, chain = heapq.heappop(heap)
        if (best is not None and bound >= best.seconds * (1 - CLOSE)) or tries == len(beams):
            left_out = min(left_out, bound)
            continue
        parted, found, missed = first < last and chain.binds, None, bound
        if not parted:
            found, missed = chain.followed(np.inf if best is None else best.seconds * (1 - CLOSE), beams[tries])
        if found is not None and found.peak + found.standing <= task.limit_bytes * (1 + ROUNDING):
            best = found
        elif parted or found is not None:
            # What is best with the least of these limits does not fit with the others.
            bound = max(bound, min(missed, bound if found is None else found.seconds))
            opened(bound, first, (first + last) // 2)
            opened(bound, (first + last) // 2 + 1, last)
            continue
        if np.isfinite(missed):
            heapq.heappush(heap, (max(bound, missed), first, last, tries + 1, chain))
    return (None, left_out) if best is None else (best.ways, min(left_out, best.seconds))


def _kinds(task: PartitionTask) -> list[_Kind]:
    """The ways of each kind that no other one beats on this rank."""
    states = sorted({-1, *(int(s) for kind in task.kinds for s in (*kind.entry, *kind.exit))})
    place = {state: number for number, state in enumerate(states)}
    found = []
    for kind in task.kinds:
        v = kind.values
        held = float(task.in_flight[0]) * v[:, ACTIVATION] + v[:, RESIDENT]
        values = np.stack([v[:, FILL] + v[:, STEADY], v[:, QUEUE], v[:, BACKLOG], held], axis=1)
        whole = np.column_stack([values, v[:, TRANSIENT]])
        keep = []
        for entry, leave in dict.fromkeys(zip(kind.entry.tolist(), kind.exit.tolist(), strict=True)):
            rows = np.flatnonzero((kind.entry == entry) & (kind.exit == leave))
            rows = rows[np.lexsort(whole[rows].T[::-1])]
            keep.append(rows[~dominated(whole[rows])])
        rows = np.concatenate(keep)
        entries, exits = (np.array([place[s] for s in side[rows].tolist()]) for side in (kind.entry, kind.exit))
        found.append(_Kind(values[rows], v[rows, TRANSIENT], entries, exits, rows))
    return found


class _Chain:
    """Units one by one whose standing bytes have so much room, and the least that those behind any of them cost.

    ``bound_s`` bounds every choice, infinite where none fits, and ``binds`` says whether a byte has a price.
    """

    def __init__(self, kinds: list[_Kind], counts: tuple[int, ...], room: float) -> None:
        self.units = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        self.room, self.binds = room, False
        self.width = 1 + max(int(side.max(initial=0)) for kind in kinds for side in (kind.entry, kind.exit))
        self.bound_s = np.inf
        self.least_bytes = self._least_bytes()
        most = [0.0, *(float(kind.values[:, STANDING].max()) for kind in reversed(self.units))]
        self.most_bytes = np.cumsum(most)[::-1]
        self.least_left, self.most_left = self._exposed(np.min), self._exposed(np.max)
        if self.least_bytes[0, 0] <= room:
            self._price(kinds)

    def _least_bytes(self) -> FloatArray:
        """(units + 1, states) least standing bytes from each unit and entry state on."""
        steps = {k: _step(k, k.values[None, :, STANDING], self.width)[0] for k in dict.fromkeys(self.units)}
        found = np.full((len(self.units) + 1, self.width), np.inf)
        found[-1, 0] = 0.0
        for unit in reversed(range(len(self.units))):
            found[unit] = (steps[self.units[unit]] + found[unit + 1]).min(axis=1)
        return found

    def _exposed(self, pick: Callable[[FloatArray], float]) -> list[float]:
        """(units + 1,) seconds that synchronisation from each unit on leaves, at least or at most."""
        found = [0.0]
        for kind in reversed(self.units):
            found.append(max(pick(kind.values[:, LEFT]), pick(kind.values[:, BEHIND]) + found[-1]))
        return found[::-1]

    def _potentials(self, prices: FloatArray, last: IntArray) -> FloatArray:
        """(units + 1, rows, states) least sum from each unit and entry state on, `prices` and `last` (rows,).

        Seconds and priced bytes, and what the synchronisation of units up to the last one leaves to do behind it.
        """
        steps = self._steps(prices, last)
        found = np.full((len(self.units) + 1, len(prices), self.width), np.inf)
        found[-1, :, 0] = 0.0
        for unit in reversed(range(len(self.units))):
            found[unit] = (steps(unit) + found[unit + 1][:, None, :]).min(axis=2)
        return found

    def _steps(self, prices: FloatArray, last: IntArray) -> Callable[[int], FloatArray]:
        """Gives the (rows, entries, exits) least cost of one unit between its boundary states."""
        tables: dict[_Kind, list[FloatArray]] = {}
        for kind in dict.fromkeys(self.units):
            cost = kind.values[:, TIME] + prices[:, None] * kind.values[:, STANDING]
            costs = (cost + kind.values[:, BEHIND], cost + kind.values[:, LEFT], cost)
            tables[kind] = [_step(kind, each, self.width) for each in costs]

        def step(unit: int) -> FloatArray:
            before, at, after = tables[self.units[unit]]
            early, here = (unit < last)[:, None, None], np.equal(last, unit)[:, None, None]
            return np.where(early, before, np.where(here, at, after))

        return step

    @cached_property
    def _arrivals(self) -> FloatArray:
        """(units + 1, rows, states) as the potentials kept, of the units before each."""
        steps = self._steps(self.prices, self.last)
        found = np.full_like(self.potentials, np.inf)
        found[0, :, 0] = 0.0
        for unit in range(len(self.units)):
            found[unit + 1] = (found[unit][:, :, None] + steps(unit)).min(axis=1)
        return found

    def _worth(self, unit: int, limit_s: float) -> IntArray:
        """Ways of a unit with which a choice may take less than `limit_s`."""
        kind = self.units[unit]
        if np.isinf(limit_s):
            return np.arange(len(kind.values))
        queue = np.where(
            (unit < self.last)[:, None],
            kind.values[:, BEHIND],
            np.where(np.equal(self.last, unit)[:, None], kind.values[:, LEFT], 0.0),
        )
        own = kind.values[:, TIME] + self.prices[:, None] * kind.values[:, STANDING] + queue
        least = self._arrivals[unit][:, kind.entry] + own + self.potentials[unit + 1][:, kind.exit]
        worth: IntArray = np.flatnonzero((least - self.prices[:, None] * self.room).max(axis=0) < limit_s)
        return worth

    def _price(self, kinds: list[_Kind]) -> None:
        """Set prices around the one whose bound is largest, and keep what completions cost at some of them.

        Exposed synchronisation is at least what any one unit leaves behind those before it: that of the unit that
        bounds most and none are tried.
        """
        everyone = np.arange(-1, len(self.units))
        each = self._potentials(np.zeros(len(everyone)), everyone)[0, :, 0]
        lasts = np.unique([-1, everyone[int(np.argmax(each))]])
        seconds = sum(float(np.ptp(kind.values[:, TIME])) for kind in kinds)
        held = sum(float(np.ptp(kind.values[:, STANDING])) for kind in kinds)
        scale = seconds / held if held > 0 and self.most_bytes[0] > self.room else 0.0
        prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, PRICES - 1)]) if scale else np.zeros(1)
        for _ in range(ROUNDS):
            each_price, each_last = np.repeat(prices, len(lasts)), np.tile(lasts, len(prices))
            potentials = self._potentials(each_price, each_last)
            bounds = potentials[0, :, 0] - each_price * self.room
            place = int(np.argmax(bounds)) // len(lasts)
            low, high = max(place - 1, 0), min(place + 1, len(prices) - 1)
            kept = np.flatnonzero(np.isin(each_price, prices[[0, low, place, high]]))
            self.bound_s, self.binds = float(bounds.max()), place > 0
            self.prices, self.last, self.potentials = each_price[kept], each_last[kept], potentials[:, kept]
            if low == high:
                break
            prices = np.unique([0.0, prices[place], *np.linspace(prices[low], prices[high], PRICES)])

    def followed(self, limit_s: float, beam: int) -> tuple[_Choice | None, float]:
        """The best choice below `limit_s` with `beam` ways a state, if any, and a bound on what was left out."""
        values, state, left_out = np.zeros((1, 4)), np.zeros(1, dtype=np.int64), np.inf
        history: list[tuple[IntArray, IntArray]] = []
        for unit, kind in enumerate(self.units):
            worth = self._worth(unit, limit_s)
            before, way = np.nonzero(state[:, None] == kind.entry[None, worth])
            way = worth[way]
            values = self._after(values[before], kind.values[way], unit)
            state = kind.exit[way]
            bound = self._bound(values, state, unit + 1)
            rows, dropped = _kept(values, state, bound, np.flatnonzero(bound < limit_s), beam)
            left_out = min(left_out, dropped)
            if not len(rows):
                return None, left_out
            history.append((before[rows], way[rows]))
            values, state = values[rows], state[rows]
        row = int(np.argmin(values[:, TIME] + values[:, LEFT]))
        seconds = float(values[row, TIME] + values[row, LEFT])
        ways = []
        for earlier, picks in reversed(history):
            ways.append(int(picks[row]))
            row = int(earlier[row])
        picked = list(zip(self.units, ways[::-1], strict=True))
        return _Choice(
            ways=np.array([kind.number[way] for kind, way in picked]),
            seconds=seconds,
            standing=sum(float(kind.values[way, STANDING]) for kind, way in picked),
            peak=max(float(kind.peak[way]) for kind, way in picked),
        ), left_out

    def _after(self, before: FloatArray, own: FloatArray, unit: int) -> FloatArray:
        """Values of ways with one more unit; what no completion can tell apart counts alike."""
        values = before + own
        left = np.maximum(before[:, LEFT], before[:, BEHIND] + own[:, LEFT])
        values[:, LEFT] = np.maximum(left, values[:, BEHIND] + self.least_left[unit + 1])
        values[:, BEHIND] = np.maximum(values[:, BEHIND], left - self.most_left[unit + 1])
        # A little less than the room, so that sums of bytes are not too many by rounding.
        enough = self.room * (1 - ROUNDING) - self.most_bytes[unit + 1]
        values[:, STANDING] = np.maximum(values[:, STANDING], enough)
        return values

    def _bound(self, values: FloatArray, state: IntArray, unit: int) -> FloatArray:
        """Least seconds of any completion, infinite where none fits."""
        room = self.room - values[:, STANDING]
        behind = np.where((self.last < unit)[:, None], values[:, LEFT], values[:, BEHIND])
        ahead = self.potentials[unit][:, state] + behind - self.prices[:, None] * room
        bound = values[:, TIME] + ahead.max(axis=0)
        least: FloatArray = np.where(self.least_bytes[unit][state] <= room, bound, np.inf)
        return least


def _step(kind: _Kind, cost: FloatArray, width: int) -> FloatArray:
    """(prices, entries, exits) least cost of one unit between its boundary states."""
    found = np.full((len(cost), width, width), np.inf)
    for entry, leave in dict.fromkeys(zip(kind.entry.tolist(), kind.exit.tolist(), strict=True)):
        found[:, entry, leave] = cost[:, (kind.entry == entry) & (kind.exit == leave)].min(axis=1)
    return found


def _kept(values: FloatArray, state: IntArray, bound: FloatArray, rows: IntArray, beam: int) -> tuple[IntArray, float]:
    """Rows that no other one in the same state beats, at most `beam` in each, and the least bound of the others."""
    found, left_out = [rows[:0]], np.inf
    for place in np.unique(state[rows]).tolist():
        same = rows[state[rows] == place]
        for most, beaten in ((4 * beam, _beaten), (beam, None)):
            if len(same) > most:
                same = same[np.argsort(bound[same], kind="stable")]
                left_out = min(left_out, float(bound[same[most]]))
                same = same[:most]
            if beaten is not None:
                same = same[np.lexsort(values[same].T[::-1])]
                same = same[~beaten(values[same])]
        found.append(same)
    return np.concatenate(found), left_out


def _beaten(values: FloatArray) -> NDArray[np.bool_]:
    """As `dominated`, by sorting where two columns differ; rows are in lexical order."""
    distinct = [c for c in range(values.shape[1]) if np.ptp(values[:, c]) > 0] if len(values) else []
    if len(distinct) != 2:
        return dominated(values)
    other = values[:, distinct[1]]
    beaten = np.zeros(len(values), dtype=np.bool_)
    beaten[1:] = other[1:] >= np.minimum.accumulate(other)[:-1]
    return beaten
