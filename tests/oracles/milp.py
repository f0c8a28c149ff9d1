"""The search problem as an integer program, solved by HiGHS: an oracle for graphs beyond brute force."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from planner.search.problem.problem import Problem
    from tests.oracles.reduction import Tables

SECONDS = 1e6
"""Times are handed over in microseconds and memory in MiB, where HiGHS's absolute tolerances are small."""
MEBIBYTE = 2.0**20


@dataclass(frozen=True)
class IntegerOptimum:
    """``status`` is ``"optimal"``, ``"infeasible"`` or what HiGHS says else, such as ``"Time limit reached"``."""

    status: str
    objective_s: float


def solve_with_highs(problem: Problem | Tables, memory_limit: float, *, time_limit_s: float = 20.0) -> IntegerOptimum:
    r"""Minimise the sum of all tables of a problem without runs.

    Binary ``x[v, s]`` says that variable v takes state s. The product ``x[u, s] x[v, t]`` is a variable
    ``y[uv, s, t] >= 0`` with ``sum_t y[uv, s, t] = x[u, s]`` and ``sum_s y[uv, s, t] = x[v, t]`` (the local
    marginal polytope: Wainwright and Jordan, "Graphical models, exponential families, and variational
    inference", Foundations and Trends in Machine Learning 1, 2008, section 4). Impossible pairs have no y.
    """
    import highspy

    model = _Model()
    first = [model.columns(cost.time, cost.memory, integer=True) for cost in problem.unary]
    for columns in first:
        model.row(1.0, 1.0, [(column, 1.0) for column in columns.ravel()])
    for (u, v), cost in problem.pairs.items():
        pair = model.columns(cost.time, cost.memory, integer=False)
        for state, column in enumerate(first[u]):
            model.row(0.0, 0.0, [(column, -1.0), *((c, 1.0) for c in pair[state] if c >= 0)])
        for state, column in enumerate(first[v]):
            model.row(0.0, 0.0, [(column, -1.0), *((c, 1.0) for c in pair[:, state] if c >= 0)])
    if np.isfinite(memory_limit):
        memory = [(column, size / MEBIBYTE) for column, size in enumerate(model.memory) if size]
        model.row(-highspy.kHighsInf, memory_limit / MEBIBYTE, memory)
    solver = highspy.Highs()
    for option, value in (
        ("output_flag", False),
        ("threads", 1),
        ("time_limit", time_limit_s),
        ("mip_rel_gap", 1e-9),
        ("mip_abs_gap", 1e-9),
        ("mip_feasibility_tolerance", 1e-9),
        ("primal_feasibility_tolerance", 1e-9),
    ):
        solver.setOptionValue(option, value)
    solver.passModel(model.build(highspy))
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kOptimal:
        return IntegerOptimum("optimal", solver.getInfo().objective_function_value / SECONDS)
    infeasible = status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible)
    return IntegerOptimum("infeasible" if infeasible else solver.modelStatusToString(status), float("nan"))


class _Model:
    """Columns and rows as they come, then as the arrays that HiGHS reads."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.memory: list[float] = []
        self.integer: list[bool] = []
        self.bounds: list[tuple[float, float]] = []
        self.starts: list[int] = [0]
        self.indices: list[int] = []
        self.values: list[float] = []

    def columns(self, time: np.ndarray, memory: np.ndarray, *, integer: bool) -> np.ndarray:
        """One column for every possible entry of a table; an array of its shape with their numbers, −1 elsewhere."""
        numbers = np.full(time.shape, -1, dtype=np.int64)
        for place in np.argwhere(np.isfinite(time)):
            index = tuple(place)
            numbers[index] = len(self.cost)
            self.cost.append(float(time[index]) * SECONDS)
            self.memory.append(float(memory[index]))
            self.integer.append(integer)
        return numbers

    def row(self, lower: float, upper: float, entries: list[tuple[int, float]]) -> None:
        self.bounds.append((lower, upper))
        self.indices += [int(column) for column, _ in entries if column >= 0]
        self.values += [value for column, value in entries if column >= 0]
        self.starts.append(len(self.indices))

    def build(self, highspy: Any) -> Any:
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.bounds)
        lp.col_cost_ = np.array(self.cost)
        lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
        lp.row_lower_, lp.row_upper_ = (np.array(side) for side in zip(*self.bounds, strict=True))
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(self.starts)
        lp.a_matrix_.index_ = np.array(self.indices)
        lp.a_matrix_.value_ = np.array(self.values)
        kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
        lp.integrality_ = [kinds[integer] for integer in self.integer]
        return lp
