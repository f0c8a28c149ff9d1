"""Plans of at most a given time and memory: Pareto labels along the elimination.

A label is one way to decide everything below a step: its states, its seconds and its bytes. Of two labels with the
same states towards the rest, one that is no better in either is dropped; so is one that cannot be completed within
the limits, which is known from the least costs of the rest (`planner.search.exact.folded`) at several prices of
memory. A row of equal blocks takes one layer after the other: permutations of the same layers are one label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import Table, Variables
from planner.search.exact.buckets import Buckets, Index, sources
from planner.search.exact.folded import FoldedElimination, Layers, Marginals, Weights
from planner.search.exact.model import Mask

MAX_LABELS = 1_000_000
"""Pairs of labels that one step may look at."""
MAX_PAIRS = 20_000_000
"""Pairs of labels that all steps of one search may look at."""
KEPT = 20_000
"""Labels of one step that are kept, those of the least bound; what the others may lead to limits what is proven."""
ROUNDING = 1e-11


class TooManyLabelsError(Exception):
    """More labels than there is room for may lead to a plan within the limits."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds and bytes that a plan may take, and pairs of labels to look at before giving up."""

    seconds: float
    bytes: float
    pairs: int

    def threshold(self, weights: Weights) -> float:
        """What a plan within the limits costs at most, and a little for rounding."""
        allowed = weights.seconds * self.seconds + weights.bytes * self.bytes
        return allowed + ROUNDING * abs(allowed)


@dataclass(frozen=True, slots=True)
class Labels:
    """Labels ``(n,)`` over the states ``(n, variables)`` of some variables; ``parents`` are those they are made of.

    Each parent is a set of labels and, for each label here, the number of the one there. ``row`` is the number of the
    row of blocks that the labels stand for, whose parents are its layers.
    """

    variables: Variables
    states: NDArray[np.int32]
    seconds: Table
    bytes: Table
    parents: tuple[tuple[Labels, Index], ...] = ()
    row: int = -1

    def __len__(self) -> int:
        return len(self.seconds)

    def picked(self, chosen: Index | Mask) -> Labels:
        """Some of the labels."""
        parents = tuple((other, index[chosen]) for other, index in self.parents)
        return replace(
            self, states=self.states[chosen], seconds=self.seconds[chosen], bytes=self.bytes[chosen], parents=parents
        )

    def column(self, variable: int) -> NDArray[np.int32]:
        """States of one variable in each label."""
        return self.states[:, self.variables.index(variable)]

    def over(self, variables: Variables) -> Labels:
        """The labels with only the columns of `variables`, in that order."""
        columns = [self.variables.index(v) for v in variables]
        return replace(self, variables=variables, states=self.states[:, columns])

    def linked(self) -> Labels:
        """The labels as something to be made of: their own parents are found through them."""
        return replace(self, parents=((self, np.arange(len(self))),), row=-1)

    def trace(self, number: int, into: dict[int, int], rows: dict[int, tuple[Labels, int]]) -> None:
        """Write the states of one label and of all it is made of; of a row, which label."""
        if self.row >= 0:
            rows[self.row] = (self, number)
            return
        into.update(zip(self.variables, self.states[number].tolist(), strict=True))
        for other, index in self.parents:
            other.trace(int(index[number]), into, rows)


