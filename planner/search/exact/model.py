"""The tables of a problem over the states that are still in the running, and reductions that keep every optimum.

A variable at the border of a block has one copy between each two layers, which meets other tables than the first and
the last: a state goes only where it can go from every copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import Layout, Table, Variables, layout
from planner.search.exact.buckets import Index
from planner.search.problem.problem import Problem

CANDIDATES = 8
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Use:
    """A table of one variable's copy: how many of it there are, over which variables, and which dim is its own."""

    times: int
    scope: Variables
    dim: int


@dataclass(frozen=True, slots=True)
class Copies:
    """Variables that must keep the same states, and the tables of each kind of copy."""

    variables: Variables
    kinds: tuple[tuple[Use, ...], ...]


@dataclass(frozen=True, slots=True)
class Model:
    """Seconds and bytes of every table; ``states[v]`` are the numbers in the problem of variable v's states.

    ``memory`` has no entry where a table costs none. Bytes are whole numbers, so that sums of them are exact.
    """

    layout: Layout
    states: tuple[Index, ...]
    time: Mapping[Variables, Table]
    memory: Mapping[Variables, Table]

    @property
    def sizes(self) -> list[int]:
        """How many states each variable has."""
        return [len(s) for s in self.states]

    def restricted(self, keep: Sequence[Mask]) -> Model:
        """The same tables over the states that are marked."""
        fewer = {v for v, mask in enumerate(keep) if not mask.all()}
        if not fewer:
            return self

        def part(scope: Variables, table: Table) -> Table:
            for dim, v in enumerate(scope):
                if v in fewer:
                    table = table.compress(keep[v], axis=dim)
            return table

        return Model(
            self.layout,
            tuple(s[keep[v]] if v in fewer else s for v, s in enumerate(self.states)),
            {scope: part(scope, table) for scope, table in self.time.items()},
            {scope: part(scope, table) for scope, table in self.memory.items()},
        )


def model_of(problem: Problem) -> Model:
    """Read the tables of `problem`, with all states."""
    parts = layout(problem)
    time: dict[Variables, Table] = {}
    memory: dict[Variables, Table] = {}
    for scope in (*parts.outside, *(s for scopes in parts.in_block for s in scopes)):
        cost = problem.unary[scope[0]] if len(scope) == 1 else problem.pairs[scope[0], scope[1]]
        time[scope] = cost.time
        if cost.memory.any():
            # Shares of thirds and fifths leave rounding errors of whole bytes.
            whole = np.rint(cost.memory)
            memory[scope] = whole if np.abs(whole - cost.memory).max() < 1e-3 else cost.memory
    states = tuple(np.arange(len(s)) for s in problem.states)
    return Model(parts, states, time, memory)


def copies(parts: Layout, count: int) -> list[Copies]:
    """Group `count` variables by the states they share, with the tables around each copy."""
    outside = _uses(parts.outside, count)
    inside = [_uses(scopes, count) for scopes in parts.in_block]
    groups = []
    done: set[int] = set()
    for block, uses in zip(parts.blocks, inside, strict=True):
        groups += [Copies((v,), (tuple(uses[v]),)) for v in block.inside]
        for enter, leave in zip(block.entrance, block.exit, strict=True):
            first, middle, last = (
                (*outside[enter], *uses[enter]),
                (*uses[leave], *uses[enter]),
                (*uses[leave], *outside[leave]),
            )
            groups.append(Copies((enter, leave), (first, middle, last) if block.count > 1 else (first, last)))
            done.update((enter, leave))
        done.update(block.inside)
    for v in range(count):
        if v not in done:
            repeated = [
                Use(block.count, use.scope, use.dim)
                for block, uses in zip(parts.blocks, inside, strict=True)
                for use in uses[v]
            ]
            groups.append(Copies((v,), ((*outside[v], *repeated),)))
    return groups


def _uses(scopes: Sequence[Variables], count: int) -> list[list[Use]]:
    uses: list[list[Use]] = [[] for _ in range(count)]
    for scope in scopes:
        for dim, v in enumerate(scope):
            uses[v].append(Use(1, scope, dim))
    return uses


