"""Exact search by dynamic programming: min-plus elimination, with repeated blocks as matrix powers.

Every variable of the graph is eliminated in an order that keeps tables small. A run of L equal blocks
is not unrolled: one block, reduced to a table between its entrance and its exit, is raised to the
(L − 1)-th min-plus power, which lets every layer choose for itself and costs log L.

The memory limit is relaxed with a price λ per byte (Lagrange): for every λ ≥ 0,
``min_x [time(x) + λ memory(x)] − λ limit`` is a lower bound on the best feasible plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from planner.graph.operator_graph import Run
from planner.search.elimination import (
    Factor,
    Power,
    Reduced,
    combine,
    eliminate,
    elimination_order,
    min_plus_power,
    recover,
)
from planner.search.problem import Problem
from planner.search.solution import Assignment, Solution
from simulator.errors import UnsupportedError

PRICE_STEPS = 12
BRANCH_STEPS = 6
BRANCH_WORK = 40_000
PROOF = 1e-9


@dataclass(frozen=True, slots=True)
class _Block:
    """A run's second block as variables: entrance (in the first block), exit, inside, and shared ones.

    ``met`` are the stations of the entrance: what they cost depends on the block that reads them.
    ``left`` are those of the exit, read by what follows the run.
    """

    entrance: tuple[int, ...]
    exit: tuple[int, ...]
    inside: tuple[int, ...]
    shared: tuple[int, ...]
    count: int
    order: tuple[int, ...]
    met: frozenset[int] = frozenset()
    left: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Powered:
    block: _Block
    reduced: Reduced
    power: Power


class DynamicProgramming:
    """The exact solver of one problem; tables are built once, prices of memory vary."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = [len(s) for s in problem.states]
        self.blocks = [_block(problem, run, self.sizes) for run in problem.graph.runs]
        self._split()

    def _split(self) -> None:
        """Assign every table to a block or to the rest, and fix the order of elimination."""
        owner: dict[int, int] = {}
        for number, block in enumerate(self.blocks):
            owner.update(dict.fromkeys((*block.inside, *block.exit), number))
        self.in_block: list[list[tuple[int, ...]]] = [[] for _ in self.blocks]
        self.outside: list[tuple[int, ...]] = []
        scopes = [(v,) for v in range(len(self.sizes))] + list(self.problem.pairs)
        for scope in scopes:
            home = self._home(scope, owner)
            (self.outside if home is None else self.in_block[home]).append(scope)
        for number, block in enumerate(self.blocks):
            order = elimination_order(self.in_block[number], self.sizes, block.inside)
            self.blocks[number] = replace(block, order=order)
        inside = {v for block in self.blocks for v in block.inside}
        spans = [(*b.shared, *b.entrance, *b.exit) for b in self.blocks]
        rest = [v for v in range(len(self.sizes)) if v not in inside]
        self.order = elimination_order([*self.outside, *spans], self.sizes, rest)

    def _home(self, scope: tuple[int, ...], owner: Mapping[int, int]) -> int | None:
        """Number of the block whose table counts in every layer but the first, None where it counts once."""
        if len(scope) == 1:
            met = next((number for number, block in enumerate(self.blocks) if scope[0] in block.met), None)
            left = any(scope[0] in block.left for block in self.blocks)
            return met if met is not None else None if left else owner.get(scope[0])
        homes = {owner[v] for v in scope if v in owner}
        for number in homes:
            block = self.blocks[number]
            if all(v in block.inside or v in block.exit or v in block.entrance or v in block.shared for v in scope):
                return number
        return None

    @cached_property
    def time_scale(self) -> float:
        """More seconds than any choice can save."""
        tables = (c.time for c in (*self.problem.unary, *self.problem.pairs.values()))
        return 1.0 + float(sum(t[np.isfinite(t)].max(initial=0.0) for t in tables))

    def minimise(self, price: float, fixed: Mapping[int, int] | None = None) -> tuple[float, Solution]:
        """Minimise ``time + price × memory`` exactly; returns that minimum and the plan that attains it.

        ``fixed`` gives states of variables outside runs.
        """
        powered = [self._power(number, price) for number in range(len(self.blocks))]
        factors = [self._factor(scope, price) for scope in self.outside]
        for variable, state in (fixed or {}).items():
            table = np.full(self.sizes[variable], np.inf)
            table[state] = 0.0
            factors.append(Factor((variable,), table))
        for item in powered:
            block = item.block
            shape = tuple(self.sizes[v] for v in (*block.shared, *block.entrance, *block.exit))
            factors.append(Factor((*block.shared, *block.entrance, *block.exit), item.power.table.reshape(shape)))
        reduced = eliminate(factors, self.sizes, self.order)
        total = float(sum(f.table.item() for f in reduced.factors))
        assignment = recover(reduced, {})
        width = max([reduced.width, *(item.reduced.width for item in powered)])
        layers = tuple(self._layers(item, self._path(item, assignment), assignment) for item in powered)
        for item, states in zip(powered, layers, strict=True):
            last = states[-1]
            assignment.update({v: last[v] for v in (*item.block.inside, *item.block.exit)})
        time, memory = self._evaluate(assignment, layers)
        solution = Solution(
            assignment=assignment,
            layers=layers,
            objective_s=time,
            memory_bytes=memory,
            lower_bound_s=time if price == 0 else 0.0,
            width=width,
        )
        return total, solution

    def _factor(self, scope: tuple[int, ...], price: float) -> Factor:
        cost = self.problem.unary[scope[0]] if len(scope) == 1 else self.problem.pairs[scope[0], scope[1]]
        return Factor(scope, cost.time if price == 0 else cost.time + price * cost.memory)

    def _power(self, number: int, price: float) -> _Powered:
        block = self.blocks[number]
        factors = [self._factor(scope, price) for scope in self.in_block[number]]
        reduced = eliminate(factors, self.sizes, block.order)
        scope = (*block.shared, *block.entrance, *block.exit)
        table = combine(reduced.factors, scope, self.sizes)
        states = int(np.prod([self.sizes[v] for v in block.exit], dtype=np.int64))
        return _Powered(block, reduced, min_plus_power(table.reshape(-1, states, states), block.count))

    def _path(self, item: _Powered, assignment: Mapping[int, int]) -> list[int]:
        """States between the blocks on the best way from entrance to exit."""
        block = item.block
        return item.power.path(
            _flat(assignment, block.shared, self.sizes),
            _flat(assignment, block.entrance, self.sizes),
            _flat(assignment, block.exit, self.sizes),
        )

    def _layers(self, item: _Powered, path: list[int], assignment: Mapping[int, int]) -> tuple[Assignment, ...]:
        """States of the block in each layer along a path."""
        block = item.block
        decoded: dict[tuple[int, int], Assignment] = {}
        for pair in pairwise(path):
            if pair not in decoded:
                known = {v: assignment[v] for v in block.shared}
                known.update(_unflat(pair[0], block.entrance, self.sizes))
                known.update(_unflat(pair[1], block.exit, self.sizes))
                states = recover(item.reduced, known)
                decoded[pair] = {v: states[v] for v in (*block.entrance, *block.inside, *block.exit)}
        return tuple(decoded[pair] for pair in pairwise(path))

    def splice(self, over: Solution, fits: Solution, limit: float, price: float) -> Solution:
        """Give as many layers as the limit allows the strategies of a faster plan that does not fit as a whole.

        The price of memory makes all equal layers switch at once; the best plan may lie in between.
        """
        best = fits
        for number in range(len(self.blocks)):
            item = self._power(number, price)
            there = [self._exits(number, plan) for plan in (over, best)]
            ways = [list(pairwise(exits)) for exits in there]
            low, high = 0, len(ways[0])
            base = best
            while low < high:
                middle = (low + high + 1) // 2
                # What surrounds the run is that of the plan that fits, so both ends are its own too.
                path = [there[1][0], *there[0][1 : middle + 1], *there[1][middle + 1 :]]
                path[-1] = there[1][-1]
                states = tuple(
                    plan.layers[number][i] if pair == exits[i] else made
                    for i, (pair, made) in enumerate(
                        zip(pairwise(path), self._layers(item, path, base.assignment), strict=True)
                    )
                    for plan, exits in ((over, ways[0]) if i < middle else (fits, ways[1]),)
                )
                layers = (*base.layers[:number], states, *base.layers[number + 1 :])
                time, memory = self._evaluate(base.assignment, layers)
                if np.isfinite(time) and memory <= limit:
                    low = middle
                    if time < best.objective_s:
                        best = replace(base, layers=layers, objective_s=time, memory_bytes=memory)
                else:
                    high = middle - 1
        return best

    def _exits(self, number: int, plan: Solution) -> list[int]:
        block = self.blocks[number]
        first = _flat(plan.layers[number][0], block.entrance, self.sizes)
        return [first, *(_flat(states, block.exit, self.sizes) for states in plan.layers[number])]

    def _evaluate(
        self, assignment: Mapping[int, int], layers: tuple[tuple[Assignment, ...], ...]
    ) -> tuple[float, float]:
        time = memory = 0.0
        counted: dict[tuple[object, ...], tuple[float, float]] = {}

        def add(scopes: list[tuple[int, ...]], states: Mapping[int, int]) -> None:
            nonlocal time, memory
            for scope in scopes:
                cost = self.problem.unary[scope[0]] if len(scope) == 1 else self.problem.pairs[scope[0], scope[1]]
                index = tuple(states[v] for v in scope)
                time += float(cost.time[index])
                memory += float(cost.memory[index])

        add(self.outside, assignment)
        for number, states in enumerate(layers):
            for state in states:
                key = (number, *sorted((v, s) for v, s in state.items()))
                if key not in counted:
                    before = (time, memory)
                    add(self.in_block[number], {**assignment, **state})
                    counted[key] = (time - before[0], memory - before[1])
                else:
                    time += counted[key][0]
                    memory += counted[key][1]
        return time, memory


