"""Exact search by dynamic programming: min-plus elimination, with repeated blocks as matrix powers.

Every variable of the graph is eliminated in an order that keeps tables small (`planner.search.folded`). The memory
limit is relaxed with a price λ per byte (Lagrange): for every λ ≥ 0, ``min_x [time(x) + λ memory(x)] − λ limit`` is a
lower bound on the best feasible plan. What gap is left is closed by Pareto labels (`planner.search.pareto`) over the
states and entries that a plan better than the best known one may take.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

import numpy as np

from planner.search.blocks import Block, Variables
from planner.search.elimination import TooWideError
from planner.search.folded import Eliminated, FoldedElimination, Layers, Weights, flat
from planner.search.marginals import affordable, marginals
from planner.search.model import Model, model_of, possible, undominated
from planner.search.pareto import Limits, ParetoSearch, TooManyLabelsError
from planner.search.problem import Problem
from planner.search.solution import Assignment, Solution

PRICE_STEPS = 24
PROOF = 1e-9
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Parts of the gap that labels are given in turn: fewer labels are looked at where the optimum is near the bound."""

FAST = Weights(1.0, 0.0)
SMALL = Weights(0.0, 1.0)

Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan in the problem's numbers of states, and what it costs."""

    assignment: Assignment
    layers: Layers
    seconds: float
    bytes: float


