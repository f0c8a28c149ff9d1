"""Min-plus elimination planned once and run for any costs: the exact minimum of a sum of tables.

Eliminating a variable needs a table over all its neighbours. What a neighbour's state means to it is often the same
for many states (an operator cares where one tensor lies, not how its writer computed it), so a table has a row for
each *class* of states that its parts cannot tell apart. Which state attains a minimum is worked out on the way back,
for the one assignment that is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import Table, TooWideError

Index = NDArray[np.intp]
Classes = tuple[Index, Index]
"""The class of each state, and one member of each class."""

MAX_TABLE = 10_000_000
MAX_DIMS = 64
"""Dims of a table that numpy has: variables of one choice take one each, and no room."""
MAX_WORK = 3_000_000_000
CHUNK = 1 << 17
LONG = 1 << 14
"""Entries of a sum from which its terms are laid out in its order first."""
SPARSE = 64
"""Joint classes are sorted rather than tabulated where they may be so many times more than states."""
WORTH_COMPILING = 300_000_000
"""Entries of all steps from which the compiled loop is loaded, which takes a process about 0.4 s."""
COMPILED = 100_000
"""Entries of one step from which the loop is used once it is loaded."""


@dataclass(frozen=True, slots=True)
class Scope:
    """The variables of a table, and for each the row that a state means, arrays ``(states,)``."""

    variables: tuple[int, ...]
    rows: tuple[Index, ...]


def plain(variables: Sequence[int], sizes: Sequence[int]) -> Scope:
    """The scope of a table with one row a state."""
    return Scope(tuple(variables), tuple(_each(sizes[v]) for v in variables))


@cache
def _each(size: int) -> Index:
    """A row of its own for each state, the same object for all variables with as many."""
    rows = np.arange(size)
    rows.setflags(write=False)
    return rows


def classes(slices: Sequence[Sequence[Table]]) -> list[Classes]:
    """Group equal slices along the first dim of each set of tables: the class of each, and one member of each class.

    >>> classes([[np.array([[1.0, 2.0], [0.0, 2.0], [1.0, 2.0]])]])
    [(array([0, 1, 0]), array([0, 1]))]
    """
    rows = [np.concatenate(one, axis=1) if len(one) > 1 else np.ascontiguousarray(one[0]) for one in slices]
    # Those of one length lie behind each other.
    order = sorted(range(len(rows)), key=lambda n: rows[n].shape[1])
    blocks = [
        np.concatenate([rows[n] for n in alike]).view(np.uint64)
        for _, alike in groupby(order, key=lambda n: rows[n].shape[1])
    ]
    starts = np.cumsum([0, *(len(rows[n]) for n in order)])
    first = _first_equal(blocks, starts)
    fresh = first == np.arange(len(first))
    members = np.flatnonzero(fresh)
    ends = members.searchsorted(starts)
    numbers = members.searchsorted(first)
    found: list[Classes] = [(numbers, members)] * len(rows)
    for n, start, end, low, high in zip(order, starts[:-1], starts[1:], ends[:-1], ends[1:], strict=True):
        found[n] = numbers[start:end] - low, members[low:high] - start
    return found


def _first_equal(blocks: Sequence[NDArray[np.uint64]], starts: Index) -> Index:
    """The first row that each row equals among those from one of the `starts` to the next."""
    if not blocks:
        return np.zeros(0, dtype=np.intp)
    sets = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    # Rows are told apart by a checksum, which is then checked.
    sums = np.concatenate([block @ _factors(block.shape[1]) for block in blocks]) ^ _factors(len(starts))[sets]
    _, places, inverse = np.unique(sums, return_index=True, return_inverse=True)
    first: Index = places[inverse]
    same = bool((sets[first] == sets).all())
    low = 0
    for block in blocks:
        high = low + len(block)
        same = same and bool((block == block[first[low:high] - low]).all())
        low = high
    if same:
        return first
    seen: dict[tuple[int, bytes], int] = {}
    keys = zip(sets.tolist(), (row.tobytes() for block in blocks for row in block), strict=True)
    return np.array([seen.setdefault(key, place) for place, key in enumerate(keys)], dtype=np.intp)


@cache
def _factors(count: int) -> NDArray[np.uint64]:
    """Odd factors for the entries of a row: multiples of the golden ratio's 64 bits, mixed (SplitMix64)."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31)) | np.uint64(1)


