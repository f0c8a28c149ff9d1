"""Units of one rank one by one whose standing bytes have so much room: bounds at prices of a byte, and ways through.

A price of a byte (Lagrange; Handler and Zang, Networks 10, 1980) bounds what any completion costs. Exposed
synchronisation is at least what any one unit leaves behind those before it, so that it counts in the sum up to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from planner.search.stages.byte_grid import LONG, ByteGrid, GridKind, spacing_of
from planner.search.stages.fragments import FloatArray, IntArray, dominated, least_of
from planner.search.stages.segments import ROUNDING, BoolArray

PRICES = 16
"""Prices of a byte that are tried at once."""
ROUNDS = 3
"""How often the prices are set closer to the best one."""
LIKELY = 1e-3
"""Ways with which a choice takes at most so much longer than the bound say how bytes are spaced."""
TIME, LEFT, BEHIND, STANDING = range(4)
"""Columns of a way: seconds, exposed and outstanding synchronisation, standing bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class PricedWays:
    """Ways of one unit: values (ways, 4), bytes while it goes backward, places of its states, numbers in the task."""

    values: FloatArray
    peak: FloatArray
    entry: IntArray
    exit: IntArray
    number: IntArray

    def below(self, peak: float) -> PricedWays:
        """Those that need at most so much while the unit goes backward."""
        rows = np.flatnonzero(self.peak <= peak)
        return PricedWays(self.values[rows], self.peak[rows], self.entry[rows], self.exit[rows], self.number[rows])


@dataclass(frozen=True, slots=True, eq=False)
class ChosenWays:
    """The way of every unit, (units,) numbers in its kind, their seconds, and both kinds of bytes."""

    ways: IntArray
    seconds: float
    standing: float
    peak: float


