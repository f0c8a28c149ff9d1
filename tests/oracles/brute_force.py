"""The search problem in its plainest form, and its optimum by trying everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from planner.search.problem.problem import Cost


@dataclass(frozen=True)
class TableProblem:
    """Tables only: what `DynamicProgramming` reads of a problem, with an unrolled run of equal blocks left folded.

    ``block`` maps each variable of a run's second block to the one it stands for in the first.
    """

    sizes: tuple[int, ...]
    unary: tuple[Cost, ...]
    pairs: dict[tuple[int, int], Cost]
    block: dict[int, int]
    count: int = 1

    @property
    def states(self) -> list[range]:
        return [range(size) for size in self.sizes]

    @property
    def graph(self) -> SimpleNamespace:
        first, second = tuple(self.block.values()), tuple(self.block)
        run = SimpleNamespace(prefix="blocks", count=self.count, first=first, second=second)
        return SimpleNamespace(runs=(run,) if self.block else ())

    @property
    def decisions(self) -> SimpleNamespace:
        variables = [SimpleNamespace(nodes=(v,), tensor=None) for v in range(len(self.sizes))]
        return SimpleNamespace(of_node=tuple(range(len(self.sizes))), variables=variables)


def unrolled(problem: TableProblem) -> TableProblem:
    """Write every block of the run out: block i's tables are the second block's, one block further on."""
    if not problem.block:
        return problem
    sizes, unary, pairs = list(problem.sizes), list(problem.unary), dict(problem.pairs)
    second = list(problem.block)
    members = set(second)
    current = {v: v for v in second}
    inner = {k: c for k, c in problem.pairs.items() if k[0] in members or k[1] in members}
    around = set(problem.block.values())
    linked = {frozenset(k) for k in pairs}
    shared = {
        w
        for k in inner
        for v, w in (k, k[::-1])
        if v in members and w not in members | around and frozenset((problem.block[v], w)) in linked
    }
    tail = {k: c for k, c in inner.items() if not all(v in members | around | shared for v in k)}
    for key in tail:
        del pairs[key]
    for _ in range(problem.count - 2):
        later = {v: len(sizes) + i for i, v in enumerate(second)}
        sizes += [problem.sizes[v] for v in second]
        unary += [problem.unary[v] for v in second]
        stands = {**{problem.block[v]: current[v] for v in second}, **{v: v for v in shared}, **later}
        for key, cost in inner.items():
            if key not in tail:
                _add(pairs, (stands[key[0]], stands[key[1]]), cost)
        current = later
    for key, cost in tail.items():
        _add(pairs, tuple(current.get(v, v) for v in key), cost)
    return TableProblem(tuple(sizes), tuple(unary), pairs, {})


def _add(pairs: dict[tuple[int, int], Cost], key: tuple[int, ...], cost: Cost) -> None:
    a, b = key
    pairs[min(a, b), max(a, b)] = cost if a < b else Cost(cost.time.T, cost.memory.T)


def exhaustive(problem: TableProblem, memory_limit: float) -> tuple[float, tuple[int, ...]] | None:
    """The least time among all assignments whose memory fits, and one that attains it."""
    times, memories = totals(problem)
    times = np.where(memories <= memory_limit, times, np.inf)
    best = np.unravel_index(int(times.argmin()), times.shape)
    return (float(times[best]), tuple(map(int, best))) if np.isfinite(times[best]) else None


def totals(problem: TableProblem) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Times and memories of all assignments of the unrolled problem, an axis for each variable."""
    flat = unrolled(problem)
    times, memories = np.zeros(flat.sizes), np.zeros(flat.sizes)
    tables = [((v,), cost) for v, cost in enumerate(flat.unary)]
    for axes, cost in [*tables, *flat.pairs.items()]:
        shape = [flat.sizes[v] if v in axes else 1 for v in range(len(flat.sizes))]
        times += cost.time.reshape(shape)
        memories += cost.memory.reshape(shape)
    return times, memories


def total(problem: TableProblem, states: Mapping[int, int]) -> tuple[float, float]:
    """Time and memory of one assignment of a problem without runs."""
    tables = [(c, (states[v],)) for v, c in enumerate(problem.unary)]
    tables += [(c, (states[a], states[b])) for (a, b), c in problem.pairs.items()]
    return float(sum(c.time[i] for c, i in tables)), float(sum(c.memory[i] for c, i in tables))


def random_cost(random: np.random.Generator, shape: tuple[int, ...], forbidden: float = 0.1) -> Cost:
    """Whole-number times (some infinite, in tables of pairs) and memories, so that sums are exact."""
    time: NDArray[np.float64] = random.integers(0, 20, shape).astype(np.float64)
    if len(shape) == 2:
        time[random.random(shape) < forbidden] = np.inf
    return Cost(time, random.integers(0, 8, shape).astype(np.float64))