def join(maps: Sequence[Index]) -> tuple[Index, Index]:
    """Classes that every map tells apart as far as it does: the class of each state, and one member of each.

    >>> join([np.array([0, 0, 1]), np.array([0, 1, 1])])
    (array([0, 1, 2]), array([0, 1, 2]))
    """
    code = maps[0]
    entries = int(code.max(initial=-1)) + 1
    for other in maps[1:]:
        if other is not code:
            size = int(other.max(initial=-1)) + 1
            code = code * size + other
            entries *= size
    if entries > SPARSE * len(code):
        _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
        return inverse.astype(np.intp), first
    # Codes are few: a table of them says what a sort would.
    at = np.full(entries, -1, dtype=np.intp)
    at[code[::-1]] = np.arange(len(code) - 1, -1, -1)
    there = at >= 0
    if there.all():
        return code, at
    return (there.cumsum() - 1)[code], at[there]


@dataclass(frozen=True, slots=True)
class TableUse:
    """How one table enters a step: its dims in the step's order, and the row for each of the step's classes."""

    source: int
    order: tuple[int, ...]
    picks: tuple[Index | None, ...]
    shape: tuple[int, ...]
    """With dims of one row where the part does not depend on a variable."""


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """Minimise over `variable`; the message has the dims of `scope`.

    ``own`` lists the states of the variable by class, ``starts`` where each class starts.
    """

    variable: int
    scope: Scope
    shape: tuple[int, ...]
    unary: tuple[tuple[int, Index], ...]
    parts: tuple[TableUse, ...]
    own: Index
    starts: Index

    @property
    def work(self) -> int:
        """Entries of the table that the message is the minimum of."""
        return prod(self.shape) * len(self.starts)


def sources(step: EliminationStep) -> list[int]:
    """Numbers of the tables that a step takes up."""
    return [*(number for number, _ in step.unary), *(part.source for part in step.parts)]


