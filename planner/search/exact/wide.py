"""Search of graphs that are too densely connected for elimination: a beam, and a bound by dual decomposition.

Every table of two variables hands parts of its cost to its variables as *messages*; what the variables and what the
tables cost at least, each by itself, adds up to a lower bound of any plan, whatever the messages are:

    ``sum_v min_s [f_v(s) + sum_e m_ev(s)] + sum_e min_st [f_e(s, t) − m_eu(s) − m_ev(t)] <= min_x sum f``

Sweeps forth and back over an order of the variables raise it (TRW-S: Kolmogorov, "Convergent tree-reweighted message
passing", IEEE PAMI 28, 2006). Runs of equal
blocks are written out before.

The messages tell for any beginning of a plan what it costs at least to complete; a beam keeps the best beginnings.
States that no better plan can take go, and what is left may be narrow enough for the exact search after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import Layout, Table, TooWideError, Variables
from planner.search.exact.certified import PROOF, SMALL, CostedPlan, Costing
from planner.search.exact.folded import Layers, Weights, weighed
from planner.search.exact.model import Mask, Model
from planner.search.problem.problem import Solution

SWEEPS = 60
SETTLED = 1e-7


class Dual:
    """Messages for a model without runs at given weights, and the bound that they prove.

    ``uses[v]`` are the tables of variable v and another one, each with the dim that is v's.
    """

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model = model
        self.cost = {scope: weighed(model, scope, weights) for scope in model.time}
        self.most = 1.0 + float(sum(table[np.isfinite(table)].max(initial=0.0) for table in self.cost.values()))
        """No plan costs more; what is forbidden costs twice as much, so that messages stay finite."""
        self.messages: dict[tuple[Variables, int], Table] = {}
        self.uses: list[list[tuple[Variables, int]]] = [[] for _ in model.states]
        for scope, table in self.cost.items():
            if np.isinf(table).any():
                self.cost[scope] = np.minimum(table, 2 * self.most)
            for dim, v in enumerate(scope if len(scope) == 2 else ()):
                self.messages[scope, dim] = np.zeros(len(model.states[v]))
                self.uses[v].append((scope, dim))
        self.places = _order(model)
        self.order = sorted(range(len(model.states)), key=lambda v: (self.places[v], v))
        self.bound = self._bound()

    def total(self, variable: int) -> Table:
        """What a variable's states cost with their messages."""
        total = self.cost.get((variable,), np.zeros(len(self.model.states[variable])))
        for use in self.uses[variable]:
            total = total + self.messages[use]
        return total

    def _sweep(self, forth: bool) -> None:
        """Each variable takes what its tables can give, and hands it on in equal shares to those ahead."""
        for v in self.order if forth else reversed(self.order):
            for scope, dim in self.uses[v]:
                # The message that leaves nothing with a table beyond what its other variable was given.
                table, other = self.cost[scope], self.messages[scope, 1 - dim]
                least = (table - other).min(axis=1) if dim == 0 else (table - other[:, None]).min(axis=0)
                self.messages[scope, dim] = least
            ahead = [use for use in self.uses[v] if (self.places[use[0][1 - use[1]]] > self.places[v]) == forth]
            if ahead:
                share = self.total(v) / max(len(ahead), len(self.uses[v]) - len(ahead))
                for use in ahead:
                    self.messages[use] = self.messages[use] - share

    def _bound(self) -> float:
        """The bound that the messages prove."""
        total = sum(float(self.total(v).min()) for v in self.order)
        return total + sum(float(self.left(scope).min()) for scope in self.cost if len(scope) == 2)

    def left(self, scope: Variables) -> Table:
        """What a table of two variables costs after its messages."""
        return self.cost[scope] - self.messages[scope, 0][:, None] - self.messages[scope, 1]

    def tighten(self) -> float:
        """Sweep until the bound settles; keeps the best messages and returns their bound."""
        best, kept, waited = self.bound, dict(self.messages), 0
        for number in range(SWEEPS):
            self._sweep(True)
            self._sweep(False)
            bound = self._bound()
            waited = 0 if bound > best + SETTLED * abs(best) else waited + 1
            if bound > best:
                best, kept = bound, dict(self.messages)
            if waited == 3 and number > 5:
                break
        self.messages, self.bound = kept, best
        return best

    def below(self, threshold: float) -> list[Mask]:
        """States that some plan of at most `threshold` may take, as far as the messages tell."""
        slack, keep = threshold + 1e-9 * abs(threshold) - self.bound, []
        for v in range(len(self.model.states)):
            cost = self.total(v)
            floor = float(cost.min()) + sum(float(self.left(scope).min()) for scope, _ in self.uses[v])
            for scope, dim in self.uses[v]:
                cost = cost + self.left(scope).min(axis=1 - dim)
            keep.append(cost <= floor + slack)
        return keep


