"""Deciding variables one after the other: what recursive programming and sharding propagation share.

A *round* decides the placements along one mesh axis while those along the others stay. The variables that a round
may pass over are folded into tables between their neighbours (min-plus elimination of variables with at
most two neighbours, which is exact); the others are decided in a given order, each at least cost to what is decided
already, with the best that every undecided neighbour could answer. A round is linear in the number of tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.search.problem.layered_tables import LayeredTables
from planner.search.problem.problem import Solution
from planner.search.problem.variables import Kind
from planner.sharding.placement import REPLICATE

Table = NDArray[np.float64]
Indices = NDArray[np.intp]

MOST_ENTRIES = 4_000_000
"""Entries a table between three variables may have; larger ones are left to be decided in order."""

PROGRESS = 1e-9
"""Part of the total that a round has to save to count as help."""

SWEEPS = 3
"""Times that the rounds along all axes are gone through."""

PATIENCE = 2
"""Rounds in a row without help that end those of an axis."""


@dataclass(frozen=True, slots=True)
class _Passed:
    """A variable that was folded: its best state for each state of its neighbours in `around`."""

    variable: int
    around: tuple[int, ...]
    best: Indices


class Round:
    """Variables with a few candidates each, and tables between those candidates."""

    def __init__(self, unary: Mapping[int, Table], pairs: Mapping[tuple[int, int], Table]) -> None:
        self.unary = dict(unary)
        self.tables: dict[int, dict[int, Table]] = {v: {} for v in unary}
        for (i, j), table in pairs.items():
            self.tables[i][j] = table
            self.tables[j][i] = table.T
        self.decided: dict[int, int] = {}
        self.in_order: list[int] = []
        self._passed: list[_Passed] = []

    def decide(
        self, order: Sequence[int], late: Collection[int], kept: Mapping[int, int] | None = None
    ) -> dict[int, int]:
        """Candidates chosen, by variable, in `order`; those in `late` may not be folded before their turn.

        With `kept`, candidates that the variables have, what cannot be folded keeps its own: everything else is
        then best for it, so no round makes the total worse.
        """
        waiting = set(late)
        queue = [v for v in self.unary if v not in waiting]
        self._fold(queue, waiting)
        for variable in order:
            if variable not in self.unary:
                continue
            waiting.discard(variable)
            neighbours = self._fix(variable, self._best(variable) if kept is None else kept[variable])
            self._fold([n for n in neighbours if n not in waiting], waiting)
        for step in reversed(self._passed):
            at = tuple(self.decided[n] for n in step.around)
            self.decided[step.variable] = int(step.best[at])
        return self.decided

    def _best(self, variable: int) -> int:
        cost = self.unary[variable].copy()
        for other, table in self.tables[variable].items():
            cost += (table + self.unary[other]).min(axis=1)
        return int(cost.argmin())

    def _fix(self, variable: int, candidate: int) -> list[int]:
        """Decide a variable: its tables become costs of its neighbours alone."""
        self.decided[variable] = candidate
        self.in_order.append(variable)
        del self.unary[variable]
        neighbours = self.tables.pop(variable)
        for other, table in neighbours.items():
            del self.tables[other][variable]
            self.unary[other] = self.unary[other] + table[candidate]
        return list(neighbours)

    def _fold(self, queue: list[int], waiting: Collection[int]) -> None:
        """Eliminate variables with at most two neighbours, as long as there are any."""
        while queue:
            v = queue.pop()
            if v not in self.unary or len(self.tables[v]) > 2:
                continue
            around = tuple(self.tables[v])
            sizes = [len(self.unary[n]) for n in (v, *around)]
            if prod(sizes) > MOST_ENTRIES:
                continue
            self._eliminate(v, around)
            queue += [n for n in around if n not in waiting]

    def _eliminate(self, v: int, around: tuple[int, ...]) -> None:
        own = self.unary.pop(v)
        tables = [self.tables[n].pop(v) for n in around]
        del self.tables[v]
        if not around:
            self._passed.append(_Passed(v, around, np.array(own.argmin())))
            return
        total = tables[0] + own
        if len(around) == 1:
            best = total.argmin(axis=1)
            self.unary[around[0]] = self.unary[around[0]] + total.min(axis=1)
        else:
            joint = total[:, None, :] + tables[1][None, :, :]
            best = joint.argmin(axis=2)
            made = joint.min(axis=2)
            one, two = around
            if two in self.tables[one]:
                made = made + self.tables[one][two]
            self.tables[one][two] = made
            self.tables[two][one] = made.T
        self._passed.append(_Passed(v, around, best))


class Descent:
    """States of all instances of a problem, improved round by round at one price of memory.

    Parameters
    ----------
    tables : LayeredTables
    price : float
        Seconds per byte.
    allowed : mapping of int to array of bool, optional
        States that an instance may take, shape (states,), for those that are restricted.
    """

    def __init__(
        self, tables: LayeredTables, price: float = 0.0, allowed: Mapping[int, NDArray[np.bool_]] | None = None
    ) -> None:
        self.tables = tables
        self.price = price
        self.allowed = allowed or {}
        self.unary = [c.time + price * c.memory for c in tables.unary]
        for i, mask in self.allowed.items():
            self.unary[i] = np.where(mask, self.unary[i], np.inf)
        self.pairs = {k: c.time if price == 0 else c.time + price * c.memory for k, c in tables.pairs.items()}

    def total(self, states: Sequence[int]) -> float:
        """Price of a state for every instance: seconds, and bytes at their price."""
        own = sum(float(table[s]) for table, s in zip(self.unary, states, strict=True))
        return own + sum(float(table[states[i], states[j]]) for (i, j), table in self.pairs.items())

    def candidates(self, instance: int, axis: int, state: int) -> Indices:
        """States of an instance that differ from `state` along mesh axis `axis` alone, itself included."""
        variable = self.tables.instances[instance].variable
        states, known = self.tables.problem.states[variable], self.tables.alike
        key = (variable, axis)
        if key not in known:
            others = np.zeros(states.choice.shape[1], dtype=np.int64)
            for row in np.delete(states.choice, axis, axis=0):
                others = others * (int(row.max(initial=0)) + 1) + row
            groups = {number: np.flatnonzero(others == number) for number in set(others.tolist())}
            known[key] = [groups[number] for number in others.tolist()]
        found = known[key][state]
        return found if instance not in self.allowed else found[self.allowed[instance][found] | (found == state)]

    def round(
        self, states: Sequence[int], order: Sequence[int], late: Collection[int], axis: int | None, keep: bool = False
    ) -> tuple[list[int], list[int]]:
        """One round along `axis`, or along all at once where it is None.

        Returns
        -------
        states : list of int
            New states of all instances.
        decided : list of int
            Instances that could not be folded.
        """
        chosen = [self._open(i, axis, s) for i, s in enumerate(states)]
        free = {i for i, c in enumerate(chosen) if len(c) > 1}
        unary = {i: self.unary[i][chosen[i]] for i in free}
        pairs = {}
        for (i, j), table in self.pairs.items():
            if i in free and j in free:
                pairs[i, j] = table[chosen[i][:, None], chosen[j]]
            elif i in free:
                unary[i] = unary[i] + table[chosen[i], states[j]]
            elif j in free:
                unary[j] = unary[j] + table[states[i], chosen[j]]
        kept = {i: int(chosen[i].searchsorted(states[i])) for i in free} if keep else None
        work = Round(unary, pairs)
        decided = work.decide([v for v in order if v in free], [v for v in late if v in free], kept)
        return [int(chosen[i][decided[i]]) if i in free else s for i, s in enumerate(states)], work.in_order

    def settle(self, states: Sequence[int], order: Sequence[int], sweeps: int) -> list[int]:
        """Rounds that keep what cannot be folded, until none helps: along each axis, then along all together.

        An axis has as many as its size has prime factors. What was kept least often is kept next, so every variable
        gets its turn to be folded; the total never rises.
        """
        best, total = list(states), self.total(states)
        times = dict.fromkeys(order, 0)
        place = {v: n for n, v in enumerate(order)}
        for _ in range(sweeps):
            before = total
            for axis, count in self._rounds():
                idle = 0
                for _ in range(count):
                    turn = sorted(order, key=lambda v: (times[v], place[v]))
                    found, kept = self.round(best, turn, (), axis, keep=True)
                    times.update((v, times[v] + 1) for v in kept)
                    now = self.total(found)
                    idle = 0 if now < total * (1 - PROGRESS) else idle + 1
                    if now < total:
                        best, total = found, now
                    if idle == PATIENCE:
                        break
            if total >= before * (1 - PROGRESS):
                break
        return best

    def _rounds(self) -> list[tuple[int | None, int]]:
        axes = self.tables.problem.setting.costs.mesh.axes
        rounds: list[tuple[int | None, int]] = [(a, len(prime_factors(x.size))) for a, x in enumerate(axes)]
        return [*rounds, (None, max(count for _, count in rounds))] if len(axes) > 1 else rounds

    def search(self, by_weight: Sequence[int], by_distance: Sequence[int], late: Collection[int]) -> list[int]:
        """The best of three openings, each settled.

        Along one axis after the other, heaviest first; and along all axes at once in the order of `by_distance`, with
        everything decided in its turn, and with only `late` not folded before its turn.
        """
        start = [self._allowed(instance, state) for instance, state in enumerate(unsplit(self.tables))]
        openings = [self._axis_by_axis(start, by_weight)]
        openings += [self.round(start, by_distance, waiting, None)[0] for waiting in (by_distance, late)]
        settled = [self.settle(states, by_weight, 1) for states in openings]
        return self.settle(min(settled, key=self.total), by_weight, SWEEPS)

    def _allowed(self, instance: int, state: int) -> int:
        """The state, or the cheapest that is allowed: several axes may have to change for it."""
        mask = self.allowed.get(instance)
        return state if mask is None or mask[state] else int(self.unary[instance].argmin())

    def _axis_by_axis(self, start: Sequence[int], order: Sequence[int]) -> list[int]:
        """Decide every axis, outermost first, with light operators folded and then without."""
        states, total = list(start), self.total(start)
        for late in ((), order):
            for axis in range(len(self.tables.problem.setting.costs.mesh.axes)):
                found, _ = self.round(states, order, late, axis)
                now = self.total(found)
                if now < total or not np.isfinite(total):
                    states, total = found, now
        return states

    def _open(self, instance: int, axis: int | None, state: int) -> Indices:
        if axis is not None:
            return self.candidates(instance, axis, state)
        mask = self.allowed.get(instance)
        return np.arange(self.tables.size(instance)) if mask is None else np.flatnonzero(mask)


def prime_factors(number: int) -> list[int]:
    """Prime factors in ascending order.

    >>> prime_factors(96), prime_factors(1), prime_factors(4093)
    ([2, 2, 2, 2, 2, 3], [], [4093])
    """
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors + [number] * (number > 1)


def by_weight(tables: LayeredTables) -> list[int]:
    """Instances, those with the most seconds of unsplit work first, ties by number."""
    weights = tables.weights()
    return [int(i) for i in np.argsort(-weights, kind="stable")]


def by_distance(tables: LayeredTables, seeds: Iterable[int]) -> list[int]:
    """Instances by their distance from the seeds and the inputs of the network, then by weight; seeds first."""
    kinds = [tables.problem.states[instance.variable].variable.kind for instance in tables.instances]
    first = dict.fromkeys(seeds)
    distance = dict.fromkeys([*first, *(i for i, kind in enumerate(kinds) if kind is Kind.INPUT)], 0)
    queue = deque(distance)
    while queue:
        here = queue.popleft()
        for other in tables.neighbours[here]:
            if other not in distance:
                distance[other] = distance[here] + 1
                queue.append(other)
    place = {v: n for n, v in enumerate(by_weight(tables))}
    far = len(kinds)
    return sorted(range(len(kinds)), key=lambda i: (i not in first, distance.get(i, far), place[i]))


def unsplit(tables: LayeredTables) -> list[int]:
    """For each instance the state that replicates along the most axes."""
    known: dict[int, int] = {}
    for instance in tables.instances:
        if instance.variable not in known:
            states = tables.problem.states[instance.variable]
            whole = np.array(
                [all(p == REPLICATE for p in (*c.reads.values(), *c.writes.values())) for c in states.variable.choices]
            )
            known[instance.variable] = int(whole[states.choice].sum(axis=0).argmax())
    return [known[instance.variable] for instance in tables.instances]


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