class Buckets:
    """An order of elimination for tables of given scopes, to be run for any costs.

    Parameters
    ----------
    scopes
        What each table depends on; the same order as the tables given to `run`.
    sizes
        States of every variable.
    variables
        Those to eliminate; others stay.

    Raises
    ------
    TooWideError
        Where a table would have over `MAX_TABLE` entries or `MAX_DIMS` dims, or all together over `MAX_WORK`.
    """

    def __init__(self, scopes: Sequence[Scope], sizes: Sequence[int], variables: Iterable[int]) -> None:
        self.sizes = sizes
        self.scopes = list(scopes)
        self.given = len(self.scopes)
        self._touching: dict[int, list[int]] = {}
        for number, scope in enumerate(self.scopes):
            for v in scope.variables:
                self._touching.setdefault(v, []).append(number)
        self._joins: dict[tuple[int, ...], tuple[Sequence[Index], Classes]] = {}
        self._picks: dict[tuple[int, int], Index | None] = {}
        self._sorted: dict[int, tuple[Index, Index]] = {}
        maps = {id(rows): rows for scope in self.scopes for rows in scope.rows}
        counts = {key: int(rows.max(initial=-1)) + 1 for key, rows in maps.items()}
        self._counts = [tuple([counts[id(rows)] for rows in scope.rows]) for scope in self.scopes]
        """Rows along each dim of each table."""
        self.steps: list[EliminationStep] = []
        self._plan(set(variables))
        self.width = max((len(s.scope.variables) for s in self.steps), default=0)
        self.largest = max((s.work for s in self.steps), default=0)
        self.work = sum(s.work for s in self.steps)
        dead = {s for step in self.steps for s in sources(step)}
        self.left = [n for n in range(len(self.scopes)) if n not in dead]
        """Numbers of the tables, given or made, that no step takes up."""

    def _plan(self, remaining: set[int]) -> None:
        weights = {v: self._weight(v) for v in remaining}
        waiting = [(weight, v) for v, weight in weights.items()]
        heapify(waiting)
        work = 0.0
        while remaining:
            weight, v = heappop(waiting)
            if v not in remaining or weight != weights[v]:
                continue
            remaining.discard(v)
            step = self._step(v)
            work += step.work
            if prod(step.shape) > MAX_TABLE or work > MAX_WORK or len(step.shape) > MAX_DIMS:
                raise TooWideError(
                    f"exact search would need a table of {step.work:.1e} entries (limits {MAX_TABLE:.0e} and, over "
                    f"all, {MAX_WORK:.0e}): the graph is too densely connected; pin more dimensions, for example "
                    "--pin tp=1"
                )
            self._add(step)
            for n in step.scope.variables:
                if n in remaining:
                    weight = self._weight(n)
                    if weight != weights[n]:
                        weights[n] = weight
                        heappush(waiting, (weight, n))

    def _add(self, step: EliminationStep) -> None:
        number = len(self.scopes)
        self.steps.append(step)
        self.scopes.append(step.scope)
        self._counts.append(step.shape)
        gone = set(sources(step))
        for n in step.scope.variables:
            self._touching[n] = [t for t in self._touching[n] if t not in gone]
            self._touching[n].append(number)

    def _weight(self, variable: int) -> float:
        """About how many entries eliminating `variable` takes now."""
        counts: dict[int, float] = {}
        for number in self._touching.get(variable, ()):
            scope = self.scopes[number]
            if len(scope.variables) > 1:
                for v, rows in zip(scope.variables, self._counts[number], strict=True):
                    counts[v] = counts.get(v, 1.0) * rows
        weight = 1.0
        for v, count in counts.items():
            size = self.sizes[v]
            weight *= count if count < size else size
        return weight

    def _step(self, variable: int) -> EliminationStep:
        touching = self._touching.get(variable, [])
        unary = tuple((t, self.scopes[t].rows[0]) for t in touching if len(self.scopes[t].variables) == 1)
        others = [t for t in touching if len(self.scopes[t].variables) > 1]
        maps: dict[int, list[Index]] = {}
        for t in others:
            for v, rows in zip(self.scopes[t].variables, self.scopes[t].rows, strict=True):
                maps.setdefault(v, []).append(rows)
        joined = {v: self._joined(m) for v, m in maps.items()}
        counts = {v: len(members) for v, (_, members) in joined.items()}
        names = [v for _, v in sorted([(-count, v) for v, count in counts.items() if v != variable])]
        by_class, starts = self._by_class(variable, joined.get(variable))
        place = {v: dim for dim, v in enumerate((*names, variable))}
        return EliminationStep(
            variable=variable,
            scope=Scope(tuple(names), tuple(joined[v][0] for v in names)),
            shape=tuple([counts[v] for v in names]),
            unary=unary,
            parts=tuple([self._part(t, place, joined) for t in others]),
            own=by_class,
            starts=starts,
        )

    def _joined(self, maps: Sequence[Index]) -> Classes:
        """`join`, whose answers are kept: tables share their maps, and equal blocks those of their messages."""
        apart = {id(rows): rows for rows in maps}
        key = tuple(apart)
        if key not in self._joins:
            distinct = list(apart.values())
            self._joins[key] = distinct, join(distinct)
        return self._joins[key][1]

    def _by_class(self, variable: int, joined: Classes | None) -> tuple[Index, Index]:
        """The states of a variable by class, and where each class starts; of what nothing tells apart there is one."""
        if joined is None:
            return _each(self.sizes[variable]), np.zeros(1, dtype=np.intp)
        own, members = joined
        if id(own) not in self._sorted:
            order = np.argsort(own, kind="stable")
            self._sorted[id(own)] = order, np.searchsorted(own[order], np.arange(len(members)))
        return self._sorted[id(own)]

    def _part(self, number: int, place: Mapping[int, int], joined: Mapping[int, Classes]) -> TableUse:
        """How a table enters the step whose variables have the given places."""
        scope, counts = self.scopes[number], self._counts[number]
        dims = sorted([(place[v], i) for i, v in enumerate(scope.variables)])
        shape, picks = [1] * len(place), []
        for dim, i in dims:
            members = joined[scope.variables[i]][1]
            picks.append(self._picked(scope.rows[i], members, counts[i]))
            shape[dim] = len(members)
        return TableUse(number, tuple([i for _, i in dims]), tuple(picks), tuple(shape))

    def _picked(self, rows: Index, members: Index, count: int) -> Index | None:
        """Rows of some states, None where those are all of them in order."""
        key = id(rows), id(members)
        if key not in self._picks:
            found = rows[members]
            self._picks[key] = None if len(found) == count and (found == _each(count)).all() else found
        return self._picks[key]

    def run(self, tables: Sequence[Table]) -> list[Table]:
        """Eliminate; returns the given tables followed by the message of each step."""
        made = list(tables)
        for step in self.steps:
            own = own_costs(step, made)
            parts = [part_table(part, made) for part in step.parts]
            arrays = [own.reshape((1,) * len(step.shape) + (-1,)), *parts]
            made.append(_minimum(arrays, step.shape, self.work >= WORTH_COMPILING))
        return made

    def total(self, made: Sequence[Table]) -> float:
        """The minimum, once every variable is eliminated."""
        return float(sum(float(made[n]) for n in self.left))

    def recover(self, made: Sequence[Table], assignment: dict[int, int]) -> dict[int, int]:
        """Complete `assignment` (states of what was not eliminated) with best states; ties go to the first class."""
        result = dict(assignment)
        for step in reversed(self.steps):
            unary = unary_costs(step, made)
            total = np.minimum.reduceat(unary[step.own], step.starts)
            for part in step.parts:
                total += self._along(part, made[part.source], result)
            best = int(total.argmin())
            end = step.starts[best + 1] if best + 1 < len(step.starts) else len(step.own)
            states = step.own[step.starts[best] : end]
            result[step.variable] = int(states[unary[states].argmin()])
        return result

    def _along(self, part: TableUse, table: Table, states: Mapping[int, int]) -> Table:
        """A table by the classes of the step's variable, given the states of the others."""
        scope, own = self.scopes[part.source], part.order[-1]
        row = table[tuple(slice(None) if i == own else scope.rows[i][states[v]] for i, v in enumerate(scope.variables))]
        return row if part.picks[-1] is None else row[part.picks[-1]]