def _order(model: Model) -> list[int]:
    """Places of the variables on a walk through the graph, breadth first."""
    neighbours: list[dict[int, None]] = [{} for _ in model.states]
    for scope in model.time:
        if len(scope) == 2:
            neighbours[scope[0]][scope[1]] = neighbours[scope[1]][scope[0]] = None
    place: dict[int, int] = {}
    for start in sorted(range(len(neighbours)), key=lambda v: (len(neighbours[v]), v)):
        queue = deque([start])
        while queue:
            v = queue.popleft()
            if v not in place:
                place[v] = len(place)
                queue.extend(n for n in neighbours[v] if n not in place)
    return [place[v] for v in range(len(neighbours))]


@dataclass(frozen=True, slots=True)
class Unrolled:
    """A model with the layers of runs as variables of their own, and what became of each variable.

    ``origin[w]`` is the variable that variable w of the new model stands for. ``layers[r][i]`` says for layer i + 1 of
    run r which new variable stands for each of the block's.
    """

    model: Model
    origin: tuple[int, ...]
    layers: tuple[tuple[Mapping[int, int], ...], ...]

    def folded(self, keep: Sequence[Mask]) -> list[Mask]:
        """States of the variables of the model before that some copy keeps."""
        masks: dict[int, Mask] = {}
        for v, mask in zip(self.origin, keep, strict=True):
            masks[v] = masks[v] | mask if v in masks else mask
        return [masks[v] for v in range(len(masks))]

    def plan(self, states: Mapping[int, int]) -> tuple[dict[int, int], Layers]:
        """States of the model before."""
        layers = tuple(tuple({v: states[w] for v, w in copy.items()} for copy in copies) for copies in self.layers)
        # Entrances stand for the first layer's, what else a block has for the last layer's: both kept their numbers.
        return {v: states[v] for v in range(max(self.origin, default=-1) + 1)}, layers


def unrolled(model: Model) -> Unrolled:
    """Write out the layers of every run (behind the very first, which is out)."""
    origin, layers = list(range(len(model.states))), []
    time, memory, outside = dict(model.time), dict(model.memory), list(model.layout.outside)
    for block, scopes in zip(model.layout.blocks, model.layout.in_block, strict=True):
        rows: list[dict[int, int]] = []
        before = dict(zip(block.entrance, block.entrance, strict=True))
        for number in range(block.count):
            own = {v: v for v in (*block.inside, *block.exit)}
            if number < block.count - 1:  # the last block keeps its variables, as what follows the run reads them
                own = {v: len(origin) + i for i, v in enumerate(own)}
                origin.extend(own.keys())
            rows.append({**before, **own})
            before = {e: own[x] for e, x in zip(block.entrance, block.exit, strict=True)}
            for old in scopes:
                new = tuple(rows[-1].get(v, v) for v in old)
                outside.append(new)
                time[new] = model.time[old]
                if old in model.memory:
                    memory[new] = model.memory[old]
        layers.append(tuple(rows))
    used, states = set(outside), tuple(model.states[v] for v in origin)
    time, memory = ({scope: of[scope] for scope in of if scope in used} for of in (time, memory))
    return Unrolled(Model(Layout((), tuple(outside), ()), states, time, memory), tuple(origin), tuple(layers))


