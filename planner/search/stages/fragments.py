"""Fragments: the Pareto-optimal ways to run some consecutive units of a network on one pipeline rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

FILL, STEADY, QUEUE, BACKLOG, ACTIVATION, RESIDENT, TRANSIENT = range(7)
"""Columns of `Fragments.values`."""
COLUMNS = 7
WIDTH = 32
"""Most ways that are kept of one fragment between two boundary states; beyond it they are thinned."""
_AT_ONCE = 512
"""Ways between two boundary states that are compared; of more some are picked first."""
_BLOCK = 128
"""Ways that are compared with each other at once."""
_FEW = 64
"""Ways of which all columns are compared in one go."""
_EARLIER: NDArray[np.bool_] = ~np.tri(_BLOCK, dtype=np.bool_)
_FLIGHTS = np.array([[1.0], [8.0], [64.0], [1e6]])


@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Ways to run some units, (n,) of them.

    Attributes
    ----------
    values : (n, 7) seconds that the pipeline's fill pays once, seconds that the rank itself pays, what gradient
        synchronisation has left to do after the last backward pass, by how much it falls behind the backward pass,
        bytes of one micro-batch's activations, resident bytes, bytes that stand while one unit goes backward
    entry, exit : (n,) boundary states
    labels : (n, units) label of every unit
    exact : whether no way was left out that none of the others dominates
    """

    values: FloatArray
    entry: IntArray
    exit: IntArray
    labels: IntArray
    exact: bool = True

    def __len__(self) -> int:
        return len(self.values)

    @property
    def busy(self) -> FloatArray:
        """(n,) what one rank adds to the step: its own passes and what synchronisation leaves exposed."""
        return self.values[:, STEADY] + np.maximum(self.values[:, QUEUE], 0.0)

    def memory(self, in_flight: float) -> FloatArray:
        """(n,) bytes with `in_flight` micro-batches between forward and backward."""
        v = self.values
        return in_flight * v[:, ACTIVATION] + v[:, RESIDENT] + v[:, TRANSIENT]

    def take(self, rows: IntArray, *, exact: bool | None = None) -> Fragments:
        """Some of the ways."""
        kept = self.exact if exact is None else exact
        return Fragments(
            self.values.take(rows, axis=0), self.entry.take(rows), self.exit.take(rows),
            self.labels.take(rows, axis=0), kept,
        )  # fmt: skip


def least_of(keys: IntArray, size: int) -> Callable[[FloatArray], FloatArray]:
    """From costs (…, ways) to the least of each key below a size, (…, size); infinite where no way has it."""
    order: IntArray = np.argsort(keys, kind="stable")
    there, begins = np.unique(keys[order], return_index=True)

    def least(costs: FloatArray) -> FloatArray:
        found = np.full((*costs.shape[:-1], size), np.inf)
        if len(begins):
            found[..., there] = np.minimum.reduceat(costs.take(order, axis=-1), begins, axis=-1)
        return found

    return least


@dataclass(frozen=True, slots=True, kw_only=True)
class Criteria:
    """By what ways compete: one that another one beats in all of it makes no partition better.

    A partition takes the fills X of all ranks and the busiest rank, which is busy for its steady seconds S, for what
    of its messages `hidden_share` of S does not hide, and for what synchronisation leaves: the most over its units of
    the backlogs D of those before and its own queue E. Seconds more in one of these are made up for by as many less in
    the fill, and seconds more in E or D by less S, but for the share that hides messages. Memory matters unless it
    cannot bind.
    """

    hidden_share: float = 1.0
    memory: bool = True

    def of(self, values: FloatArray) -> FloatArray:
        """(n, criteria) of ways whose `Fragments.values` are given."""
        fill, passes, late = values[:, [FILL]], values[:, [STEADY]], values[:, [QUEUE, BACKLOG]]
        late = late + fill + passes
        found = [fill, fill + passes, late]
        if self.hidden_share:
            found.append(late - self.hidden_share * passes)
        if self.memory:
            found.append(values[:, ACTIVATION:])
        return np.concatenate(found, axis=1)


EVERYTHING = Criteria()