def _flat(assignment: Mapping[int, int], variables: tuple[int, ...], sizes: list[int]) -> int:
    index = 0
    for v in variables:
        index = index * sizes[v] + assignment[v]
    return index


def _unflat(index: int, variables: tuple[int, ...], sizes: list[int]) -> dict[int, int]:
    states = {}
    for v in reversed(variables):
        index, states[v] = divmod(index, sizes[v])
    return states


def _block(problem: Problem, run: Run, sizes: list[int]) -> _Block:
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
    shared = {n for n in others if any(n in neighbours.get(v, ()) for v in inside)}
    shared |= {n for n in others for v in exits if n in neighbours[v] & neighbours.get(back[v], set())}
    if any(sizes[back[v]] != sizes[v] for v in exits):
        raise _unaligned(run)
    left = frozenset(v for v in exits if decisions.variables[v].tensor is not None)
    met = frozenset(back[v] for v in left)
    return _Block(entrance, tuple(exits), inside, tuple(sorted(shared)), run.count - 1, (), met, left)


def _variables_of(problem: Problem, nodes: tuple[int, ...]) -> tuple[int, ...]:
    """Variables that decide `nodes`, and the stations of what those make."""
    decisions = problem.decisions
    group = set(nodes)
    made = {n for n, v in enumerate(decisions.variables) if v.tensor is not None and v.tensor.node in group}
    followed = {decisions.of_node[i] for i in nodes} - {-1}
    return tuple(sorted(made | {n for n in followed if decisions.variables[n].tensor is None}))