class DynamicProgramming:
    """The exact solver of one problem; the order of elimination is made once, prices of memory vary.

    Raises
    ------
    TooWideError
        Where the graph is too densely connected for exact elimination.
    """

    def __init__(self, problem: Problem) -> None:
        self.whole = model_of(problem)
        self.model = possible(self.whole)
        self.folded = _elimination(self.model)
        self.model = self.folded.model

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Runs of the graph as variables."""
        return self.whole.layout.blocks

    @property
    def outside(self) -> tuple[Variables, ...]:
        """Scopes of the tables that count once."""
        return self.whole.layout.outside

    @property
    def in_block(self) -> tuple[tuple[Variables, ...], ...]:
        """Scopes of the tables of each block."""
        return self.whole.layout.in_block

    @property
    def time_scale(self) -> float:
        """More seconds than any choice can save."""
        return 1.0 + float(sum(t[np.isfinite(t)].max(initial=0.0) for t in self.model.time.values()))

    def minimise(self, price: float) -> tuple[float, Solution]:
        """Minimise ``time + price × memory`` exactly; returns that minimum and the plan that attains it."""
        total, plan, _ = self.priced(Weights(1.0, price))
        return total, self.solution(plan, plan.seconds if price == 0 else 0.0)

    def priced(self, weights: Weights) -> tuple[float, Plan, Eliminated]:
        """Minimise ``weights.seconds × time + weights.bytes × memory``; the minimum, a plan, and the tables."""
        done = self.folded.run(weights)
        assignment, layers = self.folded.plan(done)
        return done.total, self.plan(assignment, layers), done

    def plan(self, assignment: Mapping[int, int], layers: Layers, model: Model | None = None) -> Plan:
        """Price states given by their numbers in `model`."""
        states = (model or self.model).states
        named = {v: int(states[v][s]) for v, s in assignment.items()}
        named_layers = tuple(tuple({v: int(states[v][s]) for v, s in one.items()} for one in row) for row in layers)
        return self.costed(named, named_layers)

    def costed(self, assignment: Assignment, layers: Layers) -> Plan:
        """Price states given by their numbers in the problem."""
        seconds, bytes_ = self._sum(self.outside, assignment)
        for scopes, row in zip(self.in_block, layers, strict=True):
            counted: dict[tuple[tuple[int, int], ...], tuple[float, float]] = {}
            for states in row:
                key = tuple(sorted(states.items()))
                if key not in counted:
                    counted[key] = self._sum(scopes, {**assignment, **states})
                seconds += counted[key][0]
                bytes_ += counted[key][1]
        return Plan(assignment, layers, seconds, bytes_)

    def _sum(self, scopes: tuple[Variables, ...], states: Mapping[int, int]) -> tuple[float, float]:
        seconds = bytes_ = 0.0
        for scope in scopes:
            index = tuple(states[v] for v in scope)
            seconds += float(self.whole.time[scope][index])
            if scope in self.whole.memory:
                bytes_ += float(self.whole.memory[scope][index])
        return seconds, bytes_

    def solution(self, plan: Plan, bound: float) -> Solution:
        """Write a plan with a proven bound."""
        return Solution(
            assignment=plan.assignment,
            layers=plan.layers,
            objective_s=plan.seconds,
            memory_bytes=plan.bytes,
            lower_bound_s=min(bound, plan.seconds),
            width=self.folded.width,
            states=sum(self.whole.sizes),
            states_left=sum(self.model.sizes),
            largest_table=self.folded.largest,
        )

    def splice(self, over: Plan, fits: Plan, limit: float, done: Eliminated) -> Plan:
        """Give as many layers as the limit allows the strategies of a faster plan that does not fit as a whole.

        The price of memory makes all equal layers switch at once; the best plan may lie in between.
        """
        best = fits
        for number in range(len(self.blocks)):
            there = [self._exits(number, plan) for plan in (over, best)]
            base, low, high = best, 0, len(there[0]) - 1
            while low < high:
                middle = (low + high + 1) // 2
                plan = self._mixed(number, base, over, there, middle, done)
                if np.isfinite(plan.seconds) and plan.bytes <= limit:
                    low = middle
                    best = plan if plan.seconds < best.seconds else best
                else:
                    high = middle - 1
        return best

    def _mixed(self, number: int, base: Plan, over: Plan, there: list[list[int]], count: int, done: Eliminated) -> Plan:
        """`base` with the first `count` layers of a run as in `over`; its ends stay, as what surrounds the run does."""
        path = [there[1][0], *there[0][1 : count + 1], *there[1][count + 1 :]]
        path[-1] = there[1][-1]
        ways = [list(pairwise(exits)) for exits in there]
        model = self.model
        known = {v: int(np.searchsorted(model.states[v], s)) for v, s in base.assignment.items()}
        made = self.folded.along(number, done, path, known)
        row = []
        for i, (pair, states) in enumerate(zip(pairwise(path), made, strict=True)):
            plan, way = (over, ways[0]) if i < count else (base, ways[1])
            fresh = {v: int(model.states[v][s]) for v, s in states.items()}
            row.append(plan.layers[number][i] if pair == way[i] else fresh)
        return self.costed(base.assignment, (*base.layers[:number], tuple(row), *base.layers[number + 1 :]))

    def _exits(self, number: int, plan: Plan) -> list[int]:
        block, states = self.blocks[number], self.model.states

        def joint(variables: Variables, chosen: Assignment) -> int:
            here = {v: int(np.searchsorted(states[v], chosen[v])) for v in variables}
            return flat(here, variables, self.model.sizes)

        first = joint(block.entrance, plan.layers[number][0])
        return [first, *(joint(block.exit, states) for states in plan.layers[number])]


def _elimination(model: Model) -> FoldedElimination:
    """Plan the elimination, after dropping dominated states where that decides whether it can be done."""
    try:
        return FoldedElimination(model)
    except TooWideError:
        return FoldedElimination(undominated(model))


def solve(
    problem: Problem, memory_limit_bytes: float, *, deadline_s: float | None = None, stop: Stop | None = None
) -> Solution | None:
    """Find the fastest plan whose memory fits; None where even the smallest plan does not.

    Parameters
    ----------
    deadline_s
        Seconds after which no new step of the search is begun: the best plan so far is returned with its bound.
    stop
        Asked between steps whether to end likewise, for example after an interrupt.

    Returns
    -------
    Solution
        Optimal where ``lower_bound_s`` is ``objective_s``. Without a binding limit it always is. With one, the price λ
        of memory is moved to where the bound peaks; layers of a run may go different ways (`splice`); and labels
        look for anything better until nothing can be.
    """
    started = perf_counter()

    def over() -> bool:
        return (deadline_s is not None and perf_counter() - started > deadline_s) or (stop is not None and stop())

    return _Limited(DynamicProgramming(problem), memory_limit_bytes, over).solve()


class _Limited:
    """One search under a memory limit: the best plan so far, and what is proven."""

    def __init__(self, solver: DynamicProgramming, limit: float, stop: Stop) -> None:
        self.solver = solver
        self.limit = limit
        self.stop = stop
        self.best: Plan | None = None
        self.bound = -np.inf
        self.price = 0.0

    def solve(self) -> Solution | None:
        total, fastest, _ = self.solver.priced(FAST)
        if not np.isfinite(total):
            return None
        self.bound = fastest.seconds
        if fastest.bytes <= self.limit:
            return self.solver.solution(fastest, fastest.seconds)
        least = least_memory(self.solver)
        if least.bytes > self.limit:
            return None
        self.best = least
        self._search_price(fastest, least)
        if self._open():
            self._search_labels()
        return self.solver.solution(self.best, self.bound)

    def _open(self) -> bool:
        assert self.best is not None  # a search begins with the smallest plan
        return self.best.seconds - self.bound > PROOF * abs(self.best.seconds)

    def _offer(self, plan: Plan) -> None:
        if plan.bytes <= self.limit and (self.best is None or plan.seconds < self.best.seconds):
            self.best = plan

    def _search_price(self, over: Plan, fits: Plan) -> None:
        """Search the price at which the bound, concave in the price, peaks.

        The next price is that at which the plans on both sides cost the same; where it gives nothing new, it is the
        price of the peak.
        """
        done: Eliminated | None = None
        for _ in range(PRICE_STEPS):
            if not self._open() or self.stop():
                break
            price = (fits.seconds - over.seconds) / (over.bytes - fits.bytes)
            if price <= 0:
                break
            total, plan, done = self.solver.priced(Weights(1.0, price))
            if total - price * self.limit > self.bound:
                self.bound, self.price = total - price * self.limit, price
            self._offer(plan)
            if plan.seconds + price * plan.bytes >= over.seconds + price * over.bytes - PROOF * abs(total):
                break
            if plan.bytes <= self.limit:
                fits = plan
            else:
                over = plan
        if done is not None and self.best is not None and self._open():
            self._offer(self.solver.splice(over, fits, self.limit, done))

    def _search_labels(self) -> None:
        """Look for plans a part of the gap above the bound, then for all better ones."""
        assert self.best is not None  # a search begins with the smallest plan
        folded = self.solver.folded
        prices = [FAST, SMALL, *([Weights(1.0, self.price)] if self.price else [])]
        if not affordable(folded):
            return
        rests = [(w, marginals(folded, folded.run(w))) for w in prices]
        low, gap = self.bound, self.best.seconds - self.bound
        for share in SHARES:
            limits = Limits(min(low + share * gap, self.best.seconds), self.limit, self.stop)
            keep = [np.ones(size, dtype=np.bool_) for size in folded.sizes]
            for weights, rest in rests:
                keep = [k & b for k, b in zip(keep, rest.below(limits.threshold(weights)), strict=True)]
            if all(k.any() for k in keep):
                try:
                    found = self._labelled(self.solver.model.restricted(keep), prices, limits)
                except TooManyLabelsError:
                    return
                if found is not None:
                    self._offer(found)
            # Nothing at most as slow as the limit is left out, so what is not found is slower.
            self.bound = max(self.bound, min(limits.seconds, self.best.seconds))
            if not self._open():
                return

    def _labelled(self, model: Model, prices: list[Weights], limits: Limits) -> Plan | None:
        folded = FoldedElimination(model)
        rests = []
        for weights in prices:
            done = folded.run(weights)
            if not done.total <= limits.threshold(weights):
                return None
            rests.append((weights, marginals(folded, done)))
        found = ParetoSearch(folded, rests, limits).fastest()
        return None if found is None else self.solver.plan(*found, model)


def fastest(problem: Problem) -> Solution:
    """The best plan without a memory limit."""
    return DynamicProgramming(problem).minimise(0.0)[1]


def smallest(problem: Problem) -> Solution:
    """The plan that needs least memory, however slow, and the fastest of those: what an infeasible search reports."""
    solver = DynamicProgramming(problem)
    return solver.solution(least_memory(solver), 0.0)


def least_memory(solver: DynamicProgramming) -> Plan:
    """The plan of least memory, the fastest of those where bytes are whole numbers."""
    least = solver.priced(SMALL)
    quick = solver.priced(Weights(1.0, solver.time_scale))
    return quick[1] if quick[1].bytes <= least[1].bytes else least[1]
