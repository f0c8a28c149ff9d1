"""Min-plus elimination of many weightings of one problem at once.

Weightings are the last dim of every table, and the variable that is eliminated is the first one: sums and minima then
run over long rows of neighbouring numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Scope = tuple[int, ...]
AT_ONCE = 2**25
LONG = 2048
"""From so many numbers on, rows are compared one after the other: quicker than to look along many short columns."""


@dataclass(frozen=True, slots=True)
class _Term:
    """A table that takes part in an elimination, with the shape that aligns it to the others.

    Where dims do not stay in their order they are brought from ``own`` into ``order`` first, which is empty otherwise.
    Shapes end with −1, for the weightings. ``fits`` says whether it can be added to the sum of those before in place,
    which is then no table itself.
    """

    number: int
    own: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class _Removal:
    variable: int
    scope: Scope
    terms: tuple[_Term, ...]


@dataclass(frozen=True, slots=True)
class Elimination:
    """An order in which variables are eliminated, worked out once: ``steps`` and the sum of what is left.

    ``single`` have one state and take no step.
    """

    steps: tuple[_Removal, ...]
    rest: tuple[_Term, ...]
    single: tuple[int, ...]
    largest: int
    """Entries of the largest table of a weighting."""
    pattern: object = field(default_factory=object)
    """The same for eliminations that differ in the numbers of their variables alone."""

    def named(self, names: Sequence[int]) -> Elimination:
        """The same of variables with other numbers."""
        steps = [_Removal(names[s.variable], tuple([names[v] for v in s.scope]), s.terms) for s in self.steps]
        return replace(self, steps=tuple(steps), single=tuple([names[v] for v in self.single]))


@dataclass(frozen=True, slots=True)
class Minima:
    """Minima over all eliminated variables, and the best states to read a solution from.

    ``table`` has shape (weightings, states of each kept variable …).
    """

    table: FloatArray
    best: tuple[tuple[int, Scope, NDArray[np.intp]], ...]
    single: tuple[int, ...]

    def assignments(
        self, weighting: NDArray[np.int64], kept: Mapping[int, NDArray[np.int64]]
    ) -> dict[int, NDArray[np.int64]]:
        """States of all variables in the best solutions, arrays like `weighting`.

        ``weighting`` are numbers of weightings and ``kept`` states of the kept variables, arrays of one shape.
        """
        states = {**dict.fromkeys(self.single, np.zeros_like(weighting)), **kept}
        for variable, scope, best in reversed(self.best):
            states[variable] = best[(*(states[v] for v in scope), weighting)]
        return states


def elimination(scopes: Sequence[Scope], sizes: Mapping[int, int], kept: Scope) -> Elimination:
    """Order the variables that are not `kept`: next the one that makes the smallest table, ties by number.

    What differs in the numbers of its variables alone, not in their order, is worked out once.

    Parameters
    ----------
    scopes : sequence
        Variables of each table, in the order of its dims.
    sizes : mapping of variable to states
    kept : tuple of int
        Variables that stay, in the order of the result's dims.
    """
    names = sorted(sizes)
    place = {v: n for n, v in enumerate(names)}
    numbered = tuple([tuple([place[v] for v in scope]) for scope in scopes])
    return _numbered(numbered, tuple([sizes[v] for v in names]), tuple([place[v] for v in kept])).named(names)


@cache
def _numbered(scopes: tuple[Scope, ...], sizes: tuple[int, ...], kept: Scope) -> Elimination:
    """`elimination` of variables that are numbered from 0."""
    size = dict(enumerate(sizes))
    single = tuple(v for v in size if size[v] == 1 and v not in kept)
    scopes = tuple(tuple(v for v in scope if v not in single) for scope in scopes)
    pool: dict[int, Scope] = dict(enumerate(scopes))
    open_variables = set(size) - set(kept) - set(single)
    steps, largest = [], prod(sizes[v] for v in kept)
    touching: dict[int, list[int]] = {v: [] for v in size}
    for number, scope in pool.items():
        for v in scope:
            touching[v].append(number)
    around = {v: {u for n in touching[v] for u in pool[n]} | {v} for v in size}
    weight = {v: prod(size[u] for u in around[v]) for v in open_variables}
    while open_variables:
        variable = min(open_variables, key=lambda v: (weight[v], v))
        open_variables.discard(variable)
        largest = max(largest, weight[variable])
        scope = tuple(sorted(around[variable] - {variable}))
        full = (variable, *scope)
        steps.append(
            _Removal(variable, scope, _terms([(n, pool.pop(n)) for n in touching[variable] if n in pool], full, size))
        )
        made = len(scopes) + len(steps) - 1
        pool[made] = scope
        for other in scope:
            touching[other].append(made)
            around[other] |= set(scope)
            around[other].discard(variable)
            if other in open_variables:
                weight[other] = prod(size[u] for u in around[other])
    rest = _terms([*pool.items()], kept, size)
    return Elimination(tuple(steps), rest, single, largest)


def _terms(tables: Sequence[tuple[int, Scope]], full: Scope, size: Mapping[int, int]) -> tuple[_Term, ...]:
    """Tables, each its number and scope, as they are added up one after the other."""
    place = {v: i for i, v in enumerate(full)}
    covered: set[int] = set()
    found = []
    for count, (number, scope) in enumerate(tables):
        dims = [place[v] for v in scope]
        shape = [1] * len(full)
        for dim, v in zip(dims, scope, strict=True):
            shape[dim] = size[v]
        order: tuple[int, ...] = ()
        if dims != sorted(dims):
            order = (*sorted(range(len(scope)), key=dims.__getitem__), len(scope))
        fits = count > 1 and covered.issuperset(scope)
        covered.update(scope)
        found.append(_Term(number, tuple([size[v] for v in scope] + [-1]), order, (*shape, -1), fits))
    return tuple(found)


def minima(plan: Elimination, tables: Sequence[FloatArray], shape: tuple[int, ...]) -> Minima:
    """Minimise the sum of `tables` over all eliminated variables (bucket elimination: Dechter, 1999).

    Parameters
    ----------
    tables : sequence of arrays, shape (entries, weightings) or (states of each variable of the scope …, weightings)
    shape : tuple of int
        States of the kept variables.
    """
    count = tables[0].shape[-1]
    pool, best = [*tables], []
    for step in plan.steps:
        least, first = _least(_sum(step.terms, pool))
        best.append((step.variable, step.scope, first))
        pool.append(least)
    return Minima(_rest(plan, pool, count, shape), tuple(best), plan.single)


def lowest(plan: Elimination, tables: Sequence[FloatArray], shape: tuple[int, ...]) -> FloatArray:
    """The table of `minima` alone; `AT_ONCE` numbers of the largest table are worked out at once."""
    count = tables[0].shape[-1]
    if plan.largest * count > AT_ONCE and count > 1:
        halves = ([table[..., part] for table in tables] for part in (slice(count // 2), slice(count // 2, count)))
        return np.concatenate([lowest(plan, half, shape) for half in halves])
    pool = [*tables]
    for step in plan.steps:
        pool.append(np.minimum.reduce(_sum(step.terms, pool)))
    return _rest(plan, pool, count, shape)


def _rest(plan: Elimination, pool: Sequence[FloatArray], count: int, shape: tuple[int, ...]) -> FloatArray:
    """The sum of what is left, weightings first."""
    rest = _sum(plan.rest, pool) if plan.rest else np.zeros((*(1 for _ in shape), count))
    rest = np.broadcast_to(rest, (*shape, count)) if rest.shape != (*shape, count) else rest
    return rest.transpose(-1, *range(len(shape)))


def _sum(terms: Sequence[_Term], pool: Sequence[FloatArray]) -> FloatArray:
    total: FloatArray | None = None
    for term in terms:
        table = pool[term.number]
        if term.order:
            table = table.reshape(term.own).transpose(term.order)
        table = table.reshape(term.shape)
        if total is None:
            total = table
        elif term.fits:
            total += table
        else:
            total = total + table
    assert total is not None  # every variable has a table of its own
    return total


def _least(total: FloatArray) -> tuple[FloatArray, NDArray[np.intp]]:
    """Least numbers along the first dim, and where each stands first."""
    if total[0].size < LONG:
        return np.minimum.reduce(total), total.argmin(axis=0)
    least, first = total[0].copy(), np.zeros(total.shape[1:], dtype=np.intp)
    for state in range(1, len(total)):
        np.copyto(first, state, where=total[state] < least)
        np.minimum(least, total[state], out=least)
    return least, first
