"""The fastest plan under a memory limit: a price of memory, then Pareto labels for what gap it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.blocks import BlockVariables, Layout, Table, Variables
from planner.search.exact.certified import FAST, PROOF, SMALL, CostedPlan, Exact
from planner.search.exact.folded import Eliminated, FoldedElimination, Layers, Weights, affordable, marginals
from planner.search.exact.model import Mask, Model
from planner.search.exact.pareto import MAX_PAIRS, Limits, ParetoSearch, TooManyLabelsError
from planner.search.problem.problem import Solution

PRICE_STEPS = 24
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)
"""Parts of the gap that labels are given in turn: fewer labels are looked at where the optimum is near the bound."""


class Limited:
    """One search under a memory limit: the best plan so far, and what is proven."""

    def __init__(self, solver: Exact, limit: float, best: CostedPlan | None = None, pairs: int = MAX_PAIRS) -> None:
        self.solver = solver
        self.limit = limit
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
            if not self._open():
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
            limits = Limits(min(low + share * gap, self.best.seconds), self.limit, self.pairs)
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


@dataclass(frozen=True, slots=True)
class Condensed:
    """The model that is left; ``number[v]`` is the variable there of variable v of the model before, −1 without one."""

    model: Model
    number: tuple[int, ...]
    blocks: tuple[BlockVariables, ...]
    """Those of the model before."""

    def masks(self, keep: Iterable[Mask]) -> list[Mask]:
        """Which states of each variable of the model before are kept, given those of the model that is left."""
        known = [*keep, np.ones(1, dtype=np.bool_)]
        return [known[n] for n in self.number]

    def restored(self, states: Mapping[int, int], layers: Layers) -> tuple[dict[int, int], Layers]:
        """A plan of the model before."""

        def among(variables: Sequence[int], chosen: Mapping[int, int]) -> dict[int, int]:
            return {v: chosen[self.number[v]] if self.number[v] >= 0 else 0 for v in variables}

        rows = tuple(
            tuple(among((*block.entrance, *block.inside, *block.exit), one) for one in row)
            for block, row in zip(self.blocks, layers, strict=True)
        )
        return among(range(len(self.number)), states), rows


def condensed(model: Model) -> Condensed:
    """Leave out every variable of one state.

    What the tables with its neighbours say joins those of the neighbours alone, or goes to a table with a new variable
    of one state where those count more or less often.
    """
    parts = model.layout
    kept = [v for v, size in enumerate(model.sizes) if size != 1]
    number = [-1] * len(model.sizes)
    for position, v in enumerate(kept):
        number[v] = position
    home = _Home(model, kept, number)
    blocks, in_block = [], []
    for block, scopes in zip(parts.blocks, parts.in_block, strict=True):
        found, fresh = home.gathered(scopes)
        left = [tuple(number[v] for v in vs if number[v] >= 0) for vs in (block.entrance, block.exit, block.shared)]
        inside = (*(number[v] for v in block.inside if number[v] >= 0), *fresh)
        blocks.append(BlockVariables(left[0], left[1], inside, left[2], block.count))
        in_block.append(found)
    outside, _ = home.gathered(parts.outside)
    layout = Layout(tuple(blocks), outside, tuple(in_block))
    small = Model(layout, tuple(home.states), home.time, home.memory)
    return Condensed(small, tuple(number), parts.blocks)


class _Home:
    """Tables of the model that is left, collected place by place."""

    def __init__(self, model: Model, kept: Sequence[int], number: Sequence[int]) -> None:
        self.model = model
        self.number = number
        self.states = [model.states[v] for v in kept]
        self.time: dict[Variables, Table] = {}
        self.memory: dict[Variables, Table] = {}

    def gathered(self, scopes: Sequence[Variables]) -> tuple[tuple[Variables, ...], tuple[int, ...]]:
        """Scopes of what is left of the tables of one place, and the variables that are new there."""
        alone = {scope[0] for scope in scopes if len(scope) == 1}
        fresh: dict[int, int] = {}
        found: dict[Variables, None] = {}
        for scope in scopes:
            left = [v for v in scope if self.number[v] >= 0]
            named = tuple(self.number[v] for v in left)
            if not left or (len(left) == 1 and left[0] not in alone):
                key = left[0] if left else -1
                if key not in fresh:
                    fresh[key] = len(self.states)
                    self.states.append(np.zeros(1, dtype=np.intp))
                named = (*named, fresh[key])
            found[named] = None
            for source, target in ((self.model.time, self.time), (self.model.memory, self.memory)):
                if scope in source:
                    table = source[scope].reshape([len(self.states[v]) for v in named])
                    target[named] = target[named] + table if named in target else table
        return tuple(found), tuple(fresh.values())
