"""The cost tables of a folded problem, with the layers of a run in segments of equal layers.

A run of L equal blocks has two blocks in the graph. Here the first layer stands for itself and layers 1 … L − 1
fall into segments whose layers all take the same states: their tables count once a layer, and the number of
tables does not grow with depth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import layout
from planner.search.problem.problem import Assignment, Cost, Problem, Solution


@dataclass(frozen=True, slots=True)
class Instance:
    """A variable that decides for one layer, or for layers `first` to `last` of run number `run`."""

    variable: int
    run: int = -1
    first: int = 0
    last: int = 0


class LayeredTables:
    """Tables between instances; ``pairs[i, j]`` with i < j has the states of instance i in its rows.

    Parameters
    ----------
    problem : Problem
    starts : sequence of collections of int, optional
        For each run the layers (2 and later) at which a new segment starts.
    """

    def __init__(self, problem: Problem, starts: Sequence[Collection[int]] = ()) -> None:
        self.problem = problem
        self.alike: dict[tuple[int, int], list[NDArray[np.intp]]] = {}
        """States of a variable that differ from each along one axis alone, by variable and axis, once asked for."""
        parts = layout(problem)
        self._blocks = parts.blocks
        self.starts = [frozenset(s) for s in starts] or [frozenset[int]()] * len(self._blocks)
        self.lengths = [block.count for block in self._blocks]
        repeated = parts.repeated()
        single = [v for v in range(len(problem.states)) if v not in repeated]
        self.instances = [Instance(v) for v in single]
        self._alone = {v: i for i, v in enumerate(single)}
        self._segments = [self._make_segments(r, self.starts[r]) for r in range(len(self._blocks))]
        self.unary = [Cost(np.zeros(n), np.zeros(n)) for n in map(self.size, range(len(self.instances)))]
        self.pairs: dict[tuple[int, int], Cost] = {}
        final = {v: i for segments in self._segments for v, i in segments[-1].items()}
        for scope in parts.outside:
            self._add(scope, 1, {**self._alone, **final})
        for number, scopes in enumerate(parts.in_block):
            for scope in scopes:
                self._add_repeated(number, scope)
        self.neighbours: list[dict[int, None]] = [{} for _ in self.instances]
        for i, j in self.pairs:
            self.neighbours[i][j] = self.neighbours[j][i] = None

    def size(self, instance: int) -> int:
        """Number of states of an instance."""
        return len(self.problem.states[self.instances[instance].variable])

    def _make_segments(self, run: int, starts: Collection[int]) -> list[dict[int, int]]:
        """For each segment of a run the instance of each of its variables."""
        block = self._blocks[run]
        bounds = [1, *sorted(s for s in set(starts) if 1 < s <= block.count), block.count + 1]
        segments = []
        for first, after in pairwise(bounds):
            segment = {}
            for v in sorted((*block.inside, *block.exit)):
                segment[v] = len(self.instances)
                self.instances.append(Instance(v, run, first, after - 1))
            segments.append(segment)
        return segments

    def _add(self, scope: tuple[int, ...], times: int, where: Mapping[int, int]) -> None:
        """Count the table over the variables in `scope` `times` over, between the instances they stand for."""
        cost = self.problem.unary[scope[0]] if len(scope) == 1 else self.problem.pairs[scope[0], scope[1]]
        time, memory = cost.time * times, cost.memory * times
        places = [where[v] for v in scope]
        if len(places) == 2 and places[0] == places[1]:
            time, memory, places = np.diagonal(time), np.diagonal(memory), places[:1]
        if len(places) == 1:
            before = self.unary[places[0]]
            self.unary[places[0]] = Cost(before.time + time, before.memory + memory)
            return
        if places[0] > places[1]:
            time, memory = time.T, memory.T
        key = (min(places), max(places))
        known = self.pairs.get(key)
        self.pairs[key] = Cost(time, memory) if known is None else Cost(known.time + time, known.memory + memory)

    def _add_repeated(self, run: int, scope: tuple[int, ...]) -> None:
        """Count a table that every layer but the first has; an entrance is the exit of the layer before."""
        block = self._blocks[run]
        twin = dict(zip(block.entrance, block.exit, strict=True))
        entered = any(v in twin for v in scope)
        before: Mapping[int, int] = {a: self._alone[a] for a in twin}
        for segment in self._segments[run]:
            within = {**self._alone, **segment, **{a: segment[b] for a, b in twin.items()}}
            head = self.instances[next(iter(segment.values()))] if segment else Instance(-1, run, 1, block.count)
            layers = head.last - head.first + 1
            if entered:
                self._add(scope, 1, {**within, **before})
                layers -= 1
            if layers:
                self._add(scope, layers, within)
            before = {a: segment[b] for a, b in twin.items()}

    def cost(self, states: Sequence[int]) -> tuple[float, float]:
        """Seconds and bytes of a state for every instance."""
        time = memory = 0.0
        for i, state in enumerate(states):
            time += float(self.unary[i].time[state])
            memory += float(self.unary[i].memory[state])
        for (i, j), cost in self.pairs.items():
            time += float(cost.time[states[i], states[j]])
            memory += float(cost.memory[states[i], states[j]])
        return time, memory

    def solution(self, states: Sequence[int], lower_bound_s: float = 0.0) -> Solution:
        """Write the states of the instances as a solution of the problem."""
        assignment = {v: states[i] for v, i in self._alone.items()}
        layers = []
        for block, segments in zip(self._blocks, self._segments, strict=True):
            found: list[Assignment] = []
            entrance = {a: assignment[a] for a in block.entrance}
            for segment in segments:
                own = {v: states[i] for v, i in segment.items()}
                count = self._length(segment, block.count)
                exits = {a: own[b] for a, b in zip(block.entrance, block.exit, strict=True)}
                found += [{**entrance, **own}, *[{**exits, **own}] * (count - 1)]
                entrance = exits
            layers.append(tuple(found))
        for segments in self._segments:
            assignment.update({v: states[i] for v, i in segments[-1].items()})
        time, memory = self.cost(states)
        return Solution(
            assignment=assignment,
            layers=tuple(layers),
            objective_s=time,
            memory_bytes=memory,
            lower_bound_s=min(lower_bound_s, time),
            width=0,
        )

    def _length(self, segment: Mapping[int, int], count: int) -> int:
        if not segment:
            return count
        head = self.instances[next(iter(segment.values()))]
        return head.last - head.first + 1

    def states_of(self, solution: Solution) -> list[int]:
        """States of the instances in a solution: of each segment those of its first layer."""
        return [
            solution.assignment[item.variable]
            if item.run < 0
            else solution.layers[item.run][item.first - 1][item.variable]
            for item in self.instances
        ]

    def weights(self) -> NDArray[np.float64]:
        """Seconds each instance takes where nothing of it is split, shape (instances,)."""
        return np.array([float(c.time[np.isfinite(c.time)].max(initial=0.0)) for c in self.unary])