def _unaligned(run: Run) -> UnsupportedError:
    return UnsupportedError(
        f"the blocks of {run.prefix!r} look alike but offer different strategies, which the folded search does not "
        "support yet; make the first and the last of them different modules, or report the network"
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


def solve(problem: Problem, memory_limit_bytes: float) -> Solution | None:
    """Find the fastest plan whose memory fits; None where even the smallest plan does not.

    Without a binding limit the result is exactly optimal. With one, the price λ of memory is moved to where
    the fastest plan that does not fit and the best that does cost the same, until it stays; the bound is the
    best Lagrangian value seen. Layers of a run may then go different ways (`DynamicProgramming.splice`), and
    what gap is left is closed by branching on the states of variables where there are few.
    """
    solver = DynamicProgramming(problem)
    root = _priced(solver, memory_limit_bytes, {}, PRICE_STEPS)
    if root.best is None:
        return None
    best, bound = root.best, root.bound
    nodes = BRANCH_WORK // len(solver.sizes) ** 2
    if _open(best, bound) and nodes:
        best, bound = _branch(solver, memory_limit_bytes, root, nodes)
    return replace(best, lower_bound_s=min(bound, best.objective_s))


def _open(best: Solution | None, bound: float) -> bool:
    return best is None or best.objective_s - bound > PROOF * abs(best.objective_s)


@dataclass(frozen=True, slots=True)
class _Priced:
    """What pricing memory found: a bound, the best plan that fits, and the best guess of one that does not."""

    bound: float
    best: Solution | None
    over: Solution | None


def _priced(solver: DynamicProgramming, limit: float, fixed: Mapping[int, int], steps: int) -> _Priced:
    """Search the price of memory at which the bound peaks, with some variables fixed.

    The highest price buys the least memory at any time, whole bytes assumed.
    """
    total, plan = solver.minimise(0.0, fixed)
    if not np.isfinite(total):
        return _Priced(np.inf, None, None)
    if plan.memory_bytes <= limit:
        return _Priced(plan.objective_s, plan, None)
    bound, over = plan.objective_s, plan
    low, high = 0.0, solver.time_scale
    total, best = solver.minimise(high, fixed)
    if best.memory_bytes > limit:
        return _Priced(np.inf, None, over)
    bound = max(bound, total - high * limit)
    for _ in range(steps):
        if not _open(best, bound) or high <= low * 1.0001:
            break
        # The price at which the two plans cost the same: where the bound, concave in the price, may peak.
        middle = (over.objective_s - best.objective_s) / (best.memory_bytes - over.memory_bytes)
        middle = min(max(middle, low), high)
        total, plan = solver.minimise(middle, fixed)
        bound = max(bound, total - middle * limit)
        if plan.memory_bytes <= limit:
            stuck = high == middle
            high = middle
            best = plan if plan.objective_s < best.objective_s else best
        else:
            stuck = low == middle
            low, over = middle, plan
        same = total >= over.objective_s + middle * over.memory_bytes - PROOF * abs(total)
        if stuck or (same and total >= best.objective_s + middle * best.memory_bytes - PROOF * abs(total)):
            break
    if _open(best, bound) and solver.blocks and not fixed:
        best = solver.splice(over, best, limit, high)
    return _Priced(bound, best, over)


def _branch(solver: DynamicProgramming, limit: float, root: _Priced, nodes: int) -> tuple[Solution, float]:
    """Best-first branch and bound on variables outside runs; returns the best plan and a proven bound."""
    assert root.best is not None  # only called with a plan at hand
    best, serial = root.best, 0
    heap: list[tuple[float, int, dict[int, int], _Priced]] = [(root.bound, 0, {}, root)]
    while heap and nodes > 0:
        bound, _, fixed, priced = heapq.heappop(heap)
        if not _open(best, bound):
            return best, bound
        variable = _undecided(solver, fixed, priced)
        if variable is None or solver.sizes[variable] > nodes:
            heapq.heappush(heap, (bound, serial, fixed, priced))
            break
        for state in range(solver.sizes[variable]):
            child = {**fixed, variable: state}
            inner = _priced(solver, limit, child, BRANCH_STEPS)
            nodes -= 1
            if inner.best is not None and inner.best.objective_s < best.objective_s:
                best = inner.best
            if inner.best is not None and _open(best, inner.bound):
                serial += 1
                heapq.heappush(heap, (max(bound, inner.bound), serial, child, inner))
    return best, min([best.objective_s, *(item[0] for item in heap)])


def _undecided(solver: DynamicProgramming, fixed: Mapping[int, int], priced: _Priced) -> int | None:
    """The variable on which the plan that fits and the one that does not disagree most in memory."""
    folded = {v for block in solver.blocks for v in (*block.inside, *block.exit)}
    free = [v for v in range(len(solver.sizes)) if v not in fixed and v not in folded and solver.sizes[v] > 1]
    if not free:
        return None
    if priced.best is None or priced.over is None:
        return free[0]
    one, other = priced.best.assignment, priced.over.assignment

    def difference(v: int) -> float:
        memory = solver.problem.unary[v].memory
        return (one[v] != other[v]) * (1.0 + abs(float(memory[one[v]] - memory[other[v]])))

    return max(free, key=lambda v: (difference(v), -v))


def fastest(problem: Problem) -> Solution:
    """The best plan without a memory limit."""
    return DynamicProgramming(problem).minimise(0.0)[1]


def smallest(problem: Problem) -> Solution:
    """The plan that needs least memory, however slow: what an infeasible search reports."""
    solver = DynamicProgramming(problem)
    return solver.minimise(solver.time_scale)[1]
