"""Elimination of a folded graph: a run of equal blocks is one table raised to a min-plus power.

A run of L equal blocks is not unrolled: one block, reduced to a table between its entrance and its exit, is raised to
the (L − 1)-th power, which lets every layer choose for itself and costs log L.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from planner.search.exact.blocks import BlockVariables, Variables
from planner.search.exact.buckets import MAX_TABLE, Buckets, Index, Scope, classes, plain, planned
from planner.search.exact.elimination import Power, Table, TooWideError, min_plus_power
from planner.search.exact.model import Model
from planner.search.problem.solution import Assignment

Layers = tuple[tuple[Assignment, ...], ...]


@dataclass(frozen=True, slots=True)
class Weights:
    """What one second and one byte cost."""

    seconds: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Eliminated:
    """All tables of one run of the elimination: of each block, its powers, and of the rest."""

    inner: tuple[list[Table], ...]
    powers: tuple[Power, ...]
    outer: list[Table]
    total: float


class FoldedElimination:
    """The order of elimination of a model, to be run with any weights.

    Raises
    ------
    TooWideError
        Where the graph is too densely connected.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sizes = model.sizes
        self._members: dict[Variables, tuple[Index, ...]] = {}
        scopes = self._scopes()
        parts = model.layout
        self.inner = [
            planned([scopes[s] for s in inside], self.sizes, block.inside)
            for block, inside in zip(parts.blocks, parts.in_block, strict=True)
        ]
        for block in parts.blocks:
            entries = prod(self.sizes[v] for v in block.ends)
            if entries > MAX_TABLE:
                raise TooWideError(
                    f"exact search would need a table of {entries:.1e} entries between two layers (limit "
                    f"{MAX_TABLE:.0e}): pin more dimensions, for example --pin tp=1"
                )
        inside_of_blocks = {v for block in parts.blocks for v in block.inside}
        self.outer = planned(
            [*(scopes[s] for s in parts.outside), *(plain(block.ends, self.sizes) for block in parts.blocks)],
            self.sizes,
            [v for v in range(len(self.sizes)) if v not in inside_of_blocks],
        )
        self.width = max([self.outer.width, *(b.width for b in self.inner)])
        self.largest = max([self.outer.largest, *(b.largest for b in self.inner)])

    def _scopes(self) -> dict[Variables, Scope]:
        """Find the states that no table of seconds or bytes of two variables tells apart; of equal tables once."""
        kinds: dict[object, int] = {}
        sides: list[list[Table]] = []
        kind_of: dict[Variables, int] = {}
        for scope in self.model.time:
            if len(scope) == 2:
                tables = [t[scope] for t in (self.model.time, self.model.memory) if scope in t]
                key = (tables[0].shape, *(t.tobytes() for t in tables))
                if key not in kinds:
                    kinds[key] = len(sides)
                    sides += [tables, [t.T for t in tables]]
                kind_of[scope] = kinds[key]
        found = classes(sides)
        # Equal rows are one object, so that what is made of them is made once.
        same: dict[bytes, Index] = {}
        rows = [same.setdefault(numbers.tobytes(), numbers) for numbers, _ in found]
        scopes: dict[Variables, Scope] = {}
        for scope in self.model.time:
            kind = kind_of.get(scope)
            if kind is None:
                self._members[scope] = (np.arange(self.sizes[scope[0]]),)
                scopes[scope] = plain(scope, self.sizes)
            else:
                self._members[scope] = (found[kind][1], found[kind + 1][1])
                scopes[scope] = Scope(scope, (rows[kind], rows[kind + 1]))
        return scopes

    def _cost(self, scope: Variables, weights: Weights) -> Table:
        members = self._members[scope]
        return weighed(self.model, scope, weights, members)

    def run(self, weights: Weights) -> Eliminated:
        """Eliminate everything."""
        parts = self.model.layout
        inner, powers = [], []
        for block, buckets, inside in zip(parts.blocks, self.inner, parts.in_block, strict=True):
            made = buckets.run([self._cost(s, weights) for s in inside])
            states = prod(self.sizes[v] for v in block.exit)
            table = gathered(buckets, made, block.ends, self.sizes).reshape(-1, states, states)
            inner.append(made)
            powers.append(min_plus_power(table, block.count))
        tables = [self._cost(s, weights) for s in parts.outside]
        tables += [
            power.table.reshape([self.sizes[v] for v in block.ends])
            for block, power in zip(parts.blocks, powers, strict=True)
        ]
        made = self.outer.run(tables)
        return Eliminated(tuple(inner), tuple(powers), made, self.outer.total(made))

    def plan(self, done: Eliminated) -> tuple[dict[int, int], Layers]:
        """States, by their numbers in the model, that attain the minimum: of every variable, and of each layer."""
        assignment = self.outer.recover(done.outer, {})
        layers = []
        for number, block in enumerate(self.model.layout.blocks):
            path = done.powers[number].path(*self._ends(block, assignment))
            states = self.along(number, done, path, assignment)
            assignment.update({v: states[-1][v] for v in (*block.inside, *block.exit)})
            layers.append(states)
        return assignment, tuple(layers)

    def _ends(self, block: BlockVariables, assignment: Mapping[int, int]) -> tuple[int, int, int]:
        group, start, end = (flat(assignment, v, self.sizes) for v in (block.shared, block.entrance, block.exit))
        return group, start, end

    def along(
        self, number: int, done: Eliminated, path: Sequence[int], assignment: Mapping[int, int]
    ) -> tuple[Assignment, ...]:
        """Best states of the block in each layer along a path of its ends."""
        block = self.model.layout.blocks[number]
        decoded: dict[tuple[int, int], Assignment] = {}
        for pair in pairwise(path):
            if pair not in decoded:
                known = {v: assignment[v] for v in block.shared}
                known.update(unflat(pair[0], block.entrance, self.sizes))
                known.update(unflat(pair[1], block.exit, self.sizes))
                states = self.inner[number].recover(done.inner[number], known)
                decoded[pair] = {v: states[v] for v in (*block.entrance, *block.inside, *block.exit)}
        return tuple(decoded[pair] for pair in pairwise(path))


