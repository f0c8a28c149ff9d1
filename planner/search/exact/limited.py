"""The fastest plan under a memory limit: a price of memory, then Pareto labels for what gap it leaves."""

from __future__ import annotations

import numpy as np

from planner.search.exact.certified import FAST, PROOF, SMALL, CostedPlan, Exact, Stop
from planner.search.exact.condensed import condensed
from planner.search.exact.folded import Eliminated, FoldedElimination, Weights, affordable, marginals
from planner.search.exact.model import Model
from planner.search.exact.pareto import MAX_PAIRS, Limits, ParetoSearch, TooManyLabelsError
from planner.search.problem.problem import Solution

PRICE_STEPS = 24
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Parts of the gap that labels are given in turn: fewer labels are looked at where the optimum is near the bound."""


class Limited:
    """One search under a memory limit: the best plan so far, and what is proven."""

    def __init__(
        self, solver: Exact, limit: float, stop: Stop, best: CostedPlan | None = None, pairs: int = MAX_PAIRS
    ) -> None:
        self.solver = solver
        self.limit = limit
        self.stop = stop
        self.best = best
        self.pairs = pairs
        self.bound = -np.inf
        self.price = 0.0

    def solve(self) -> Solution | None:
        """The best plan, with its bound; None where none of this model's fits."""
        total, fastest = self.solver.fastest()
        if not np.isfinite(total):
            return None
        self.bound = fastest.seconds
        if fastest.bytes <= self.limit:
            return self.solver.solution(fastest, fastest.seconds)
        least = self.solver.least_memory()
        if least.bytes > self.limit:
            return None
        self._offer(least)
        self._search_price(fastest, least)
        assert self.best is not None  # the smallest plan was offered
        if self._open() and self.pairs:
            self._search_labels()
        return self.solver.solution(self.best, self.bound)

    def _open(self) -> bool:
        assert self.best is not None  # a search begins with the smallest plan
        return self.best.seconds - self.bound > PROOF * abs(self.best.seconds)

    def _offer(self, plan: CostedPlan) -> None:
        if plan.bytes <= self.limit and (self.best is None or plan.seconds < self.best.seconds):
            self.best = plan

    def _search_price(self, over: CostedPlan, fits: CostedPlan) -> None:
        """Search the price at which the bound, concave in the price, peaks.

        The next price is that at which the plans on both sides cost the same; where it gives nothing new, it is the
        price of the peak.
        """
        done: Eliminated | None = None
        for _ in range(PRICE_STEPS):
            if not self._open() or self.stop():
                break
            price = (fits.seconds - over.seconds) / (over.bytes - fits.bytes)
            if price <= 0:
                break
            total, plan, done = self.solver.priced(Weights(1.0, price))
            if total - price * self.limit > self.bound:
                self.bound, self.price = total - price * self.limit, price
            self._offer(plan)
            if plan.seconds + price * plan.bytes >= over.seconds + price * over.bytes - PROOF * abs(total):
                break
            if plan.bytes <= self.limit:
                fits = plan
            else:
                over = plan
        if done is not None and self.best is not None and self._open():
            self._offer(self.solver.splice(over, fits, self.limit, done))

    def _search_labels(self) -> None:
        """Look for plans a part of the gap above the bound, then for all better ones."""
        assert self.best is not None  # a search begins with the smallest plan
        folded = self.solver.folded
        # The price of the best bound leaves least to look at; the others need only see what it left.
        prices = [*([Weights(1.0, self.price)] if self.price else []), FAST, SMALL]
        if not affordable(folded):
            return
        rest = marginals(folded, folded.run(prices[0]))
        low, gap = self.bound, self.best.seconds - self.bound
        for share in SHARES:
            limits = Limits(min(low + share * gap, self.best.seconds), self.limit, self.stop, self.pairs)
            keep = rest.below(limits.threshold(prices[0]))
            # Nothing at most as slow as the limit is left out but what had no room, so what is not found is slower.
            proven = limits.seconds
            if all(k.any() for k in keep):
                try:
                    proven = min(proven, self._label(self.solver.model.restricted(keep), prices, limits))
                except TooManyLabelsError:
                    return
            self.bound = max(self.bound, min(proven, self.best.seconds))
            if not self._open() or proven < limits.seconds:
                return

    def _label(self, model: Model, prices: list[Weights], limits: Limits) -> float:
        """Look for plans within the limits; returns the least seconds of what was left out for want of room."""
        while True:
            small = condensed(model)
            folded = FoldedElimination(small.model)
            rests = []
            for weights in prices:
                done = folded.run(weights)
                if not done.total <= limits.threshold(weights):
                    return np.inf
                rests.append((weights, marginals(folded, done)))
            keep = small.masks(
                np.logical_and.reduce(masks)
                for masks in zip(*(rest.below(limits.threshold(weights)) for weights, rest in rests), strict=True)
            )
            if not all(k.any() for k in keep):
                return np.inf
            if all(k.all() for k in keep):
                break
            model = model.restricted(keep)
        search = ParetoSearch(folded, rests, limits)
        try:
            found = search.fastest()
        finally:
            self.pairs -= search.pairs
        if found is not None:
            self._offer(self.solver.costing.plan(*small.restored(*found), model))
        return search.dropped
