"""Search of graphs that are too densely connected for elimination: a beam, and a bound by dual decomposition.

The messages of the bound (`planner.search.exact.dual`) tell for any beginning of a plan what it costs at least to
complete; a beam keeps the best beginnings. States that no better plan can take go, and what is left may be narrow
enough for the exact search after all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.costing import PROOF, SMALL, CostedPlan, Costing, Stop
from planner.search.exact.dual import Dual
from planner.search.exact.elimination import Table, TooWideError
from planner.search.exact.folded import Weights
from planner.search.exact.model import Model
from planner.search.exact.unrolling import unrolled
from planner.search.problem.solution import Solution

BEAM = 64
PRICES = 8
KEPT = 8


class Beam:
    """Beginnings of plans along an order of variables, the best of which are kept.

    Parameters
    ----------
    dual, memory
        Messages at the weights that order the beginnings, and for the least memory that each may be completed with.
    """

    def __init__(self, dual: Dual, memory: Dual, limit: float) -> None:
        self.dual = dual
        self.memory = memory
        self.limit = limit
        self.sizes = dual.model.sizes
        self.order = sorted(range(len(self.sizes)), key=lambda v: (dual.places[v], v))

    def run(self, width: int = BEAM) -> NDArray[np.int32]:
        """States of all variables for each plan that is left at the end, best first; may be none."""
        states = np.full((1, len(self.sizes)), -1, dtype=np.int32)
        cost, bytes_ = np.zeros(1), np.zeros(1)
        done: set[int] = set()
        slack = self.limit - self.memory.bound + 1e-9 * abs(self.limit) if np.isfinite(self.limit) else np.inf
        for v in self.order:
            total = cost[:, None] + self._added(self.dual, v, states, done)
            if np.isfinite(slack):
                needed = bytes_[:, None] + self._added(self.memory, v, states, done)
                total[needed > slack] = np.inf
            flat = total.ravel()
            chosen = np.argsort(flat, kind="stable")[:width]
            chosen = chosen[np.isfinite(flat[chosen])]
            before, state = np.divmod(chosen, self.sizes[v])
            states = states[before]
            states[:, v] = state
            cost = flat[chosen]
            bytes_ = needed.ravel()[chosen] if np.isfinite(slack) else bytes_[before]
            done.add(v)
        return states

    def _added(self, dual: Dual, v: int, states: NDArray[np.int32], done: set[int]) -> Table:
        """By how much each state of `v` raises the bound of each beginning, shape (beginnings, states)."""
        own = dual.total_of(v)
        added = np.broadcast_to(own - own.min(), (len(states), len(own))).copy()
        for use in dual.uses_of(v):
            other = use.scope[1 - use.dim]
            left = dual.left(use.scope)
            left = left - left.min() if use.dim == 0 else left.T - left.min()
            if other in done:
                taken = states[:, other]
                added += left.T[taken] - left.min(axis=0)[taken][:, None]
            else:
                added += left.min(axis=1)
        return added


class WideSearch:
    """The best plan and the bound of a model of any width, under a memory limit."""

    def __init__(self, costing: Costing, model: Model, limit: float, stop: Stop) -> None:
        self.costing = costing
        self.model = model
        self.limit = limit
        self.stop = stop
        self.unrolled = unrolled(model)
        self.best: CostedPlan | None = None
        self.bound = 0.0
        self._kept: tuple[Dual, float] | None = None
        self._memory = self._dual(SMALL)

    def _dual(self, weights: Weights) -> Dual:
        dual = Dual(self.unrolled.model, weights)
        dual.tighten(self.stop)
        return dual

    def possible(self) -> bool:
        """Whether a plan within the limit is not proven impossible."""
        return self._memory.bound <= min(self.limit, self._memory.most)

    def least_bytes(self) -> float:
        """Bytes that no plan takes fewer of."""
        return self._memory.bound

    def smallest(self) -> Solution:
        """The plan of least memory that a beam finds, the fastest of those.

        Raises
        ------
        TooWideError
            Where it finds none.
        """
        plans = [plan for plan in self._plans(self._memory, np.inf) if np.isfinite(plan.seconds)]
        if not plans:
            raise TooWideError(
                "the graph is too densely connected for exact search, and no plan of it was found; pin more "
                "dimensions, for example --pin tp=1"
            )
        best = min(plans, key=lambda plan: (plan.bytes, plan.seconds))
        return self.costing.solution(best, 0.0, left=sum(self.model.sizes), width=0, largest_table=0)

    def proven(self) -> bool:
        """Whether the best plan attains the bound."""
        return self.best is not None and self.best.seconds - self.bound <= PROOF * abs(self.best.seconds)

    def run(self) -> None:
        """Look for plans at several prices of memory.

        The next price halves the range, towards less memory where the best plan at this one takes too much.
        """
        low, high = 0.0, np.inf
        price = 0.0
        for _ in range(PRICES):
            dual = self._dual(Weights(1.0, price))
            self._prove(dual, price)
            free = self._plans(dual, np.inf)
            plans = free if np.isinf(self.limit) else [*free, *self._plans(dual, self.limit)]
            for plan in plans:
                if (
                    np.isfinite(plan.seconds)
                    and plan.bytes <= self.limit
                    and (self.best is None or plan.seconds < self.best.seconds)
                ):
                    self.best = plan
            if self.proven() or self.stop() or not free:
                return
            if free[0].bytes <= self.limit:
                high = price
            else:
                low = price
            if high == 0.0:
                return
            guess = free[0].seconds / max(self.limit, 1.0) if price == 0 else 4 * price
            price = guess if np.isinf(high) else (low * high) ** 0.5 if low else high / 4

    def _prove(self, dual: Dual, price: float) -> None:
        paid = price * self.limit if price else 0.0
        if self._kept is None or dual.bound - paid > self.bound:
            self.bound = max(self.bound, dual.bound - paid)
            self._kept = (dual, paid)

    def _plans(self, dual: Dual, limit: float) -> list[CostedPlan]:
        """Plans within the limit that a beam finds, best first."""
        found = Beam(dual, self._memory, limit).run()
        plans = [self.unrolled.plan(dict(enumerate(row.tolist()))) for row in found[:KEPT]]
        return [self.costing.plan(*plan, self.model) for plan in plans]

    def narrowed(self) -> Model | None:
        """The model without states that no better plan takes; None where nothing is left of some variable."""
        assert self.best is not None  # called with a plan at hand
        assert self._kept is not None
        dual, paid = self._kept
        keep = self.unrolled.folded(dual.below(self.best.seconds + paid))
        for block in self.model.layout.blocks:
            # Only the first layer enters by the entrance: the others enter by what the one before leaves.
            for enter, leave in zip(block.entrance, block.exit, strict=True):
                keep[enter] = keep[leave] = keep[enter] | keep[leave]
        return self.model.restricted(keep) if all(k.any() for k in keep) else None

    def solution(self) -> Solution:
        """The best plan with its bound."""
        assert self.best is not None  # called with a plan at hand
        return self.costing.solution(self.best, self.bound, left=sum(self.model.sizes), width=0, largest_table=0)
