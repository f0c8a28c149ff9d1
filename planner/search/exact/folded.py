"""Elimination of a folded graph: a run of equal blocks is one table raised to a min-plus power.

A run of L equal blocks is not unrolled: one block, reduced to a table between its entrance and its exit, is raised to
the (L − 1)-th power, which lets every layer choose for itself and costs log L.

Eliminating variables gives the minimum over everything; going back through the steps gives for each entry of each
table the minimum over the rest (`marginals`). No plan that costs less than a threshold takes a state, or passes an
entry, whose cost together with the rest is above it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from planner.search.exact.blocks import BlockVariables, Power, Table, TooWideError, Variables, min_plus, min_plus_power
from planner.search.exact.buckets import (
    MAX_TABLE,
    Buckets,
    Index,
    Scope,
    TableUse,
    classes,
    own_costs,
    part_table,
    plain,
    planned,
    unary_costs,
)
from planner.search.exact.model import Mask, Model
from planner.search.problem.problem import Assignment

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


MAX_WORK = 60_000_000


@dataclass(frozen=True, slots=True)
class Rest:
    """Least costs of everything but a table, with the table's dims, and of whole plans by each variable's states."""

    tables: list[Table]
    states: dict[int, Table]


@dataclass(frozen=True, slots=True)
class BlockRow:
    """A row of L equal blocks between its ends, arrays ``(shared states, states, states)``.

    ``prefix[i]`` is the i-th power of the block's table; ``after[i][g, e, x]`` what remains when layer i ends in x,
    and e was the entrance of the first; ``rest`` what everything but one layer costs at least, wherever it stands.
    """

    prefix: list[Table]
    after: list[Table]
    rest: Table


@dataclass(frozen=True, slots=True)
class Marginals:
    """Least costs of the rest for all tables of a folded elimination; ``least[v]`` are those of v's states."""

    outer: Rest
    inner: tuple[Rest, ...]
    rows: tuple[BlockRow, ...]
    least: tuple[Table, ...]

    def below(self, threshold: float) -> list[Mask]:
        """States that some plan of at most `threshold` may take."""
        return [table <= threshold for table in self.least]


def marginals(folded: FoldedElimination, done: Eliminated) -> Marginals:
    """Go back through an elimination."""
    parts, sizes = folded.model.layout, folded.sizes
    outer = _rest(folded.outer, done.outer, [np.array(done.total - float(done.outer[n])) for n in folded.outer.left])
    least = dict(outer.states)
    rows, inner = [], []
    for number, block in enumerate(parts.blocks):
        shape = done.powers[number].table.shape
        base = gathered(folded.inner[number], done.inner[number], block.ends, sizes)
        around = outer.tables[len(parts.outside) + number]
        row = _row(base.reshape(shape), block.count, around.reshape(shape))
        rows.append(row)
        whole = base + row.rest.reshape(base.shape)
        buckets = folded.inner[number]
        left = []
        for n in buckets.left:
            known = buckets.scopes[n]
            away = tuple(i for i, v in enumerate(block.ends) if v not in known.variables)
            dims = [v for v in block.ends if v in known.variables]
            table = whole.min(axis=away).transpose([dims.index(v) for v in known.variables])
            for dim, picks in enumerate(known.rows):
                table = _least_by_class(table, dim, picks, done.inner[number][n].shape[dim])
            left.append(_minus(table, done.inner[number][n]))
        rest = _rest(buckets, done.inner[number], left)
        inner.append(rest)
        least.update(rest.states)
        between = np.minimum.reduce(
            [(p + a).min(axis=(0, 1)) for p, a in zip(row.prefix[1:], row.after[1:], strict=True)]
        )
        between = between.reshape([sizes[v] for v in block.exit])
        for dim, (enter, leave) in enumerate(zip(block.entrance, block.exit, strict=True)):
            here = between.min(axis=tuple(i for i in range(between.ndim) if i != dim))
            least[enter] = least[leave] = np.minimum(here, np.minimum(least[enter], least[leave]))
    return Marginals(outer, tuple(inner), tuple(rows), tuple(least[v] for v in range(len(sizes))))


