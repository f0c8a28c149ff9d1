"""Min-plus variable elimination: the exact minimum of a sum of tables over discrete variables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from simulator.errors import MeshwrightError

Table = NDArray[np.float64]
MAX_TABLE = 60_000_000


class TooWideError(MeshwrightError):
    """A table would outgrow memory: the graph is too densely connected for exact elimination."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost that depends on the variables of `scope`; ``table`` has one dim for each, in that order."""

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True)
class Elimination:
    """One eliminated variable: its best state for every state of the variables in `scope`."""

    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Reduced:
    """What is left after elimination, and how to get back."""

    factors: tuple[Factor, ...]
    eliminated: tuple[Elimination, ...]
    width: int


def elimination_order(
    scopes: Iterable[Collection[int]], sizes: Mapping[int, int] | Sequence[int], variables: Iterable[int]
) -> tuple[int, ...]:
    """Order `variables` greedily: next the one whose elimination makes the smallest table, ties by number."""
    neighbours: dict[int, set[int]] = {v: set() for v in variables}
    everything = [set(scope) for scope in scopes]
    for scope in everything:
        for v in scope:
            neighbours.setdefault(v, set()).update(scope - {v})
    remaining = set(variables)
    weight = {v: prod(sizes[n] for n in neighbours[v]) * sizes[v] for v in remaining}
    order = []
    while remaining:
        v = min(remaining, key=lambda u: (weight[u], u))
        order.append(v)
        remaining.discard(v)
        around = neighbours.pop(v)
        for n in around:
            neighbours[n] |= around
            neighbours[n] -= {n, v}
        for n in around & remaining:
            weight[n] = prod(sizes[m] for m in neighbours[n]) * sizes[n]
    return tuple(order)


def combine(factors: Iterable[Factor], scope: tuple[int, ...], sizes: Mapping[int, int] | Sequence[int]) -> Table:
    """Add tables up over `scope`, which covers all of theirs."""
    shape = tuple(sizes[v] for v in scope)
    if prod(shape) > MAX_TABLE:
        raise TooWideError(
            f"exact search would need a table of {prod(shape):.1e} entries (limit {MAX_TABLE:.0e}): the graph is too "
            "densely connected; pin more dimensions, for example --pin tp=1"
        )
    total = np.zeros(shape)
    position = {v: i for i, v in enumerate(scope)}
    for factor in factors:
        order = sorted(range(len(factor.scope)), key=lambda i: position[factor.scope[i]])
        table = factor.table.transpose(order)
        index: list[slice | None] = [None] * len(scope)
        for v in factor.scope:
            index[position[v]] = slice(None)
        total += table[tuple(index)]
    return total


def eliminate(factors: Iterable[Factor], sizes: Mapping[int, int] | Sequence[int], order: Iterable[int]) -> Reduced:
    r"""Minimise over the variables of `order`, one after the other.

    ``min_x sum_i f_i(x)`` is rewritten for each variable v as
    ``min_{x \\ v} [sum_{i: v not in scope} f_i + min_v sum_{i: v in scope} f_i]``
    (bucket elimination: Dechter, "Bucket elimination", Artificial Intelligence 113, 1999).
    """
    pool = list(factors)
    trace: list[Elimination] = []
    width = 0
    for variable in order:
        touching = [f for f in pool if variable in f.scope]
        pool = [f for f in pool if variable not in f.scope]
        scope = tuple(sorted({v for f in touching for v in f.scope} - {variable}))
        width = max(width, len(scope))
        table = combine(touching, (*scope, variable), sizes)
        best = table.argmin(axis=-1)
        trace.append(Elimination(variable, scope, best))
        pool.append(Factor(scope, np.take_along_axis(table, best[..., None], axis=-1)[..., 0]))
    return Reduced(tuple(pool), tuple(trace), width)


def recover(reduced: Reduced, assignment: dict[int, int]) -> dict[int, int]:
    """Complete `assignment` (states of what was not eliminated) with the best states of what was."""
    result = dict(assignment)
    for step in reversed(reduced.eliminated):
        result[step.variable] = int(step.best[tuple(result[v] for v in step.scope)])
    return result


def value(reduced: Reduced) -> float:
    """Minimum, once every variable is eliminated."""
    return float(sum(f.table.item() for f in reduced.factors))


@dataclass(frozen=True, slots=True)
class Power:
    """A min-plus matrix power by squaring; ``middle`` is None for the base."""

    table: Table
    count: int
    left: Power | None = None
    right: Power | None = None
    middle: NDArray[np.intp] | None = None

    def path(self, group: int, start: int, end: int) -> list[int]:
        """States visited from `start` to `end`, both included."""
        if self.left is None or self.right is None or self.middle is None:
            return [start, end]
        middle = int(self.middle[group, start, end])
        return self.left.path(group, start, middle)[:-1] + self.right.path(group, middle, end)


def min_plus_power(table: Table, count: int) -> Power:
    """Compute ``F ⊗ … ⊗ F`` (`count` times) where ``(A ⊗ B)[i, j] = min_k A[i, k] + B[k, j]``.

    Parameters
    ----------
    table : array, shape (groups, states, states)
    count : int
        At least 1; costs ``O(log count)`` products.
    """
    base = Power(table, 1)
    result: Power | None = None
    square = base
    while count:
        if count & 1:
            result = square if result is None else _multiply(result, square)
        count >>= 1
        if count:
            square = _multiply(square, square)
    return base if result is None else result


def _multiply(left: Power, right: Power) -> Power:
    groups, states, _ = left.table.shape
    table = np.empty_like(left.table)
    middle = np.empty(left.table.shape, dtype=np.intp)
    for group in range(groups):
        transposed = np.ascontiguousarray(right.table[group].T)
        for start in range(states):
            sums = transposed + left.table[group, start]
            middle[group, start] = sums.argmin(axis=1)
            table[group, start] = sums[np.arange(states), middle[group, start]]
    return Power(table, left.count + right.count, left, right, middle)