@dataclass(frozen=True, slots=True)
class _Price:
    """Least costs of the rest at one price, and the threshold over which a label leads nowhere."""

    weights: Weights
    rest: Marginals
    threshold: float

    def cost(self, labels: Labels | Pairs, rest: Table) -> Table:
        """What the best plan that a label leads to costs."""
        seconds, bytes_ = self.weights.seconds, self.weights.bytes
        if seconds == 0:
            return bytes_ * labels.bytes + rest
        own = labels.seconds if seconds == 1 else seconds * labels.seconds
        return own + rest if bytes_ == 0 else own + bytes_ * labels.bytes + rest


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of labels that agree in the variables they share, before they are written out: numbers of both."""

    left: Labels
    right: Labels
    first: Index
    second: Index
    seconds: Table
    bytes: Table

    def picked(self, chosen: Mask) -> Pairs:
        """Some of the pairs."""
        return Pairs(
            self.left,
            self.right,
            self.first[chosen],
            self.second[chosen],
            self.seconds[chosen],
            self.bytes[chosen],
        )

    def column(self, variable: int) -> NDArray[np.int32]:
        """States of one variable in each pair."""
        if variable in self.left.variables:
            return self.left.column(variable)[self.first]
        return self.right.column(variable)[self.second]

    def labels(self) -> Labels:
        """The pairs as labels."""
        left, right, a, b = self.left, self.right, self.first, self.second
        new = [i for i, v in enumerate(right.variables) if v not in left.variables]
        return Labels(
            (*left.variables, *(right.variables[i] for i in new)),
            np.concatenate([left.states[a], right.states[b][:, new]], axis=1),
            self.seconds,
            self.bytes,
            (*((o, i[a]) for o, i in left.parents), *((o, i[b]) for o, i in right.parents)),
        )


@dataclass(frozen=True, slots=True)
class Remains:
    """Least costs of the rest at every price, given states of `variables`.

    ``rows[i]`` is the row of the tables for each state of variable i; without rows it is the state.
    """

    variables: Variables
    rows: Sequence[Index]
    tables: Sequence[Table]

    def at(self, labels: Labels | Pairs) -> tuple[Index | NDArray[np.int32], ...]:
        """Which entries of the tables the labels meet."""
        columns = [labels.column(v) for v in self.variables]
        return tuple(r[c] for r, c in zip(self.rows, columns, strict=True)) if self.rows else tuple(columns)


class ParetoSearch:
    """Find the fastest plan within limits, by labels.

    Parameters
    ----------
    folded
        The elimination of the model of states still in the running.
    rests
        Least costs of the rest, at several prices.
    """

    def __init__(self, folded: FoldedElimination, rests: Sequence[tuple[Weights, Marginals]], limits: Limits) -> None:
        self.folded = folded
        self.model = folded.model
        self.limits = limits
        self.prices = [_Price(w, rest, limits.threshold(w)) for w, rest in rests]
        self.pairs = 0
        """Pairs of labels looked at so far."""
        self.dropped = np.inf
        """No plan that was left out for want of room takes fewer seconds."""

    def fastest(self) -> tuple[dict[int, int], Layers] | None:
        """The fastest plan within the limits, None without one.

        Raises
        ------
        TooManyLabelsError
            Where the labels are too many.
        """
        parts = self.model.layout
        tables = [
            self._entries(scope, self.folded.outer, n, [p.rest.outer.tables for p in self.prices])
            for n, scope in enumerate(parts.outside)
        ]
        tables += [self._row(number) for number in range(len(parts.blocks))]
        last = self._eliminated(self.folded.outer, tables, [p.rest.outer.tables for p in self.prices])
        fitting = np.flatnonzero(last.bytes <= self.limits.bytes)
        if len(fitting) == 0:
            return None
        best = int(fitting[np.lexsort((last.bytes[fitting], last.seconds[fitting]))[0]])
        assignment: dict[int, int] = {}
        rows: dict[int, tuple[Labels, int]] = {}
        last.trace(best, assignment, rows)
        layers = tuple(_layers(*rows[number]) for number in range(len(parts.blocks)))
        for block, states in zip(parts.blocks, layers, strict=True):
            assignment.update({v: states[-1][v] for v in (*block.inside, *block.exit)})
        return assignment, layers

    def _entries(self, scope: Variables, buckets: Buckets, number: int, rests: Sequence[Sequence[Table]]) -> Labels:
        """The entries of a table that some plan within the limits passes."""
        time, memory = self.model.time[scope], self.model.memory.get(scope)
        where = np.argwhere(np.isfinite(time))
        at = tuple(where.T)
        bytes_ = np.zeros(len(where)) if memory is None else memory[at]
        labels = Labels(scope, where.astype(np.int32), time[at], bytes_)
        return self._within(labels, self._remains(buckets, number, rests))

    def _within(self, labels: Labels, remains: Remains) -> Labels:
        """The labels that can be completed."""
        at = remains.at(labels)
        keep = np.ones(len(labels), dtype=np.bool_)
        for price, rest in zip(self.prices, remains.tables, strict=True):
            keep &= price.cost(labels, rest[at]) <= price.threshold
        return labels if keep.all() else labels.picked(keep)

    def _completable(self, labels: Labels, remains: Remains) -> Labels:
        """Of the labels that can be completed the best: no other is as good, and they promise most."""
        labels = self._within(labels.over(remains.variables), remains)
        labels = labels.picked(_pareto(labels.states, labels.seconds, labels.bytes))
        if len(labels) > KEPT:
            bound, at = np.zeros(len(labels)), remains.at(labels)
            for price, rest in zip(self.prices, remains.tables, strict=True):
                if price.weights.seconds:
                    paid = price.weights.bytes * self.limits.bytes if price.weights.bytes else 0.0
                    bound = np.maximum(bound, (price.cost(labels, rest[at]) - paid) / price.weights.seconds)
            order = np.argsort(bound, kind="stable")
            self.dropped = min(self.dropped, float(bound[order[KEPT]]))
            labels = labels.picked(order[:KEPT])
        return labels

    def _eliminated(self, buckets: Buckets, given: Sequence[Labels], rests: Sequence[Sequence[Table]]) -> Labels:
        """Labels over what no step eliminates."""
        made = list(given)
        for step in buckets.steps:
            remains = self._remains(buckets, len(made), rests)
            labels = self._joined([made[n] for n in sources(step)], remains).linked()
            made.append(self._completable(labels, remains))
        return self._gathered([(made[n], self._remains(buckets, n, rests)) for n in buckets.left])

    def _remains(self, buckets: Buckets, number: int, rests: Sequence[Sequence[Table]]) -> Remains:
        scope = buckets.scopes[number]
        return Remains(scope.variables, scope.rows, [r[number] for r in rests])

    def _gathered(self, parts: Sequence[tuple[Labels, Remains]]) -> Labels:
        """Every way to take one label of each part that no step takes up, as far as it can be completed.

        What remains costs ``G(x) >= R_a(x) - m_b(x)`` where ``R_a`` is the least of all but part a, and ``m_b`` that of
        part b alone.
        """
        if not parts:
            return self._joined([])
        (labels, remains), *others = sorted(parts, key=lambda part: len(part[0]))
        rests = [np.broadcast_to(table[remains.at(labels)], len(labels)) for table in remains.tables]
        for part, _ in others:
            pairs = self._paired(labels, part)
            keep = np.ones(len(pairs.first), dtype=np.bool_)
            left = []
            for price, rest in zip(self.prices, rests, strict=True):
                left.append(rest[pairs.first] - _least_alike(part, price.cost(part, np.zeros(1)))[pairs.second])
                keep &= price.cost(pairs, left[-1]) <= price.threshold
            labels = pairs.picked(keep).labels()
            best = _pareto(labels.states, labels.seconds, labels.bytes)
            labels, rests = labels.picked(best), [rest[keep][best] for rest in left]
        return labels

    def _paired(self, left: Labels, right: Labels) -> Pairs:
        pairs = _pairs(left, right)
        self.pairs += len(pairs.first)
        if self.pairs > self.limits.pairs:
            raise TooManyLabelsError
        return pairs

    def _joined(self, parts: Sequence[Labels], remains: Remains | None = None) -> Labels:
        """Every way to take one label of each part so that the states agree; small parts first.

        What cannot be completed is left out before the last pairs are written, where `remains` is given.
        """
        if not parts:
            return Labels((), np.zeros((1, 0), dtype=np.int32), np.zeros(1), np.zeros(1))
        labels, *waiting = sorted(parts, key=len)
        while waiting:
            near = [p for p in waiting if not labels.variables or set(p.variables) & set(labels.variables)]
            part = (near or waiting)[0]
            waiting = [p for p in waiting if p is not part]
            labels = self._both(labels, part, None if waiting else remains)
        return labels

    def _both(self, left: Labels, right: Labels, remains: Remains | None) -> Labels:
        """Every way to take a label of each so that the states agree; the parents of the left one come first."""
        pairs = self._paired(left, right)
        if remains is not None:
            for price, rest in zip(self.prices, remains.tables, strict=True):
                pairs = pairs.picked(price.cost(pairs, rest[remains.at(pairs)]) <= price.threshold)
        return pairs.labels()

    def _row(self, number: int) -> Labels:
        """Labels of a whole row of blocks: one layer after the other."""
        sizes = self.folded.sizes
        block, buckets = self.model.layout.blocks[number], self.folded.inner[number]
        tables = [
            self._entries(scope, buckets, n, [p.rest.inner[number].tables for p in self.prices])
            for n, scope in enumerate(self.model.layout.in_block[number])
        ]
        one = self._eliminated(buckets, tables, [p.rest.inner[number].tables for p in self.prices])
        absent = ((v, sizes[v]) for v in block.ends if v not in one.variables)
        free = [Labels((v,), np.arange(n, dtype=np.int32)[:, None], np.zeros(n), np.zeros(n)) for v, n in absent]
        one = self._joined([one, *free]).linked().over(block.ends)
        joint = np.stack([_joint(one, v, sizes) for v in (block.shared, block.entrance, block.exit)], axis=1)
        one = replace(one, variables=_ONE, states=joint.astype(np.int32))
        rows = [p.rest.rows[number] for p in self.prices]
        one = self._within(one, Remains(_ONE, (), [r.rest for r in rows]))
        row = replace(one, variables=_REACHED)
        row = self._completable(row, Remains(_REACHED, (), [r.after[1] for r in rows]))
        for layer in range(2, block.count + 1):
            remains = Remains(_LONGER, (), [r.after[layer] for r in rows])
            # Parents are the layers in their order, however many labels there are of each.
            row = replace(self._completable(self._both(row, one, remains), remains), variables=_REACHED)
        ends = [
            _apart(row.states[:, i], [sizes[v] for v in vs])
            for i, vs in enumerate((block.shared, block.entrance, block.exit))
        ]
        done = replace(row, variables=block.ends, states=np.concatenate(ends, axis=1).astype(np.int32), row=number)
        return done.linked()


_SHARED, _FIRST, _HERE, _NEXT = -1, -2, -3, -4
_ONE = (_SHARED, _HERE, _NEXT)
_REACHED = (_SHARED, _FIRST, _HERE)
"""Joint states in a row of blocks: of what all layers share, at the entrance of the first, where the last one ends."""
_LONGER = (_SHARED, _FIRST, _NEXT)


def _layers(row: Labels, number: int) -> tuple[dict[int, int], ...]:
    """States of each layer of one label of a row."""
    layers = []
    for block, index in row.parents:
        states: dict[int, int] = {}
        block.trace(int(index[number]), states, {})
        layers.append(states)
    return tuple(layers)


def _joint(labels: Labels, variables: Variables, sizes: Sequence[int]) -> Index:
    """Number of the joint state of `variables` in each label, the last one fastest."""
    number = np.zeros(len(labels), dtype=np.intp)
    for v in variables:
        number = number * sizes[v] + labels.column(v)
    return number


def _apart(numbers: NDArray[np.int32], sizes: Sequence[int]) -> NDArray[np.int32]:
    """States ``(n, variables)`` of joint states."""
    columns = []
    for size in reversed(sizes):
        numbers, state = np.divmod(numbers, size)
        columns.append(state)
    return np.stack(columns[::-1], axis=1) if columns else np.zeros((len(numbers), 0), dtype=np.int32)


def _pairs(left: Labels, right: Labels) -> Pairs:
    """Every pair of labels that agree in the variables they share."""
    common = [v for v in right.variables if v in left.variables]
    key, other = np.zeros(len(left), dtype=np.int64), np.zeros(len(right), dtype=np.int64)
    for v in common:
        mine, its = left.column(v), right.column(v)
        base = int(max(mine.max(initial=0), its.max(initial=0))) + 1
        key, other = key * base + mine, other * base + its
    order = np.argsort(other, kind="stable")
    sorted_ = other[order]
    first, end = np.searchsorted(sorted_, key, "left"), np.searchsorted(sorted_, key, "right")
    matches = end - first
    total = int(matches.sum())
    if total > MAX_LABELS:
        raise TooManyLabelsError
    a = np.repeat(np.arange(len(left)), matches)
    starts = np.repeat(first - np.concatenate(([0], np.cumsum(matches)[:-1])), matches) if len(left) else a
    b = order[starts + np.arange(total)]
    return Pairs(left, right, a, b, left.seconds[a] + right.seconds[b], left.bytes[a] + right.bytes[b])


def _least_alike(labels: Labels, costs: Table) -> Table:
    """The least of the costs of all labels with the states of each."""
    if not labels.variables:
        return np.full(len(labels), costs.min(initial=np.inf))
    _, group = np.unique(labels.states, axis=0, return_inverse=True)
    least = np.full(len(labels), np.inf)
    np.minimum.at(least, group.ravel(), costs)
    return least[group.ravel()]


def _pareto(states: NDArray[np.int32], seconds: Table, bytes_: Table) -> Index:
    """Numbers of the labels that no other of equal states is at least as good as in seconds and bytes."""
    if len(seconds) == 0:
        return np.zeros(0, dtype=np.intp)
    group = np.zeros(len(seconds), dtype=np.int64)
    for column in states.T:
        group = group * (int(column.max()) + 1) + column
    order = np.lexsort((bytes_, seconds, group))
    _, rank = np.unique(bytes_, return_inverse=True)
    _, number = np.unique(group[order], return_inverse=True)
    # Every group's ranks lie below those of the group before, so that the running minimum starts anew in each.
    height = rank[order] - number * (len(seconds) + 1)
    least = np.minimum.accumulate(height)
    return order[np.concatenate(([True], height[1:] < least[:-1]))]
