"""Runs of equal blocks as variables: which tables count once, and which once a layer."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import Run
from planner.search.problem.problem import Problem
from simulator.errors import MeshwrightError, UnsupportedError

Table = NDArray[np.float64]


class TooWideError(MeshwrightError):
    """A table would outgrow memory or time: the graph is too densely connected for exact elimination."""


@dataclass(frozen=True, slots=True)
class Power:
    """A min-plus matrix power by squaring, the product of `left` and `right` but for the base."""

    table: Table
    count: int
    left: Power | None = None
    right: Power | None = None

    def path(self, group: int, start: int, end: int) -> list[int]:
        """States visited on the best way from `start` to `end`, both included; ties go to the lowest."""
        if self.left is None or self.right is None:
            return [start, end]
        middle = int((self.left.table[group, start] + self.right.table[group, :, end]).argmin())
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
    return Power(min_plus(left.table, right.table), left.count + right.count, left, right)


def min_plus(left: Table, right: Table) -> Table:
    """Min-plus products of matrices, ``(groups, n, k)`` with ``(groups, k, m)``."""
    table = np.empty((left.shape[0], left.shape[1], right.shape[2]))
    for group in range(len(table)):
        transposed = np.ascontiguousarray(right[group].T)
        for row in range(left.shape[1]):
            np.minimum.reduce(transposed + left[group, row], axis=1, out=table[group, row])
    return table


Variables = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BlockVariables:
    """A run's second block as variables: entrance (in the first block), exit, inside, and shared ones.

    ``count`` is how often it stands in a row. ``met`` are the stations of the entrance: what they cost depends on
    the block that reads them. ``left`` are those of the exit, read by what follows the run.
    """

    entrance: Variables
    exit: Variables
    inside: Variables
    shared: Variables
    count: int
    met: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()

    @property
    def ends(self) -> Variables:
        """What the rest of the graph sees of a row of blocks: the dims of its table."""
        return (*self.shared, *self.entrance, *self.exit)


@dataclass(frozen=True, slots=True)
class Layout:
    """All tables by where they count: `in_block` in every layer of a run but the first, `outside` once."""

    blocks: tuple[BlockVariables, ...]
    outside: tuple[Variables, ...]
    in_block: tuple[tuple[Variables, ...], ...]

    def of(self, tables: Container[Variables]) -> Layout:
        """The layout of some of the tables."""
        in_block = tuple(tuple(s for s in scopes if s in tables) for scopes in self.in_block)
        return Layout(self.blocks, tuple(s for s in self.outside if s in tables), in_block)

    def repeated(self) -> set[int]:
        """Variables that every layer has for itself."""
        return {v for block in self.blocks for v in (*block.inside, *block.exit)}


def layout(problem: Problem) -> Layout:
    """Assign every table of `problem` to a block or to the rest.

    Raises
    ------
    UnsupportedError
        Where the two blocks of a run offer different states (`planner.search.problem.unaligned` shortens such runs).
    """
    sizes = [len(s) for s in problem.states]
    blocks = tuple(_block(problem, run, sizes) for run in problem.graph.runs)
    owner: dict[int, int] = {}
    for number, block in enumerate(blocks):
        owner.update(dict.fromkeys((*block.inside, *block.exit), number))
    in_block: list[list[Variables]] = [[] for _ in blocks]
    outside: list[Variables] = []
    for scope in [*((v,) for v in range(len(sizes))), *problem.pairs]:
        home = _home(scope, blocks, owner)
        (outside if home is None else in_block[home]).append(scope)
    return Layout(blocks, tuple(outside), tuple(tuple(scopes) for scopes in in_block))


def _home(scope: Variables, blocks: Sequence[BlockVariables], owner: Mapping[int, int]) -> int | None:
    """Number of the block whose table counts in every layer but the first, None where it counts once."""
    if len(scope) == 1:
        met = next((number for number, block in enumerate(blocks) if scope[0] in block.met), None)
        left = any(scope[0] in block.left for block in blocks)
        return met if met is not None else None if left else owner.get(scope[0])
    for number in {owner[v] for v in scope if v in owner}:
        block = blocks[number]
        if all(v in block.inside or v in block.ends for v in scope):
            return number
    return None


def _block(problem: Problem, run: Run, sizes: list[int]) -> BlockVariables:
    """Find the variables of a run's second block and how they hang together with the rest."""
    decisions = problem.decisions
    first = _variables_of(problem, run.first)
    second = _variables_of(problem, run.second)
    back = _aligned(problem, run)
    members = set(second)
    neighbours: dict[int, set[int]] = {}
    for a, b in problem.pairs:
        neighbours.setdefault(a, set()).add(b)
        neighbours.setdefault(b, set()).add(a)
    around = {n for v in members for n in neighbours.get(v, ())} - members
    exits = sorted(v for v in members if back[v] in around)
    entrance = tuple(back[v] for v in exits)
    others = around - set(first)
    inside = tuple(v for v in sorted(members) if v not in exits)
    met_inside = set[int]().union(*(neighbours.get(v, ()) for v in inside))
    met_twice = set[int]().union(*(neighbours[v] & neighbours.get(back[v], set()) for v in exits))
    shared = others & (met_inside | met_twice)
    if any(sizes[back[v]] != sizes[v] for v in exits):
        raise _unaligned(run)
    left = frozenset(v for v in exits if decisions.variables[v].tensor is not None)
    met = frozenset(back[v] for v in left)
    return BlockVariables(entrance, tuple(exits), inside, tuple(sorted(shared)), run.count - 1, met, left)


def _variables_of(problem: Problem, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Variables that decide `nodes`, and the stations of what those make."""
    decisions = problem.decisions
    group = set(nodes)
    made = {n for n, v in enumerate(decisions.variables) if v.tensor is not None and v.tensor.node in group}
    followed = {decisions.of_node[i] for i in nodes} - {-1}
    return tuple(sorted(made | {n for n in followed if decisions.variables[n].tensor is None}))


def _unaligned(run: Run) -> UnsupportedError:
    return UnsupportedError(
        f"the blocks of {run.prefix!r} look alike but offer different strategies, so that they are no run for the "
        "folded search; take the graph and the decisions that planner.search.problem.unaligned.aligned returns"
    )


def _aligned(problem: Problem, run: Run) -> dict[int, int]:
    """Variable of the first block that stands where each variable of the second block stands."""
    decisions = problem.decisions
    position = dict(zip(run.second, run.first, strict=True))
    stations = {(v.tensor.node, v.tensor.output): n for n, v in enumerate(decisions.variables) if v.tensor is not None}
    result = {}
    for n in _variables_of(problem, run.second):
        variable = decisions.variables[n]
        if variable.tensor is not None:
            twin = stations.get((position[variable.tensor.node], variable.tensor.output))
            if twin is None:
                raise _unaligned(run)
            result[n] = twin
        else:
            result[n] = decisions.of_node[position[variable.nodes[0]]]
    return result
