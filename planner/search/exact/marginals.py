"""What everything else costs at least, given part of a plan: the way back through an elimination.

Eliminating variables gives the minimum over everything; going back through the steps gives for each entry of each
table the minimum over the rest. No plan that costs less than a threshold takes a state, or passes an entry, whose
cost together with the rest is above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from planner.search.exact.buckets import Buckets, Index, TableUse, own_costs, part_table, unary_costs
from planner.search.exact.elimination import Table, min_plus
from planner.search.exact.folded import Eliminated, FoldedElimination, gathered
from planner.search.exact.model import Mask

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