def possible(model: Model) -> Model:
    """Drop states that cost infinitely many seconds whatever the neighbours do (arc consistency).

    Where nothing is left to a variable, it keeps what it has: the minimum is infinite and says so.
    """
    finite = {scope: np.isfinite(table) for scope, table in model.time.items() if table.max() == np.inf}
    if not finite:
        return model
    groups = copies(model.layout.of(finite), len(model.states))
    keep = [np.ones(len(s), dtype=np.bool_) for s in model.states]
    near: dict[int, set[int]] = {}
    stale = dict[int, None]()
    for number, group in enumerate(groups):
        scopes = {use.scope for kind in group.kinds for use in kind}
        if scopes:
            stale[number] = None
        for v in {v for scope in scopes for v in scope}:
            near.setdefault(v, set()).add(number)
    while stale:
        number = next(iter(stale))
        del stale[number]
        group = groups[number]
        before = keep[group.variables[0]]
        lives = np.zeros_like(before)
        for kind in group.kinds:
            lives |= _supported(kind, finite, keep, lives.size)
        lives &= before
        if lives.any() and (lives != before).any():
            for v in group.variables:
                keep[v] = lives
                stale.update(dict.fromkeys(sorted(near[v])))
    return model.restricted(keep)


def _supported(kind: Sequence[Use], finite: Mapping[Variables, Mask], keep: Sequence[Mask], size: int) -> Mask:
    lives = np.ones(size, dtype=np.bool_)
    for use in kind:
        table = finite[use.scope]
        if len(use.scope) == 1:
            lives &= table
        else:
            rows = table if use.dim == 0 else table.T
            lives &= (rows & keep[use.scope[1 - use.dim]]).any(axis=1)
    return lives


def undominated(model: Model) -> Model:
    """Drop states that another is at least as good as in seconds and in bytes, whatever the neighbours do.

    State a goes where, for some b, ``sum over tables of min over neighbours t of [f(a, t) − f(b, t)] >= 0`` for both
    costs (Goldstein, "Efficient rotamer elimination", Biophysical Journal 66, 1994). Of equal states the first stays.
    """
    keep = [np.ones(len(s), dtype=np.bool_) for s in model.states]
    for group in copies(model.layout, len(model.states)):
        alive = np.flatnonzero(keep[group.variables[0]])
        if len(alive) < 2:
            continue
        gone = np.ones(len(alive), dtype=np.bool_)
        for kind in group.kinds:
            gone &= _dominated(model, kind, keep, alive)
        if gone.any() and not gone.all():
            for v in group.variables:
                keep[v][alive[gone]] = False
    return model.restricted(keep)


def _dominated(model: Model, kind: tuple[Use, ...], keep: Sequence[Mask], alive: Index) -> Mask:
    tables = [(0, use.times, _rows(model.time[use.scope], use, keep, alive)) for use in kind]
    tables += [
        (1, use.times, _rows(model.memory[use.scope], use, keep, alive)) for use in kind if use.scope in model.memory
    ]
    least = sum((times * rows.min(axis=1) for which, times, rows in tables if which == 0), np.zeros(len(alive)))
    gone = ~np.isfinite(least)
    scale = np.abs(least[np.isfinite(least)]).max(initial=0.0)
    for better in np.argsort(least, kind="stable")[:CANDIDATES]:
        if gone[better]:
            continue
        worse = [np.zeros(len(alive)), np.zeros(len(alive))]
        for which, times, rows in tables:
            with np.errstate(invalid="ignore"):
                difference = rows - rows[better]
                difference[np.isinf(rows)] = np.inf
                worse[which] += times * difference.min(axis=1)
        # A rounding error must not make two equal states drop each other.
        beaten = (worse[0] > 1e-12 * scale) | (worse[0] >= 0) & (np.arange(len(alive)) > better)
        beaten &= worse[1] >= 0
        beaten[better] = False
        gone |= beaten
    return gone


def _rows(table: Table, use: Use, keep: Sequence[Mask], alive: Index) -> Table:
    if len(use.scope) == 1:
        return table[alive, None]
    others = np.flatnonzero(keep[use.scope[1 - use.dim]])
    return table[np.ix_(alive, others)] if use.dim == 0 else table[np.ix_(others, alive)].T