class PricedChain:
    """Units one by one whose standing bytes have so much room, and the least that those behind any of them cost.

    ``bound_s`` bounds every choice, infinite where none fits, and ``binds`` says whether a byte has a price.
    """

    def __init__(self, kinds: list[PricedWays], counts: tuple[int, ...], room: float) -> None:
        self.kinds, self.counts = kinds, counts
        self.numbers = np.repeat(np.arange(len(kinds)), counts)
        self.units = [kinds[number] for number in self.numbers.tolist()]
        self.room, self.binds = room, False
        self.width = 1 + max(int(side.max(initial=0)) for kind in kinds for side in (kind.entry, kind.exit))
        self.between = [least_of(kind.entry * self.width + kind.exit, self.width**2) for kind in kinds]
        self.bound_s = np.inf
        most = np.array([kind.values[:, STANDING].max(initial=0.0) for kind in kinds])
        self.most_bytes = np.append(0.0, np.cumsum(most[self.numbers[::-1]]))[::-1]
        held = [step(kind.values[:, STANDING]) for step, kind in zip(self.between, kinds, strict=True)]
        self.standing = [each.reshape(self.width, self.width) for each in held]
        least = np.full((1, self.width), np.inf)
        least[0, 0] = 0.0
        for step, count in zip(reversed(self.standing), reversed(counts), strict=True):
            least = _ahead(step[None], count, least)
        if least[0, 0] <= room:
            self._price()

    @cached_property
    def least_bytes(self) -> FloatArray:
        """(units + 1, states) least standing bytes from each unit and entry state on."""
        found = np.full((len(self.units) + 1, 1, self.width), np.inf)
        found[-1, :, 0] = 0.0
        _fill_behind(found, [(step[None], count) for step, count in zip(self.standing, self.counts, strict=True)])
        return found[:, 0]

    @cached_property
    def least_left(self) -> list[float]:
        """(units + 1,) seconds that synchronisation from each unit on leaves at least."""
        return self._exposed(np.min)

    @cached_property
    def most_left(self) -> list[float]:
        """(units + 1,) seconds that it leaves at most."""
        return self._exposed(np.max)

    def _exposed(self, pick: Callable[[FloatArray], float]) -> list[float]:
        each = [(float(pick(kind.values[:, LEFT])), float(pick(kind.values[:, BEHIND]))) for kind in self.kinds]
        found = [0.0]
        for number in reversed(self.numbers.tolist()):
            left, behind = each[number]
            found.append(max(left, behind + found[-1]))
        return found[::-1]

    @cached_property
    def potentials(self) -> FloatArray:
        """(units + 1, rows, states) least sum from each unit and entry state on, a row for each price kept.

        Seconds and priced bytes, and what the synchronisation of units up to the last one leaves to do behind it.
        """
        found = np.full((len(self.units) + 1, len(self.prices), self.width), np.inf)
        found[-1, :, 0] = 0.0
        _fill_behind(found, self._rows(self.prices, self.last))
        return found

    def _rows(self, prices: FloatArray, last: IntArray) -> list[tuple[FloatArray, int]]:
        """(rows, entries, exits) least cost of one unit between its boundary states, and of how many in a row.

        Of `prices` and `last` (rows,), in the order of the network.
        """
        units = np.arange(len(self.units))[:, None]
        keys = np.stack([self.numbers, (units < last).sum(axis=1), (units == last).sum(axis=1)], axis=1)
        begins = np.flatnonzero(np.concatenate([[True], np.any(keys[1:] != keys[:-1], axis=1)]))
        tables: dict[int, list[FloatArray]] = {}
        found = []
        for begin, end in zip(begins.tolist(), [*begins[1:].tolist(), len(units)], strict=True):
            number = int(self.numbers[begin])
            if number not in tables:
                tables[number] = self._tables(number, prices)
            before, at, after = tables[number]
            early, here = (begin < last)[:, None, None], np.equal(last, begin)[:, None, None]
            found.append((np.where(early, before, np.where(here, at, after)), end - begin))
        return found

    def _tables(self, number: int, prices: FloatArray) -> list[FloatArray]:
        """Least costs of a kind (rows, entries, exits) before the last unit that is waited for, at it and behind it."""
        kind = self.kinds[number]
        cost = kind.values[:, TIME] + prices[:, None] * kind.values[:, STANDING]
        costs = np.stack([cost + kind.values[:, BEHIND], cost + kind.values[:, LEFT], cost])
        return list(self.between[number](costs).reshape(3, -1, self.width, self.width))

    def _bounds(self, prices: FloatArray, last: IntArray) -> FloatArray:
        """(rows,) least sum of the whole chain."""
        found = np.full((len(prices), self.width), np.inf)
        found[:, 0] = 0.0
        for table, count in reversed(self._rows(prices, last)):
            found = _ahead(table, count, found)
        whole: FloatArray = found[:, 0]
        return whole

    @cached_property
    def _arrivals(self) -> FloatArray:
        """(units + 1, rows, states) as the potentials, of the units before each."""
        found = np.full_like(self.potentials, np.inf)
        found[0, :, 0] = 0.0
        _fill_before(found, self._rows(self.prices, self.last))
        return found

    def _worthy(self, number: int, units: slice, limit_s: float) -> BoolArray:
        """(ways,) whether a choice with a way in one of some units of a kind may take less than `limit_s`."""
        kind = self.kinds[number]
        if np.isinf(limit_s):
            return np.ones(len(kind.values), dtype=np.bool_)
        after = self.last < np.arange(units.start, units.stop)[:, None]
        at = np.equal(self.last, np.arange(units.start, units.stop)[:, None])
        queue = np.where(after[:, :, None], 0.0, np.where(at[:, :, None], kind.values[:, LEFT], kind.values[:, BEHIND]))
        own = kind.values[:, TIME] + self.prices[:, None] * kind.values[:, STANDING] + queue
        least = self._arrivals[units].take(kind.entry, axis=2) + own
        least += self.potentials[units.start + 1 : units.stop + 1].take(kind.exit, axis=2)
        worthy: BoolArray = ((least - self.prices[:, None] * self.room).max(axis=1) < limit_s).any(axis=0)
        return worthy

    def _price(self) -> None:
        """Set prices around the one whose bound is largest, and keep some of them.

        Exposed synchronisation is at least what any one unit leaves behind those before it: that of the unit that
        bounds most and none are tried.
        """
        lasts = np.unique([-1, self._waited_for()])
        seconds = sum(float(np.ptp(kind.values[:, TIME])) for kind in self.kinds)
        held = sum(float(np.ptp(kind.values[:, STANDING])) for kind in self.kinds)
        scale = seconds / held if held > 0 and self.most_bytes[0] > self.room else 0.0
        prices = np.concatenate([[0.0], scale * np.geomspace(1e-3, 1e3, PRICES - 1)]) if scale else np.zeros(1)
        for _ in range(ROUNDS):
            each_price, each_last = np.repeat(prices, len(lasts)), np.tile(lasts, len(prices))
            bounds = self._bounds(each_price, each_last) - each_price * self.room
            place = int(np.argmax(bounds)) // len(lasts)
            low, high = max(place - 1, 0), min(place + 1, len(prices) - 1)
            kept = np.flatnonzero(np.isin(each_price, prices[[0, low, place, high]]))
            self.bound_s, self.binds = float(bounds.max()), place > 0
            self.prices, self.last = each_price[kept], each_last[kept]
            if low == high:
                break
            prices = np.unique([0.0, prices[place], *np.linspace(prices[low], prices[high], PRICES)])

    def _waited_for(self) -> int:
        """The unit behind whose synchronisation every choice takes longest at least, memory aside; -1 where none is."""
        tables = [self._tables(number, np.zeros(1)) for number in range(len(self.kinds))]
        befores, ats, afters = ([each[n] for each in tables] for n in range(3))
        arrived, rest = np.full((2, len(self.units) + 1, 1, self.width), np.inf)
        arrived[0, 0, 0] = rest[-1, 0, 0] = 0.0
        _fill_before(arrived, list(zip(befores, self.counts, strict=True)))
        _fill_behind(rest, list(zip(afters, self.counts, strict=True)))
        at = np.concatenate(ats)[self.numbers]
        each = (arrived[:-1, 0, :, None] + at + rest[1:, 0, None, :]).min(axis=(1, 2))
        return int(np.argmax(np.append(rest[0, 0, 0], each))) - 1

    def followed(self, limit_s: float, beam: int) -> tuple[ChosenWays | None, float]:
        """The best choice below `limit_s` with `beam` ways a state, if any, and a bound on what was left out."""
        values, state, left_out = np.zeros((1, 4)), np.zeros(1, dtype=np.int64), np.inf
        history: list[tuple[IntArray, IntArray]] = []
        for unit, kind in enumerate(self.units):
            worth = np.flatnonzero(self._worthy(int(self.numbers[unit]), slice(unit, unit + 1), limit_s))
            before, way = np.nonzero(state[:, None] == kind.entry[None, worth])
            way = worth.take(way)
            # `take` gathers rows in half the time that an index takes.
            values = self._after(values.take(before, axis=0), kind.values.take(way, axis=0), unit)
            state = kind.exit.take(way)
            bound = self._bound(values, state, unit + 1)
            rows, dropped = _kept(values, state, bound, np.flatnonzero(bound < limit_s), beam)
            left_out = min(left_out, dropped)
            if not len(rows):
                return None, left_out
            history.append((before.take(rows), way.take(rows)))
            values, state = values.take(rows, axis=0), state.take(rows)
        row = int(np.argmin(values[:, TIME] + values[:, LEFT]))
        ways = []
        for earlier, picks in reversed(history):
            ways.append(int(picks[row]))
            row = int(earlier[row])
        return self._chosen(ways[::-1]), left_out

    def _chosen(self, ways: Sequence[int]) -> ChosenWays:
        picked = list(zip(self.kinds, np.split(np.array(ways), np.cumsum(self.counts)[:-1]), strict=True))
        values = np.concatenate([kind.values.take(own, axis=0) for kind, own in picked])
        behind = np.cumsum(values[:, BEHIND]) - values[:, BEHIND]
        return ChosenWays(
            ways=np.concatenate([kind.number.take(own) for kind, own in picked]),
            seconds=float(values[:, TIME].sum() + max(0.0, float((behind + values[:, LEFT]).max()))),
            standing=float(values[:, STANDING].sum()),
            peak=max(float(kind.peak.take(own).max()) for kind, own in picked),
        )

    def straight(self) -> ChosenWays:
        """The choice that takes least where a byte has no price."""
        free = np.where(self.prices == 0.0, self.potentials[0, :, 0], -np.inf)
        row, state, ways, begin = int(np.argmax(free)), 0, [], 0
        for number, count in enumerate(self.counts):
            kind, units = self.kinds[number], np.arange(begin, begin + count)[:, None]
            queue = np.where(units == self.last[row], kind.values[:, LEFT], kind.values[:, BEHIND])
            own = kind.values[:, TIME] + np.where(units <= self.last[row], queue, 0.0)
            rest = own + self.potentials[begin + 1 : begin + count + 1, row].take(kind.exit, axis=1)
            entered = np.where(kind.entry == np.arange(self.width)[:, None], rest[:, None, :], np.inf)
            leave = kind.exit.tolist()
            for picks in entered.argmin(axis=2).tolist():
                ways.append(picks[state])
                state = leave[picks[state]]
            begin += count
        return self._chosen(ways)

    # Evenly spaced bytes

    @cached_property
    def spacing(self) -> float:
        """How far apart the bytes of likely ways lie; negative where they are not evenly spaced, or without a price."""
        found = spacing_of(self._grid_kinds) if self.binds and max(self.counts) >= LONG else None
        return -1.0 if found is None else found

    @cached_property
    def _grid_kinds(self) -> list[GridKind]:
        limit_s, found, begin = self.bound_s * (1 + LIKELY), [], 0
        for number, (kind, count) in enumerate(zip(self.kinds, self.counts, strict=True)):
            worthy = self._worthy(number, slice(begin, begin + count), limit_s)
            # Each price may leave out others.
            likely = np.flatnonzero(worthy if worthy.any() else ~worthy)
            found.append(GridKind(kind.values[:, STANDING], kind.entry, kind.exit, count, likely))
            begin += count
        return found

    def spaced(self, limit_s: float) -> tuple[list[ChosenWays], float]:
        """Choices from a table over evenly spaced bytes, and a bound on all choices below `limit_s`."""
        costs = self._costs(limit_s)
        if not all(np.isfinite(cost).any() for cost in costs):
            return [], np.inf  # some unit has no way with which a choice takes less
        grid = ByteGrid(self._grid_kinds, costs, self.spacing, self.room)
        if not grid.small:
            return [], self.bound_s
        grid.fill()
        least = grid.best()
        if least is None:
            return [], np.inf
        choices = [self._chosen(least[1])]
        if choices[0].standing > self.room and (smaller := grid.best(fewer=1)) is not None:
            choices.append(self._chosen(smaller[1]))
        return choices, least[0]

    def _costs(self, limit_s: float) -> list[FloatArray]:
        """(units,) seconds of the ways of each with the wait that bounds most, infinite beyond the limit."""
        last = int(self.last[int(np.argmax(self.potentials[0, :, 0] - self.prices * self.room))])
        found: list[FloatArray] = []
        begin = 0
        for number, (kind, count) in enumerate(zip(self.kinds, self.counts, strict=True)):
            worth = self._worthy(number, slice(begin, begin + count), limit_s)
            time = np.where(worth, kind.values[:, TIME], np.inf)
            before, at = time + kind.values[:, BEHIND], time + kind.values[:, LEFT]
            places = range(begin, begin + count)
            found += [before if unit < last else at if unit == last else time for unit in places]
            begin += count
        return found

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
        ahead = self.potentials[unit].take(state, axis=1) + behind - self.prices[:, None] * room
        bound = values[:, TIME] + ahead.max(axis=0)
        least: FloatArray = np.where(self.least_bytes[unit].take(state) <= room, bound, np.inf)
        return least


