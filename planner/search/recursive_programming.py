"""Fast search by double recursion: over the operators by weight, over the devices by halves.

The device set is halved along the mesh axes, the outermost (slowest links) first; an axis whose size is no power of
two is cut by its prime factors. Every cut brings a round over the operators, heaviest first (seconds of unsplit
work, all layers together): each takes the placement along that axis which costs least, communication and the work
that stays counted, given what is decided. All pieces of an axis share one placement, so the rounds of one axis
are chances to revise it: the first decide, the later ones see all neighbours and never make the plan worse. A second
and a third start decide in the order of the graph instead, from its inputs on; the best of the three is kept.

A round is linear in the number of operators, and the number of rounds is logarithmic in the devices. Blocks of a run
are decided once, whatever the depth. The tables are those of the exact search, so pins, restrictions and
indivisible dims are honoured. Nothing is proven: the bound is that of the exact search, on demand.

Memory is bought at a price that is raised and lowered a bounded number of times; where no such plan fits, the plan
of least memory is the answer, so a plan is found wherever there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from planner.search import dynamic_programming
from planner.search.exact.pareto import MAX_PAIRS
from planner.search.problem.layered_tables import LayeredTables
from planner.search.problem.problem import Problem, Solution
from planner.search.sequential import Descent, by_distance, by_weight, within_limit


def solve(problem: Problem, memory_limit_bytes: float) -> Solution | None:
    """Find a good plan whose memory fits, its bound 0; None where even the smallest plan does not."""
    tables = LayeredTables(problem)
    weights, distances = by_weight(tables), by_distance(tables, ())

    def at_price(price: float, start: Sequence[int] | None) -> list[int]:
        descent = Descent(tables, price)
        return descent.search(weights, distances, ()) if start is None else descent.settle(start, weights, 1)

    found = within_limit(tables, memory_limit_bytes, at_price, partial(dynamic_programming.smallest, problem))
    return found and replace(found, lower_bound_s=0.0, width=0)


def with_bound(problem: Problem, solution: Solution, memory_limit_bytes: float, *, pairs: int = MAX_PAIRS) -> Solution:
    """The solution with the lower bound and the width that the exact search proves, looking at so many pairs."""
    exact = dynamic_programming.solve(problem, memory_limit_bytes, pairs=pairs)
    proven = 0.0 if exact is None else min(exact.lower_bound_s, solution.objective_s)
    return replace(solution, lower_bound_s=proven, width=0 if exact is None else exact.width)