_PLANNED: OrderedDict[Hashable, Buckets] = OrderedDict()
PLANNED = 16


def planned(scopes: Sequence[Scope], sizes: Sequence[int], variables: Iterable[int]) -> Buckets:
    """An order of elimination, the same object for what was asked lately: micro-batches change costs, not scopes."""
    given = tuple(variables)
    rows = tuple((scope.variables, *(r.tobytes() for r in scope.rows)) for scope in scopes)
    key = (tuple(sizes), given, rows)
    if key in _PLANNED:
        _PLANNED.move_to_end(key)
    else:
        _PLANNED[key] = Buckets(scopes, sizes, given)
        if len(_PLANNED) > PLANNED:
            _PLANNED.popitem(last=False)
    return _PLANNED[key]


def unary_costs(step: EliminationStep, made: Sequence[Table]) -> Table:
    """Costs of a step's variable by itself, by its states."""
    total = np.zeros(len(step.own))
    for number, rows in step.unary:
        total += made[number][rows]
    return total


def own_costs(step: EliminationStep, made: Sequence[Table]) -> Table:
    """The least cost of each class of the variable's states, by itself."""
    return np.minimum.reduceat(unary_costs(step, made)[step.own], step.starts)


def part_table(part: TableUse, made: Sequence[Table]) -> Table:
    """A table as it enters a step: broadcast over the step's dims."""
    table = made[part.source].transpose(part.order)
    for dim, picks in enumerate(part.picks):
        if picks is not None:
            table = table.take(picks, axis=dim)
    return table.reshape(part.shape)