def _row(base: Table, count: int, around: Table) -> BlockRow:
    identity = np.full(base.shape[1:], np.inf)
    np.fill_diagonal(identity, 0.0)
    prefix = [np.broadcast_to(identity, base.shape)]
    after = [around]
    backwards = np.ascontiguousarray(base.transpose(0, 2, 1))
    for layer in range(count):
        prefix.append(base if layer == 0 else min_plus(prefix[-1], base))
        after.append(min_plus(after[-1], backwards))
    after = after[::-1]
    rest = np.full(base.shape, np.inf)
    for layer in range(count):
        # Over the entrances of the first layer: the way to this layer's entrance, and on from its exit.
        np.minimum(rest, min_plus(prefix[layer].transpose(0, 2, 1), after[layer + 1]), out=rest)
    return BlockRow(prefix, after, rest)


def _rest(buckets: Buckets, made: Sequence[Table], left: Sequence[Table]) -> Rest:
    """Least costs of the rest; `left` are those of the tables that no step takes up."""
    tables: list[Table] = [np.zeros(0)] * len(made)
    for number, table in zip(buckets.left, left, strict=True):
        tables[number] = table
    states: dict[int, Table] = {}
    for position in range(len(buckets.steps) - 1, -1, -1):
        step = buckets.steps[position]
        arranged = [part_table(part, made) for part in step.parts]
        total = tables[buckets.given + position][..., None]
        for table in arranged:
            total = total + table
        own = own_costs(step, made)
        shape = (*step.shape, len(step.starts))
        total = np.broadcast_to(total, shape)
        by_class = np.empty(len(step.own), dtype=np.intp)
        by_class[step.own] = np.repeat(np.arange(len(step.starts)), np.diff([*step.starts, len(step.own)]))
        costs = unary_costs(step, made)
        others = total.min(axis=tuple(range(len(step.shape))))[by_class]
        states[step.variable] = others + costs
        for number, rows in step.unary:
            least = _least_by_class(states[step.variable], 0, rows, len(made[number]))
            tables[number] = _minus(least, made[number])
        total = total + own
        for part, table in zip(step.parts, arranged, strict=True):
            tables[part.source] = _part_rest(part, total, table, made[part.source].shape)
    return Rest(tables, states)


def _part_rest(part: TableUse, total: Table, arranged: Table, shape: tuple[int, ...]) -> Table:
    away = tuple(dim for dim, size in enumerate(part.shape) if size == 1 and total.shape[dim] > 1)
    table = _minus(total.min(axis=away, keepdims=True), arranged)
    table = table.reshape([shape[i] if p is None else len(p) for i, p in zip(part.order, part.picks, strict=True)])
    for dim, picks in enumerate(part.picks):
        if picks is not None:
            table = _least_by_class(table, dim, picks, shape[part.order[dim]])
    return table.transpose(np.argsort(part.order))


def _least_by_class(table: Table, dim: int, rows: Index, count: int) -> Table:
    """Minimum over the entries along `dim` that belong to each of `count` rows; infinite where none does."""
    moved = np.moveaxis(table, dim, 0)
    least = np.full((count, *moved.shape[1:]), np.inf)
    np.minimum.at(least, rows, moved)
    return np.moveaxis(least, 0, dim)


def _minus(total: Table, part: Table) -> Table:
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(part), np.inf, total - part)


def affordable(folded: FoldedElimination) -> bool:
    """Whether going back through the elimination takes little time and memory."""
    rows = sum(
        block.count * prod(folded.sizes[v] for v in (*block.ends, *block.exit)) for block in folded.model.layout.blocks
    )
    return folded.outer.work + sum(b.work for b in folded.inner) + rows <= MAX_WORK