def weighed(model: Model, scope: Variables, weights: Weights, members: Sequence[Index] | None = None) -> Table:
    """Seconds and bytes of a table as one cost; infinite where the seconds are. `members` picks rows and columns."""

    def picked(table: Table) -> Table:
        for dim, states in enumerate(members or ()):
            if len(states) < table.shape[dim]:
                table = table.take(states, axis=dim)
        return table

    time = picked(model.time[scope])
    if weights.seconds == 0:
        cost = np.where(np.isinf(time), np.inf, 0.0)
    else:
        cost = time if weights.seconds == 1 else time * weights.seconds
    if weights.bytes and scope in model.memory:
        cost = cost + weights.bytes * picked(model.memory[scope])
    return cost


def gathered(buckets: Buckets, made: Sequence[Table], scope: Variables, sizes: Sequence[int]) -> Table:
    """Sum of the tables that elimination left, over all states of `scope`."""
    total = np.zeros([sizes[v] for v in scope])
    for number in buckets.left:
        known, table = buckets.scopes[number], made[number]
        order = sorted(range(len(known.variables)), key=lambda i: scope.index(known.variables[i]))
        table = table.transpose(order)
        for dim, i in enumerate(order):
            table = table.take(known.rows[i], axis=dim)
        total += table.reshape([sizes[v] if v in known.variables else 1 for v in scope])
    return total


def flat(assignment: Mapping[int, int], variables: Variables, sizes: Sequence[int]) -> int:
    """Number of a joint state of `variables`, the last one fastest."""
    index = 0
    for v in variables:
        index = index * sizes[v] + assignment[v]
    return index


def unflat(index: int, variables: Variables, sizes: Sequence[int]) -> dict[int, int]:
    """States of `variables` from the number of their joint state."""
    states = {}
    for v in reversed(variables):
        index, states[v] = divmod(index, sizes[v])
    return states
