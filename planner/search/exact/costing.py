"""What a plan costs, in the problem's own numbers of states."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from planner.search.exact.blocks import Variables
from planner.search.exact.folded import Layers, Weights
from planner.search.exact.model import Model
from planner.search.problem.solution import Assignment, Solution

FAST = Weights(1.0, 0.0)
SMALL = Weights(0.0, 1.0)
PROOF = 1e-9
"""A plan this close to its bound, relatively, is optimal."""

Stop = Callable[[], bool]
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