BEAM = 64
PRICES = 8
KEPT = 8


class Beam:
    """Beginnings of plans along an order of variables, the best of which are kept.

    Parameters
    ----------
    dual, memory
        Messages at the weights that order the beginnings, and for the least memory that each may be completed with;
        without the latter memory has no limit.
    """

    def __init__(self, dual: Dual, memory: Dual | None, limit: float) -> None:
        self.dual = dual
        self.memory = memory
        self.limit = limit
        self.sizes = dual.model.sizes

    def run(self, width: int = BEAM) -> NDArray[np.int32]:
        """States of all variables for each plan that is left at the end, best first; may be none."""
        states = np.full((1, len(self.sizes)), -1, dtype=np.int32)
        cost, bytes_ = np.zeros(1), np.zeros(1)
        done: set[int] = set()
        slack = np.inf if self.memory is None else self.limit - self.memory.bound + 1e-9 * abs(self.limit)
        for v in self.dual.order:
            total = cost[:, None] + self._added(self.dual, v, states, done)
            if self.memory is not None:
                needed = bytes_[:, None] + self._added(self.memory, v, states, done)
                total[needed > slack] = np.inf
            flat = total.ravel()
            chosen = np.argsort(flat, kind="stable")[:width]
            chosen = chosen[np.isfinite(flat[chosen])]
            before, state = np.divmod(chosen, self.sizes[v])
            states = states[before]
            states[:, v] = state
            cost = flat[chosen]
            bytes_ = bytes_[before] if self.memory is None else needed.ravel()[chosen]
            done.add(v)
        return states

    def _added(self, dual: Dual, v: int, states: NDArray[np.int32], done: set[int]) -> Table:
        """By how much each state of `v` raises the bound of each beginning, shape (beginnings, states)."""
        own = dual.total(v)
        added = np.broadcast_to(own - own.min(), (len(states), len(own))).copy()
        for scope, dim in dual.uses[v]:
            other, left = scope[1 - dim], dual.left(scope)
            left = left - left.min() if dim == 0 else left.T - left.min()
            if other in done:
                taken = states[:, other]
                added += left.T[taken] - left.min(axis=0)[taken][:, None]
            else:
                added += left.min(axis=1)
        return added


class WideModel:
    """A model of any width, with the messages that every search of it begins with."""

    def __init__(self, costing: Costing, model: Model) -> None:
        self.costing = costing
        self.model = model
        self.unrolled = unrolled(model)

    def dual(self, weights: Weights) -> Dual:
        """Settled messages at some weights."""
        dual = Dual(self.unrolled.model, weights)
        dual.tighten()
        return dual

    @cached_property
    def time(self) -> Dual:
        """Settled messages where memory has no price."""
        return self.dual(Weights(1.0, 0.0))

    @cached_property
    def memory(self) -> Dual:
        """Settled messages for the least memory; their bound is bytes that no plan takes fewer of."""
        return self.dual(SMALL)


class WideSearch:
    """The best plan and the bound of a model of any width, under a memory limit."""

    def __init__(self, wide: WideModel, limit: float) -> None:
        self.wide = wide
        self.costing = wide.costing
        self.model = wide.model
        self.limit = limit
        self.unrolled = wide.unrolled
        self.best: CostedPlan | None = None
        self.bound = 0.0
        self._kept: tuple[Dual, float] | None = None

    def possible(self) -> bool:
        """Whether a plan within the limit is not proven impossible."""
        dual = self.wide.time if np.isinf(self.limit) else self.wide.memory
        return dual.bound <= min(self.limit, dual.most)

    def smallest(self) -> Solution:
        """The plan of least memory that a beam finds, the fastest of those.

        Raises
        ------
        TooWideError
            Where it finds none.
        """
        plans = [plan for plan in self._plans(self.wide.memory, np.inf) if np.isfinite(plan.seconds)]
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
            dual = self.wide.dual(Weights(1.0, price)) if price else self.wide.time
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
            if self.proven() or not free:
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
        found = Beam(dual, None if np.isinf(limit) else self.wide.memory, limit).run()
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
