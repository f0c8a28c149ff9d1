"""Problems of plain tables, dressed as problems along one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import numpy as np
from hypothesis import strategies as st

from planner.search.problem.variables import Kind
from tests.oracles.brute_force import TableProblem, random_cost
from tests.planner.search.problems import make_mesh


@dataclass(frozen=True)
class OneAxis(TableProblem):
    """A problem of tables whose states are the choices along one axis of `devices`."""

    devices: int = 6

    @property
    def states(self) -> list[range]:
        return cast("list[range]", [_States(size) for size in self.sizes])

    @property
    def setting(self) -> SimpleNamespace:
        return SimpleNamespace(costs=SimpleNamespace(mesh=make_mesh(data=self.devices)))

    @property
    def graph(self) -> SimpleNamespace:
        return SimpleNamespace(runs=super().graph.runs, nodes=(), parameters=())


class _States:
    def __init__(self, size: int) -> None:
        self.choice = np.arange(size).reshape(1, size)
        choices = [SimpleNamespace(reads={}, writes={})] * size
        self.variable = SimpleNamespace(kind=Kind.OPERATOR, nodes=(), choices=choices)

    def __len__(self) -> int:
        return self.choice.shape[1]


def one_axis(problem: TableProblem) -> OneAxis:
    """The same tables along one axis."""
    return OneAxis(problem.sizes, problem.unary, problem.pairs, problem.block, problem.count)


@st.composite
def wide_graphs(draw: st.DrawFn) -> OneAxis:
    """Up to seven variables, densely connected: most cannot be folded."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 7))
    sizes = tuple(int(s) for s in random.integers(1, 4, count))
    pairs = {
        (a, b): random_cost(random, (sizes[a], sizes[b]), forbidden=0.2)
        for a in range(count)
        for b in range(a + 1, count)
        if random.random() < 0.7
    }
    return OneAxis(sizes, tuple(random_cost(random, (s,)) for s in sizes), pairs, {})
