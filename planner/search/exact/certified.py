"""Elimination of one model at any price of memory."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from planner.search.exact.blocks import BlockVariables, Variables
from planner.search.exact.folded import Eliminated, FoldedElimination, Layers, Weights, flat
from planner.search.exact.model import Model
from planner.search.problem.problem import Assignment, Solution

FAST = Weights(1.0, 0.0)
SMALL = Weights(0.0, 1.0)
PROOF = 1e-9
"""A plan this close to its bound, relatively, is optimal."""

Scopes = tuple[Variables, ...]


@dataclass(frozen=True, slots=True)
class CostedPlan:
    """A plan in the problem's numbers of states, and what it costs."""

    assignment: Assignment
    layers: Layers
    seconds: float
    bytes: float


class Costing:
    """Prices plans by all tables of a problem."""

    def __init__(self, whole: Model) -> None:
        self.whole = whole

    def plan(self, assignment: Mapping[int, int], layers: Layers, model: Model) -> CostedPlan:
        """Price states given by their numbers in `model`."""
        states = model.states
        named = {v: int(states[v][s]) for v, s in assignment.items()}
        named_layers = tuple(tuple({v: int(states[v][s]) for v, s in one.items()} for one in row) for row in layers)
        return self.costed(named, named_layers)

    def costed(self, assignment: Assignment, layers: Layers) -> CostedPlan:
        """Price states given by their numbers in the problem."""
        parts = self.whole.layout
        return CostedPlan(assignment, layers, *self._parts(parts.outside, parts.in_block, assignment, layers))

    def seconds_beside(self, solution: Solution, variables: Container[int]) -> float:
        """Seconds of the tables of two variables one of which is among `variables`, in all layers."""
        outside, *in_block = (
            tuple(scope for scope in scopes if len(scope) == 2 and any(v in variables for v in scope))
            for scopes in (self.whole.layout.outside, *self.whole.layout.in_block)
        )
        return self._parts(outside, in_block, solution.assignment, solution.layers)[0]

    def _parts(
        self, outside: Scopes, in_block: Sequence[Scopes], assignment: Assignment, layers: Layers
    ) -> tuple[float, float]:
        """Seconds and bytes of the tables of `outside`, once, and of those of each run in all of its layers."""
        seconds, bytes_ = self._sum(outside, assignment)
        for scopes, row in zip(in_block, layers, strict=True):
            counted: dict[tuple[tuple[int, int], ...], tuple[float, float]] = {}
            for states in row:
                key = tuple(sorted(states.items()))
                if key not in counted:
                    counted[key] = self._sum(scopes, {**assignment, **states})
                seconds += counted[key][0]
                bytes_ += counted[key][1]
        return seconds, bytes_

    def _sum(self, scopes: Scopes, states: Mapping[int, int]) -> tuple[float, float]:
        seconds = bytes_ = 0.0
        for scope in scopes:
            index = tuple(states[v] for v in scope)
            seconds += float(self.whole.time[scope][index])
            if scope in self.whole.memory:
                bytes_ += float(self.whole.memory[scope][index])
        return seconds, bytes_

    def solution(self, plan: CostedPlan, bound: float, *, left: int, width: int, largest_table: int) -> Solution:
        """Write a plan with a proven bound, and what finding it took."""
        return Solution(
            assignment=plan.assignment,
            layers=plan.layers,
            objective_s=plan.seconds,
            memory_bytes=plan.bytes,
            lower_bound_s=min(bound, plan.seconds),
            width=width,
            states=sum(self.whole.sizes),
            states_left=left,
            largest_table=largest_table,
        )


class Exact:
    """The exact minimum of a model; the order of elimination is made once, prices of memory vary.

    Raises
    ------
    TooWideError
        Where the graph is too densely connected for exact elimination.
    """

    def __init__(self, costing: Costing, model: Model) -> None:
        self.costing = costing
        self.model = model
        self.folded = FoldedElimination(model)
        self._fastest: tuple[float, CostedPlan] | None = None
        self._least: Eliminated | None = None

    @property
    def blocks(self) -> tuple[BlockVariables, ...]:
        """Runs of the graph as variables."""
        return self.model.layout.blocks

    def priced(self, weights: Weights) -> tuple[float, CostedPlan, Eliminated]:
        """Minimise ``weights.seconds × time + weights.bytes × memory``; the minimum, a plan, and the tables."""
        return self._read(self.folded.run(weights))

    def _read(self, done: Eliminated) -> tuple[float, CostedPlan, Eliminated]:
        assignment, layers = self.folded.plan(done)
        return done.total, self.costing.plan(assignment, layers, self.model), done

    def _smallest(self) -> Eliminated:
        if self._least is None:
            self._least = self.folded.run(SMALL)
        return self._least

    def fastest(self) -> tuple[float, CostedPlan]:
        """The least seconds without a limit of memory, and a plan that takes them."""
        if self._fastest is None:
            self._fastest = self.priced(FAST)[:2]
        return self._fastest

    def least_bytes(self) -> float:
        """The bytes of the smallest plan."""
        return self._smallest().total

    def least_memory(self) -> CostedPlan:
        """The plan of least memory, the fastest of those where bytes are whole numbers."""
        # More seconds than any choice can save.
        scale = 1.0 + float(sum(t[np.isfinite(t)].max(initial=0.0) for t in self.model.time.values()))
        least, quick = self._read(self._smallest())[1], self.priced(Weights(1.0, scale))[1]
        return quick if quick.bytes <= least.bytes else least

    def solution(self, plan: CostedPlan, bound: float) -> Solution:
        """Write a plan with a proven bound."""
        return self.costing.solution(
            plan, bound, left=sum(self.model.sizes), width=self.folded.width, largest_table=self.folded.largest
        )

    def splice(self, over: CostedPlan, fits: CostedPlan, limit: float, done: Eliminated) -> CostedPlan:
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

    def _mixed(
        self, number: int, base: CostedPlan, over: CostedPlan, there: list[list[int]], count: int, done: Eliminated
    ) -> CostedPlan:
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
        return self.costing.costed(base.assignment, (*base.layers[:number], tuple(row), *base.layers[number + 1 :]))

    def _exits(self, number: int, plan: CostedPlan) -> list[int]:
        block, states = self.blocks[number], self.model.states

        def joint(variables: Variables, chosen: Assignment) -> int:
            here = {v: int(np.searchsorted(states[v], chosen[v])) for v in variables}
            return flat(here, variables, self.model.sizes)

        first = joint(block.entrance, plan.layers[number][0])
        return [first, *(joint(block.exit, states) for states in plan.layers[number])]
