"""Exact search by dynamic programming: min-plus elimination, with repeated blocks as matrix powers.

Every variable of the graph is eliminated in an order that keeps tables small (`planner.search.exact.folded`). The
memory limit is relaxed with a price λ per byte (Lagrange): for every λ ≥ 0, ``min_x [time(x) + λ memory(x)] − λ
limit`` is a lower bound on the best feasible plan. What gap is left is closed by Pareto labels
(`planner.search.exact.limited`) over the states and entries that a plan better than the best known one may take.
Graphs too wide for that are searched with a beam and bounded by dual decomposition (`planner.search.exact.wide`).
"""

from __future__ import annotations

from weakref import finalize

import numpy as np

from planner.search.exact.blocks import TooWideError, Variables
from planner.search.exact.certified import PROOF, Costing, Exact
from planner.search.exact.folded import Weights
from planner.search.exact.limited import Limited
from planner.search.exact.model import model_of, possible, undominated
from planner.search.exact.pareto import MAX_PAIRS
from planner.search.exact.wide import WideModel, WideSearch
from planner.search.problem.problem import Problem, Solution
from planner.search.problem.variables import Kind


class DynamicProgramming(Exact):
    """The exact solver of one problem.

    Raises
    ------
    TooWideError
        Where the graph is too densely connected for exact elimination.
    """

    def __init__(self, problem: Problem) -> None:
        whole = model_of(problem)
        model = possible(whole)
        try:
            super().__init__(Costing(whole), model)
        except TooWideError:
            super().__init__(Costing(whole), undominated(model))

    @property
    def outside(self) -> tuple[Variables, ...]:
        """Scopes of the tables that count once."""
        return self.model.layout.outside

    @property
    def in_block(self) -> tuple[tuple[Variables, ...], ...]:
        """Scopes of the tables of each block."""
        return self.model.layout.in_block

    def minimise(self, price: float) -> tuple[float, Solution]:
        """Minimise ``time + price × memory`` exactly; returns that minimum and the plan that attains it."""
        total, plan = self.fastest() if price == 0 else self.priced(Weights(1.0, price))[:2]
        return total, self.solution(plan, plan.seconds if price == 0 else 0.0)


class WideProblem:
    """A problem too wide for elimination, and what its searches share.

    Parameters
    ----------
    why
        The error that says so.
    """

    def __init__(self, problem: Problem, why: TooWideError) -> None:
        whole = model_of(problem)
        self.error = TooWideError(*why.args)  # the traceback of the other would keep the problem
        self.costing = Costing(whole)
        self.wide = WideModel(self.costing, undominated(possible(whole)))
        self._free: Solution | None = None

    def solve(self, limit: float) -> Solution | None:
        """The best plan within a limit in bytes, and its bound; a plan found without a limit stands where it fits."""
        if self._free is not None and self._free.memory_bytes <= limit:
            return self._free
        found = self._search(limit)
        if np.isinf(limit):
            self._free = found
        return found

    def least_bytes(self) -> float:
        """Bytes that no plan takes fewer of."""
        return self.wide.memory.bound

    def _search(self, limit: float) -> Solution | None:
        """Search with a beam; what states are left by its bound, elimination may search after all."""
        search = WideSearch(self.wide, limit)
        if not search.possible():
            return None
        search.run()
        if search.best is None:
            raise TooWideError(
                "the graph is too densely connected for exact search, and no plan was found that fits in "
                f"{limit:.4g} bytes, though none is proven impossible; pin more dimensions, for example --pin tp=1"
            )
        narrow = None if search.proven() else search.narrowed()
        if narrow is not None:
            try:
                solver = Exact(search.costing, narrow)
            except TooWideError:
                return search.solution()
            found = Limited(solver, limit, search.best).solve()
            # Every plan faster than the best known one is among what is left.
            search.best = search.best if found is None else search.costing.costed(found.assignment, found.layers)
            search.bound = max(search.bound, search.best.seconds if found is None else found.lower_bound_s)
        return search.solution()


_SOLVERS: dict[int, DynamicProgramming | WideProblem] = {}


def _known(problem: Problem) -> DynamicProgramming | WideProblem:
    """The solver of a problem, made once for all that is asked of it and kept as long as the problem is."""
    key = id(problem)
    if key not in _SOLVERS:
        try:
            _SOLVERS[key] = DynamicProgramming(problem)
        except TooWideError as error:
            _SOLVERS[key] = WideProblem(problem, error)
        finalize(problem, _SOLVERS.pop, key, None)
    return _SOLVERS[key]


def solve(problem: Problem, memory_limit_bytes: float, *, pairs: int = MAX_PAIRS) -> Solution | None:
    """Find the fastest plan whose memory fits; None where even the smallest plan does not.

    ``pairs`` of labels are looked at for what a price of memory leaves open.

    Returns
    -------
    Solution
        Optimal where ``lower_bound_s`` is ``objective_s``. Without a binding limit it always is, unless the graph is
        too wide for elimination.

    Raises
    ------
    TooWideError
        Where the graph is too wide and no plan was found, though none is proven impossible.
    """
    solver = _known(problem)
    if isinstance(solver, WideProblem):
        return solver.solve(memory_limit_bytes)
    return Limited(solver, memory_limit_bytes, pairs=pairs).solve()


def closed(problem: Problem, solution: Solution, memory_limit_bytes: float, *, pairs: int) -> tuple[Solution, int]:
    """Prove or improve a solution by labels; returns it, and how many pairs of labels were looked at."""
    if solution.gap <= PROOF:
        return solution, 0
    solver = _known(problem)
    if isinstance(solver, WideProblem):
        return solution, 0
    search = Limited(solver, memory_limit_bytes, pairs=pairs)
    found = search.solve()
    return (solution if found is None else found), pairs - search.pairs


def fastest(problem: Problem) -> Solution:
    """The best plan without a memory limit."""
    solver = _known(problem)
    if not isinstance(solver, WideProblem):
        return solver.minimise(0.0)[1]
    found = solver.solve(np.inf)
    if found is None:
        raise solver.error
    return found


def once_s(problem: Problem, solution: Solution) -> float:
    """Seconds of a plan's messages once a step, which bring parameters and sum gradients: passes may hide them."""
    parameters = {n for n, variable in enumerate(problem.decisions.variables) if variable.kind is Kind.PARAMETER}
    solver = _SOLVERS.get(id(problem))
    costing = Costing(model_of(problem)) if solver is None else solver.costing
    return costing.seconds_beside(solution, parameters)


def least_bytes(problem: Problem) -> float:
    """Bytes that no plan takes fewer of; some plan takes them, unless the graph is too wide for elimination."""
    return _known(problem).least_bytes()


def smallest(problem: Problem) -> Solution:
    """The plan that needs least memory, however slow, and the fastest of those: what an infeasible search reports.

    On graphs too wide for elimination it is the smallest that a beam finds.
    """
    solver = _known(problem)
    if isinstance(solver, WideProblem):
        return WideSearch(solver.wide, np.inf).smallest()
    return solver.solution(solver.least_memory(), 0.0)
