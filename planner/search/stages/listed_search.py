"""Several chunks a rank on a short chain of unlike units: the cuts that take least, and ways to run their units.

Every cut is listed with the least that its chunks take (`planner.search.stages.listed_cuts`). For those that take
least the ways of the units follow by dynamic programming over their boundary states: weights of the ranks, which grow
where a rank is busier than others, price its seconds, and where memory binds a byte has a price as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.chain_bound import cheapest_rows
from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    FILL,
    QUEUE,
    RESIDENT,
    STEADY,
    TRANSIENT,
    FloatArray,
    Fragments,
    IntArray,
)
from planner.search.stages.listed_cuts import listed_cuts, listed_s
from planner.search.stages.segments import ROUNDING
from planner.search.stages.task import Partition, PartitionTask, memory_bytes, step_s

LISTED = 48
"""Cuts with the least bounds whose turns are looked at."""
TRIED = 6
"""Of these, cuts for which ways are chosen."""
ROUNDS = 8
"""How often the weights of the ranks are moved."""
STEP = 2.0
"""How much more a rank counts that is busy for twice the mean."""
_PRICES = np.geomspace(1e-3, 1e2, 11)
"""Prices of all bytes of the greediest unit, in seconds of the longest, that are tried where memory binds."""


def listed_partition(task: PartitionTask) -> Partition | None:
    """A partition of a chain whose cuts are few; None where none was found that fits.

    Its bound is the least of all cuts, memory and what turns of unequal length cost aside.
    """
    busy, fill = cheapest_rows(task)
    first, last = listed_cuts(task.units, task.pieces)
    seconds = np.where(_allowed(task, last), listed_s(busy, fill, task.rank_of, task.uneven_s is None), np.inf)
    order = np.argsort(seconds, kind="stable")[:LISTED]
    order = order[np.isfinite(seconds[order])]
    hoped = []
    for cut in order.tolist():
        place = (first[:, cut], last[:, cut])
        hoped.append(max(seconds[cut], step_s(task, fill[place], busy[place], fill[place] + busy[place])))
    best: Partition | None = None
    chain = _Chain(task)
    for number in np.argsort(hoped, kind="stable")[:TRIED].tolist():
        if best is not None and hoped[number] >= best.objective_s:
            break
        for found in chain.partitions(first[:, order[number]].tolist(), float(seconds.min())):
            if best is None or found.objective_s < best.objective_s:
                best = found
    return best


def _allowed(task: PartitionTask, last: IntArray) -> NDArray[np.bool_]:
    """(cuts,) those that pins leave."""
    allowed = np.ones(last.shape[1], dtype=np.bool_)
    for cut, places in enumerate(task.cuts):
        allowed &= (last[cut] + 1 >= places.start) & (last[cut] + 1 < places.stop)
    return allowed


class _Chain:
    """Units one by one, and ways to run them for given cuts."""

    def __init__(self, task: PartitionTask) -> None:
        self.task = task
        states = np.unique(np.concatenate([[-1], *(side for k in task.kinds for side in (k.entry, k.exit))]))
        self.width = len(states)
        self.kinds: list[Fragments] = [k for k, n in zip(task.kinds, task.counts, strict=True) for _ in range(n)]
        places = {id(k): (np.searchsorted(states, k.entry), np.searchsorted(states, k.exit)) for k in task.kinds}
        self.places = [places[id(kind)] for kind in self.kinds]
        seconds = max(float(np.ptp(kind.values[:, [FILL, STEADY]].sum(axis=1))) for kind in task.kinds)
        held = max(float(np.ptp(kind.values[:, ACTIVATION])) for kind in task.kinds)
        self.price = seconds / held if held > 0 else 0.0

    def partitions(self, begins: Sequence[int], bound_s: float) -> Iterator[Partition]:
        """Partitions that fit with chunks that begin at those units."""
        task = self.task
        for price in (0.0, *(self.price * _PRICES)):
            weights, any_fits = np.full(task.ranks, 1.0 / task.ranks), False
            for _ in range(ROUNDS):
                ways = self._ways(begins, weights, price)
                if ways is None:
                    return
                values = self._values(begins, ways)
                if np.all(memory_bytes(task, values) <= task.limit_bytes * (1 + ROUNDING)):
                    any_fits = True
                    yield self._made(begins, ways, values, bound_s)
                busy = np.bincount(task.rank_of, _busy(values), task.ranks)
                weights = weights * (busy / max(float(busy.mean()), 1e-30)) ** STEP
                weights /= max(float(weights.sum()), 1e-30)
            if any_fits or (not price and not self.price):
                return

    def _ways(self, begins: Sequence[int], weights: FloatArray, price: float) -> list[int] | None:
        """Way of every unit with the least weighted seconds and priced bytes."""
        task = self.task
        reached, picks = np.full(self.width, np.inf), []
        reached[0] = 0.0
        chunk = -1
        for unit, (kind, (entry, leave)) in enumerate(zip(self.kinds, self.places, strict=True)):
            begin = chunk + 1 < len(begins) and begins[chunk + 1] == unit
            chunk += begin
            weight, flight = float(weights[task.rank_of[chunk]]), float(task.in_flight[chunk])
            v = kind.values
            cost = v[:, FILL] + weight * v[:, STEADY] + price * (flight * v[:, ACTIVATION] + v[:, RESIDENT])
            if begin:
                cost = cost + weight * np.maximum(v[:, QUEUE], 0.0)
                if unit:
                    sent = task.sends_s[unit - 1][kind.entry]
                    cost = cost + task.fill_sends * sent
                    cost = cost + weight * task.waits_s(sent, v[:, STEADY])
            total = reached[entry] + cost
            order = np.lexsort((total, leave))
            states, where = np.unique(leave[order], return_index=True)
            reached, pick = np.full(self.width, np.inf), np.full(self.width, -1, dtype=np.int64)
            reached[states], pick[states] = total[order[where]], order[where]
            picks.append(pick)
        state, ways = 0, []
        if not np.isfinite(reached[state]):
            return None
        for pick, (entry, _) in zip(reversed(picks), reversed(self.places), strict=True):
            ways.append(int(pick[state]))
            state = int(entry[ways[-1]])
        return ways[::-1]

    def _values(self, begins: Sequence[int], ways: Sequence[int]) -> FloatArray:
        """(chunks, 7) values of the chunks, the messages at their begin included."""
        task, found = self.task, []
        for begin, end in zip(begins, [*begins[1:], task.units], strict=True):
            units = np.array([self.kinds[unit].values[ways[unit]] for unit in range(begin, end)])
            values = units.sum(axis=0)
            behind = np.concatenate([[0.0], np.cumsum(units[:-1, BACKLOG])])
            values[QUEUE] = float((behind + units[:, QUEUE]).max())
            values[TRANSIENT] = float(units[:, TRANSIENT].max())
            if begin:
                sent = float(task.sends_s[begin - 1][self.kinds[begin].entry[ways[begin]]])
                values[FILL] += task.fill_sends * sent
                values[STEADY] += task.waits_s(sent, values[STEADY])
            found.append(values)
        return np.array(found)

    def _made(self, begins: Sequence[int], ways: Sequence[int], values: FloatArray, bound_s: float) -> Partition:
        task, busy = self.task, _busy(values)
        objective = step_s(task, values[:, FILL], busy, values[:, [FILL, STEADY]].sum(axis=1))
        return Partition(
            ends=(*begins[1:], task.units),
            labels=tuple(int(kind.labels[way, 0]) for kind, way in zip(self.kinds, ways, strict=True)),
            objective_s=objective,
            lower_bound_s=min(bound_s, objective),
            fill_s=values[:, FILL],
            busy_s=busy,
            memory_bytes=memory_bytes(task, values),
        )


def _busy(values: FloatArray) -> FloatArray:
    busy: FloatArray = values[:, STEADY] + np.maximum(values[:, QUEUE], 0.0)
    return busy
