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
from dataclasses import dataclass

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

BEAMS = (16, 256, 4096)
"""Most ways through the first units that are kept in a boundary state, one try after the other."""
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
    """The way of every unit, (units,) numbers in its kind, and their seconds."""

    ways: IntArray
    seconds: float


def choose(task: PartitionTask, beams: tuple[int, ...] = BEAMS) -> tuple[IntArray | None, float]:
    """The best way of every unit of a task of one piece, (units,) numbers in its kind, and a bound on all others.

    The bound is the seconds of the best unless every try left out more than it may. Without a way that fits the bound
    is infinite where there is none.
    """
    kinds = _kinds(task)
    peaks = np.unique(np.concatenate([kind.peak for kind in kinds]))
    peaks = peaks[(peaks >= max(float(kind.peak.min()) for kind in kinds)) & (peaks <= task.limit_bytes)]
    best: _Choice | None = None
    left_out = np.inf
    heap: list[tuple[float, int, int, int, _Chain]] = []

    def opened(first: int, last: int) -> None:
        units = [kind.below(peaks[last]) for kind in kinds]
        chain = _Chain(units, task.counts, task.limit_bytes * (1 + ROUNDING) - float(peaks[first]))
        if np.isfinite(chain.bound_s):
            heapq.heappush(heap, (chain.bound_s, first, last, 0, chain))

    if len(peaks):
        opened(0, len(peaks) - 1)
    while heap:
        bound, first, last, tries, chain = heapq.heappop(heap)
        if best is not None and bound >= best.seconds * (1 - CLOSE):
            left_out = min(left_out, bound)
            break
        if first < last:
            middle = (first + last) // 2
            opened(first, middle)
            opened(middle + 1, last)
        elif tries == len(beams):
            left_out = min(left_out, bound)
        else:
            best, missed = chain.followed(best, beams[tries])
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

    ``bound_s`` bounds every choice, infinite where none fits.
    """

    def __init__(self, kinds: list[_Kind], counts: tuple[int, ...], room: float) -> None:
        self.units = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
        self.room = room
        self.width = 1 + max(int(side.max(initial=0)) for kind in kinds for side in (kind.entry, kind.exit))
        self.bound_s = np.inf
        self.least_bytes = self._potentials({kind: kind.values[None, :, STANDING] for kind in kinds})[:, 0]
        if self.least_bytes[0, 0] <= room:
            self._price(kinds)
            self.exposed = self._most_exposed()

    def _most_exposed(self) -> list[float]:
        """(units + 1,) most seconds that synchronisation from each unit on adds to what is outstanding before it."""
        found = [0.0]
        for kind in reversed(self.units):
            found.append(max(float(kind.values[:, LEFT].max()), float(kind.values[:, BEHIND].max()) + found[-1]))
        return found[::-1]

    def _potentials(self, costs: dict[_Kind, FloatArray]) -> FloatArray:
        """(units + 1, prices, states) least sum of costs (prices, ways) from each unit and entry state on."""
        steps = {kind: _step(kind, cost, self.width) for kind, cost in costs.items()}
        found = np.full((len(self.units) + 1, len(next(iter(costs.values()))), self.width), np.inf)
        found[-1, :, 0] = 0.0
        for unit in reversed(range(len(self.units))):
            found[unit] = (steps[self.units[unit]] + found[unit + 1][:, None, :]).min(axis=2)
        return found

    def _price(self, kinds: list[_Kind]) -> None:
        """Set prices around the one whose bound is largest, and keep what completions cost at some of them."""
        seconds = sum(float(np.ptp(kind.values[:, TIME])) for kind in kinds)
        held = sum(float(np.ptp(kind.values[:, STANDING])) for kind in kinds)
        scale = seconds / held if held > 0 and seconds > 0 else 0.0
        prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, PRICES - 1)])
        for _ in range(ROUNDS if scale else 1):
            plain = {k: k.values[:, TIME] + prices[:, None] * k.values[:, STANDING] for k in kinds}
            waiting = {k: cost + k.values[:, BEHIND] for k, cost in plain.items()}
            potentials = [self._potentials(costs) for costs in (plain, waiting)]
            bounds = np.maximum(potentials[0][0, :, 0], potentials[1][0, :, 0]) - prices * self.room
            top = int(np.argmax(bounds))
            low, high = max(top - 1, 0), min(top + 1, len(prices) - 1)
            kept = np.unique([0, low, top, high])
            self.bound_s = float(bounds[top])
            self.prices, self.plain, self.waiting = prices[kept], potentials[0][:, kept], potentials[1][:, kept]
            if top == 0 and bounds[0] >= bounds[1:].max(initial=-np.inf):
                break
            prices = np.unique(np.concatenate([[0.0, prices[top]], np.linspace(prices[low], prices[high], PRICES)]))

    def followed(self, best: _Choice | None, beam: int) -> tuple[_Choice | None, float]:
        """The best choice among those known and `beam` ways a state, and a bound on what was left out."""
        limit_s = np.inf if best is None else best.seconds * (1 - CLOSE)
        values, state, left_out = np.zeros((1, 4)), np.zeros(1, dtype=np.int64), np.inf
        history: list[tuple[IntArray, IntArray]] = []
        for unit, kind in enumerate(self.units):
            before, way = np.nonzero(state[:, None] == kind.entry[None, :])
            values = self._after(values[before], kind.values[way], unit)
            state = kind.exit[way]
            bound = self._bound(values, state, unit + 1)
            rows, dropped = _kept(values, state, bound, np.flatnonzero(bound < limit_s), beam)
            left_out = min(left_out, dropped)
            if not len(rows):
                return best, left_out
            history.append((before[rows], kind.number[way[rows]]))
            values, state = values[rows], state[rows]
        seconds = values[:, TIME] + values[:, LEFT]
        row = int(np.argmin(seconds))
        found, ways = float(seconds[row]), []
        for earlier, numbers in reversed(history):
            ways.append(int(numbers[row]))
            row = int(earlier[row])
        return _Choice(np.array(ways[::-1]), found), left_out

    def _after(self, before: FloatArray, own: FloatArray, unit: int) -> FloatArray:
        """Values of ways with one more unit; outstanding messages that no completion can expose count alike."""
        values = before + own
        values[:, LEFT] = np.maximum(before[:, LEFT], before[:, BEHIND] + own[:, LEFT])
        values[:, BEHIND] = np.maximum(values[:, BEHIND], values[:, LEFT] - self.exposed[unit + 1])
        return values

    def _bound(self, values: FloatArray, state: IntArray, unit: int) -> FloatArray:
        """Least seconds of any completion, infinite where none fits."""
        room = self.room - values[:, STANDING]
        priced = self.prices[:, None] * room
        plain = (self.plain[unit][:, state] - priced).max(axis=0)
        waiting = (self.waiting[unit][:, state] - priced).max(axis=0)
        bound = values[:, TIME] + np.maximum(values[:, LEFT] + plain, values[:, BEHIND] + waiting)
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