def joined(left: Fragments, right: Fragments, width: int = WIDTH, criteria: Criteria = EVERYTHING) -> Fragments:
    """Every way of `left` followed by every way of `right` that begins in the state where it ends, but beaten ones.

    Gradients are summed behind the backward pass, last unit first, one message after the other. With e what is left
    when the backward pass has ended and d by how much messages take longer than the passes that hide them, units
    after one another give ``e = max(e_left, d_left + e_right)`` and ``d = d_left + d_right``.
    """
    a, b = (left.exit[:, None] == right.entry).nonzero()
    # `take` gathers rows in half the time that an index takes.
    before, behind = left.values.take(a, axis=0), right.values.take(b, axis=0)
    values = before + behind
    values[:, QUEUE] = np.maximum(before[:, QUEUE], before[:, BACKLOG] + behind[:, QUEUE])
    values[:, TRANSIENT] = np.maximum(before[:, TRANSIENT], behind[:, TRANSIENT])
    entry, leave = left.entry.take(a), right.exit.take(b)
    keep, exact = _frontier(values, entry, leave, width, criteria)
    labels = [side.labels.take(rows.take(keep), axis=0) for side, rows in ((left, a), (right, b))]
    return Fragments(
        values.take(keep, axis=0), entry.take(keep), leave.take(keep), np.concatenate(labels, axis=1),
        left.exact and right.exact and exact,
    )  # fmt: skip


def pruned(ways: Fragments, width: int = WIDTH, criteria: Criteria = EVERYTHING) -> Fragments:
    """Only the ways that no other one dominates, at most `width` between two states."""
    keep, exact = _frontier(ways.values, ways.entry, ways.exit, width, criteria)
    return ways.take(keep, exact=ways.exact and exact)


def thinned(ways: Fragments, states: frozenset[int], width: int) -> Fragments:
    """At most about `width` ways between any two of the given boundary states (and the network's ends)."""
    inside = np.isin(ways.entry, [*states, -1]) & np.isin(ways.exit, [*states, -1])
    few = pruned(ways.take(np.flatnonzero(inside)), width)
    return Fragments(few.values, few.entry, few.exit, few.labels, len(few) == len(ways) and ways.exact)


def repeated(
    unit: Fragments, count: int, known: dict[int, Fragments], width: int = WIDTH, criteria: Criteria = EVERYTHING
) -> Fragments:
    """`unit` `count` times in a row, by doubling; `known` holds counts that were made before."""
    known.setdefault(1, unit)
    if count not in known:
        half = count // 2
        more, less = (repeated(unit, part, known, width, criteria) for part in (count - half, half))
        known[count] = joined(more, less, width, criteria)
    return known[count]