def _ahead(table: FloatArray, count: int, rest: FloatArray) -> FloatArray:
    """(rows, entries) least cost of `count` equal units (rows, entries, exits) and of the rest (rows, exits)."""
    while True:
        if count & 1:
            rest = (table + rest[:, None, :]).min(axis=2)
        count >>= 1
        if not count:
            return rest
        table = (table[:, :, :, None] + table[:, None, :, :]).min(axis=2)


def _fill_behind(found: FloatArray, runs: Sequence[tuple[FloatArray, int]]) -> None:
    """Set the least costs (units + 1, rows, states) from each unit on, of which the last ones are there."""
    unit = len(found) - 1
    for table, count in reversed(runs):
        found[unit - count : unit + 1] = _each_ahead(table, count, found[unit])[::-1]
        unit -= count


def _fill_before(found: FloatArray, runs: Sequence[tuple[FloatArray, int]]) -> None:
    """Set the least costs (units + 1, rows, states) up to each unit, of which the first ones are there."""
    unit = 0
    for table, count in runs:
        found[unit : unit + count + 1] = _each_ahead(table.transpose(0, 2, 1), count, found[unit])
        unit += count


def _each_ahead(table: FloatArray, count: int, rest: FloatArray) -> FloatArray:
    """(count + 1, rows, entries) as `_ahead`, of none of the equal units, of the last one, and so on."""
    found = rest[None]
    while len(found) <= count:
        more = (table + found[: count + 1 - len(found), :, None, :]).min(axis=3)
        found = np.concatenate([found, more])
        table = (table[:, :, :, None] + table[:, None, :, :]).min(axis=2)
    return found


def _kept(values: FloatArray, state: IntArray, bound: FloatArray, rows: IntArray, beam: int) -> tuple[IntArray, float]:
    """Rows that no other one in the same state beats, at most `beam` in each, and the least bound of the others."""
    found, left_out = [rows[:0]], np.inf
    states = state[rows]
    for place in np.flatnonzero(np.bincount(states)).tolist():
        same = rows[states == place]
        if len(same) > 4 * beam:
            order = np.argsort(bound.take(same), kind="stable")
            left_out = min(left_out, float(bound[same[order[4 * beam]]]))
            same = np.sort(same[order[: 4 * beam]])
        same = same.take(_unbeaten(values.take(same, axis=0)))
        if len(same) > beam:
            order = np.argsort(bound.take(same), kind="stable")
            left_out = min(left_out, float(bound[same[order[beam]]]))
            same = same[order[:beam]]
        found.append(same)
    return np.concatenate(found), left_out


def _unbeaten(values: FloatArray) -> IntArray:
    """Rows that no other one beats, as `dominated` has it, in lexical order."""
    order: IntArray = np.lexsort(values.T[::-1])
    return order[~dominated(values.take(order, axis=0))]