def _minimum(arrays: Sequence[Table], shape: tuple[int, ...], compiled: bool) -> Table:
    """Minimise the broadcast sum of `arrays` over the last dim; `shape` is that of the result."""
    states = max(a.shape[-1] for a in arrays)
    if compiled and prod(shape) * states >= COMPILED:
        groups = _apart(arrays, len(shape))
        if groups is not None:
            return _products(arrays, shape, states, groups)
    out = np.empty(shape)
    # With the variable first, minima run over long rows of neighbouring numbers.
    turned = [a.transpose(-1, *range(a.ndim - 1)) for a in arrays]
    if out.size * states > LONG:
        turned = [np.ascontiguousarray(a) for a in turned]
    _fill(turned, out, states)
    return out


def _fill(arrays: list[Table], out: Table, states: int) -> None:
    """Minimise the broadcast sum of `arrays` over the first dim."""
    if out.ndim < 2 or out.size * states <= CHUNK:
        out[...] = _sum(arrays).min(axis=0)
        return
    fixed = [a[:, 0] for a in arrays if a.shape[1] == 1]
    moving = [a for a in arrays if a.shape[1] > 1]
    fixed = [_sum(fixed)] if fixed else []
    for row in range(out.shape[0]):
        _fill([*fixed, *(a[:, row] for a in moving)], out[row, ...], states)


Dims = tuple[int, ...]


def _apart(arrays: Sequence[Table], count: int) -> tuple[Dims, Dims, Dims] | None:
    """Split dims so that, given the first group, each array depends on the second or on the third alone."""
    spans = [{d for d in range(count) if a.shape[d] > 1} for a in arrays]
    for given in [(), *((d,) for d in range(count))]:
        rest = [d for d in range(count) if d not in given]
        together = {rest[0]} if rest else set()
        while True:
            near = {d for span in spans if span & together for d in span} - set(given)
            if near <= together:
                break
            together |= near
        others = tuple(d for d in rest if d not in together)
        if together and others:
            return given, tuple(sorted(together)), others
    return None


def _products(arrays: Sequence[Table], shape: tuple[int, ...], states: int, groups: tuple[Dims, Dims, Dims]) -> Table:
    """Min-plus products of matrices, one for each entry of the first group of dims."""
    from planner.search.compiled import min_plus_into

    given, first, second = groups
    order = (*given, *first, *second)
    moved = [a.transpose((*order, a.ndim - 1)) for a in arrays]
    sizes = [tuple(shape[d] for d in group) for group in groups]
    lead, middle = len(given), len(given) + len(first)
    out = np.empty([shape[d] for d in order])
    for index in np.ndindex(*sizes[0]):
        here = [a[tuple(i if a.shape[d] > 1 else 0 for d, i in enumerate(index))] for a in moved]
        left = [a for a in here if prod(a.shape[middle - lead : -1]) == 1]
        right = [a for a in here if prod(a.shape[middle - lead : -1]) > 1]
        rows = np.broadcast_to(_sum(left), (*sizes[1], *(1 for _ in second), states)).reshape(-1, states)
        columns = np.broadcast_to(_sum(right), (*(1 for _ in first), *sizes[2], states)).reshape(-1, states)
        min_plus_into(rows, np.ascontiguousarray(columns.T), out[index].reshape(len(rows), len(columns)))
    return np.ascontiguousarray(out.transpose(np.argsort(order)))


def _sum(arrays: Sequence[Table]) -> Table:
    total, *others = sorted(arrays, key=lambda table: table.size)
    for table in others:
        total = total + table
    return total