def _frontier(
    values: FloatArray, entry: IntArray, leave: IntArray, width: int, criteria: Criteria
) -> tuple[IntArray, bool]:
    """Rows that none dominates between the same states, in a fixed order, thinned to `width` of them.

    Of rows that are equal in all criteria the one that is least in the other columns stays.
    """
    if len(entry) <= 1:
        return np.arange(len(entry)), True
    # Boundary states are small numbers, from -1 on.
    keys = (entry + 1) * (int(leave.max(initial=0)) + 2) + leave + 1
    counts = np.bincount(keys)
    if counts.max(initial=0) <= 1:
        return np.argsort(keys, kind="stable"), True
    exact, merits, rows = True, criteria.of(values), np.arange(len(keys))
    if counts.max() > max(width, _AT_ONCE):
        rows, exact = _thinner(values, keys, max(width, _AT_ONCE), _AT_ONCE // 2), False
        values, keys, merits = values.take(rows, axis=0), keys.take(rows), merits.take(rows, axis=0)
    order: IntArray = np.lexsort((*values.T[::-1], *merits.T[::-1], keys))
    kept = order[~_dominated_of_each(merits.take(order, axis=0), keys.take(order))]
    if len(kept) > width and np.bincount(keys.take(kept)).max() > width:
        kept, exact = kept.take(_thinner(values.take(kept, axis=0), keys.take(kept), width, width)), False
    return rows.take(kept), exact


def _thinner(values: FloatArray, keys: IntArray, most: int, width: int) -> IntArray:
    """Rows of all keys in ascending order, about `width` of each of which there are more than `most`."""
    found = []
    for key, count in enumerate(np.bincount(keys).tolist()):
        if count:
            rows = np.flatnonzero(keys == key)
            found.append(rows if count <= most else rows[_spread(values.take(rows, axis=0), width)])
    return np.concatenate(found)


def _dominated_of_each(values: FloatArray, keys: IntArray) -> NDArray[np.bool_]:
    """(n,) `dominated` among the rows of each key, which stand together."""
    ends = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    if len(ends) and len(keys) <= _BLOCK:
        distinct = np.flatnonzero((values != values[:1]).any(axis=0))
        return _beaten(values[:, distinct[1:]].T, keys)
    return np.concatenate([dominated(rows) for rows in np.split(values, ends)])


def dominated(values: FloatArray) -> NDArray[np.bool_]:
    """(n,) rows that another one, or an equal one before them, makes needless; rows are in lexical order.

    Only earlier rows dominate then, and those that are dominated themselves need not be asked.
    """
    distinct = np.flatnonzero((values != values[:1]).any(axis=0))
    if not len(distinct):
        return np.arange(len(values)) > 0
    # The first column that differs ascends.
    columns = values[:, distinct[1:]].T
    if len(values) <= _BLOCK:
        return _beaten(columns)
    result = np.zeros(len(values), dtype=np.bool_)
    for begin in range(0, len(values), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        below = np.ones((begin - int(result.sum()), len(result[block])), dtype=np.bool_)
        for earlier, other in zip(columns[:, :begin][:, ~result[:begin]], columns[:, block], strict=True):
            below &= earlier[:, None] <= other
        result[block] = below.any(axis=0)
        own = begin + np.flatnonzero(~result[block])
        result[own] = _beaten(columns[:, own])
    return result


def undominated_of_each(values: FloatArray, keys: IntArray) -> IntArray:
    """Rows that no other of their key dominates (`dominated`), in lexical order, keys as they first come."""
    if np.any(keys[1:] < keys[:-1]):
        _, first, keys = np.unique(keys, return_index=True, return_inverse=True)
        keys = np.argsort(np.argsort(first))[keys]
    order: IntArray = np.lexsort((*values.T[::-1], keys))
    values, keys = values[order], keys[order]
    if len(order) > _AT_ONCE:
        ends = np.flatnonzero(np.diff(keys)) + 1
        beaten = np.concatenate([dominated(rows) for rows in np.split(values, ends)])
        return np.asarray(order[~beaten])
    place = np.arange(len(order))
    below = (keys[:, None] == keys) & (place[:, None] < place)
    for column in values.T:
        np.logical_and(below, column[:, None] <= column, out=below)
    return np.asarray(order[~np.logical_or.reduce(below, axis=0)])


def _beaten(columns: FloatArray, keys: IntArray | None = None) -> NDArray[np.bool_]:
    """(n,) whether one before each, of the same key, is at most as much in all columns (columns, n)."""
    ways = columns.shape[1]
    below = _EARLIER[:ways, :ways] if keys is None else _EARLIER[:ways, :ways] & (keys[:, None] == keys)
    if ways <= _FEW:
        below = below & np.logical_and.reduce(columns[:, :, None] <= columns[:, None, :], axis=0)
    else:
        below = below.copy()
        for column in columns:
            np.logical_and(below, column[:, None] <= column[None, :], out=below)
    found: NDArray[np.bool_] = np.logical_or.reduce(below, axis=0)
    return found


def _spread(values: FloatArray, width: int) -> IntArray:
    """About `width` rows along the trade of time against memory, and those of least memory."""
    time = values[:, FILL] + values[:, STEADY] + np.maximum(values[:, QUEUE], 0.0)
    memory = values[:, ACTIVATION] / max(values[:, ACTIVATION].max(), 1.0)
    memory = memory + values[:, RESIDENT] / max(values[:, RESIDENT].max(), 1.0)
    order = np.lexsort((memory, time))
    lowest = np.minimum.accumulate(memory[order])
    front = order[np.concatenate(([True], lowest[1:] < lowest[:-1]))]
    picked = np.zeros(len(values), dtype=np.bool_)
    picked[front[_evenly(len(front), width)]] = True
    small = _FLIGHTS * values[:, ACTIVATION] + (values[:, RESIDENT] + values[:, TRANSIENT])
    picked[small.argmin(axis=1)] = True
    return np.flatnonzero(picked)


@lru_cache(maxsize=1024)
def _evenly(count: int, width: int) -> IntArray:
    """At most `width` of `count` places, evenly from the first to the last."""
    return np.unique(np.linspace(0, count - 1, width).round().astype(np.int64))
