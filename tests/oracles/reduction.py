"""What no plan as good as a known one takes is left out of a search problem, by a bound of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from planner.search.problem.problem import Cost

if TYPE_CHECKING:
    from planner.search.problem.problem import Problem

Table = NDArray[np.float64]
Edge = tuple[int, int]


@dataclass(frozen=True)
class Tables:
    """What is left of a problem: costs of variables and of pairs, times infinite where a pair is out."""

    unary: tuple[Cost, ...]
    pairs: Mapping[Edge, Cost]

    @property
    def entries(self) -> int:
        """Pairs of states that are left."""
        return sum(int(np.isfinite(cost.time).sum()) for cost in self.pairs.values())


def reduced(
    problem: Problem | Tables, known: float, *, price: float = 0.0, paid: float = 0.0, sweeps: int = 40
) -> Tables:
    """Leave out states and pairs that take more than `known` with any others, of a problem without runs.

    Costs are seconds and `price` times bytes, of which `paid` is taken off: with the memory limit times the price no
    plan within the limit is left out that is as good. A state or a pair takes at least what it costs and the least of
    everything else; how much that says depends on where costs stand, and `_shifted` moves them.
    """
    most = 2 * (known + paid)  # alone it rules a plan out, as what is impossible does

    def priced(cost: Cost) -> Table:
        return np.minimum(cost.time + price * cost.memory, most)

    own = [priced(cost) for cost in problem.unary]
    rest = {edge: priced(cost) for edge, cost in problem.pairs.items()}
    _shifted(own, rest, sweeps)
    bound = sum(c.min() for c in own) + sum(table.min() for table in rest.values()) - paid
    slack = known - bound + 1e-9 * abs(known)
    over = [c - c.min() for c in own]
    for (u, v), table in rest.items():
        over[u] = over[u] + table.min(axis=1) - table.min()
        over[v] = over[v] + table.min(axis=0) - table.min()
    keep = [np.flatnonzero(o <= slack) for o in over]
    left = {}
    for (u, v), table in rest.items():
        some = np.ix_(keep[u], keep[v])
        near = table[some] - table.min() <= slack
        cost = problem.pairs[u, v]
        left[u, v] = Cost(np.where(near, cost.time[some], np.inf), cost.memory[some])
    return Tables(tuple(Cost(c.time[k], c.memory[k]) for c, k in zip(problem.unary, keep, strict=True)), left)


def _shifted(own: list[Table], rest: dict[Edge, Table], sweeps: int) -> None:
    """Move costs between variables and pairs, in place, so that the sum of all minima grows; plans cost the same.

    Kolmogorov, "A new look at reweighted message passing", IEEE TPAMI 37 (2015), with pairs alone.
    """
    near: list[list[tuple[int, Table]]] = [[] for _ in own]
    for (u, v), table in rest.items():
        near[u].append((v, table))
        near[v].append((u, table.T))
    for sweep in range(sweeps):
        forth = sweep % 2 == 0
        for u in range(len(own)) if forth else range(len(own) - 1, -1, -1):
            for _, table in near[u]:
                least = table.min(axis=1)
                own[u] += least
                table -= least[:, None]
            ahead = [table for v, table in near[u] if (v > u) == forth]
            share = own[u] / max(len(ahead), len(near[u]) - len(ahead), 1)
            for table in ahead:
                own[u] -= share
                table += share[:, None]
