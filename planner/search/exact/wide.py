"""Search of graphs that are too densely connected for elimination: a beam, and a bound by dual decomposition.

Every table of two variables hands parts of its cost to its variables as *messages*; what the variables and what the
tables cost at least, each by itself, adds up to a lower bound of any plan, whatever the messages are:

    ``sum_v min_s [f_v(s) + sum_e m_ev(s)] + sum_e min_st [f_e(s, t) − m_eu(s) − m_ev(t)] <= min_x sum f``

Sweeps forth and back over an order of the variables raise it (TRW-S: Kolmogorov, "Convergent tree-reweighted message
passing", IEEE PAMI 28, 2006). The layers of a run share their messages, so that a sweep does not grow with depth; the
copies of a variable between two layers are bounded each as often as they are there.

The messages tell for any beginning of a plan what it costs at least to complete; a beam keeps the best beginnings.
States that no better plan can take go, and what is left may be narrow enough for the exact search after all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.search.exact.blocks import Table, TooWideError, Variables
from planner.search.exact.certified import PROOF, SMALL, CostedPlan, Costing, Stop
from planner.search.exact.folded import Weights, weighed
from planner.search.exact.model import Mask, Model, Use, copies
from planner.search.exact.unrolling import unrolled
from planner.search.problem.problem import Solution

SWEEPS = 60
SETTLED = 1e-7


@dataclass(frozen=True, slots=True)
class _CopyKind:
    """One kind of copy of some variables: how many there are, and its tables of one and of two variables."""

    group: int
    times: int
    single: tuple[Use, ...]
    double: tuple[Use, ...]
    sends: tuple[bool, ...]
    """Which of `double` this kind sends messages along: those of a layer are sent by the copies between layers."""
    ahead: tuple[bool, ...]
    """Whether the other variable of each of `double` comes later in the order."""
    place: float


class Dual:
    """Messages for a model at given weights, and the bound that they prove."""

    def __init__(self, model: Model, weights: Weights) -> None:
        self.model = model
        self.cost = {scope: weighed(model, scope, weights) for scope in model.time}
        self.most = self._dearest()
        """No plan costs more; what is forbidden costs twice as much, so that messages stay finite."""
        for scope, table in self.cost.items():
            if np.isinf(table).any():
                self.cost[scope] = np.minimum(table, 2 * self.most)
        self.groups = copies(model.layout, len(model.states))
        self.messages: dict[tuple[Variables, int], Table] = {
            (scope, dim): np.zeros(len(model.states[v]))
            for scope in self.cost
            if len(scope) == 2
            for dim, v in enumerate(scope)
        }
        self.places = _order(model)
        self.kinds = sorted(self._kinds(), key=lambda kind: kind.place)
        self._kind_of = {v: kind for kind in self.kinds for v in self.groups[kind.group].variables}
        self.bound = self._bound()

    def _dearest(self) -> float:
        times = dict.fromkeys(self.cost, 1)
        for block, scopes in zip(self.model.layout.blocks, self.model.layout.in_block, strict=True):
            times.update(dict.fromkeys(scopes, block.count))
        return 1.0 + float(sum(n * self.cost[s][np.isfinite(self.cost[s])].max(initial=0.0) for s, n in times.items()))

    def _kinds(self) -> list[_CopyKind]:
        parts = self.model.layout
        places = self.places
        inside = {scope: number for number, scopes in enumerate(parts.in_block) for scope in scopes}
        entrances = {v for block in parts.blocks for v in block.entrance}
        repeated = {v: block.count for block in parts.blocks for v in block.inside}
        row = {v: block.count for block in parts.blocks for v in (*block.entrance, *block.exit)}
        kinds = []
        for number, group in enumerate(self.groups):
            for position, uses in enumerate(group.kinds):
                border = len(group.kinds) > 1
                between = len(group.kinds) == 3 and position == 1
                times = row[group.variables[0]] - 1 if between else repeated.get(group.variables[0], 1)
                double = tuple(use for use in uses if len(use.scope) == 2)
                ahead = tuple(_ahead(use, inside, entrances, places) for use in double)
                last = border and position == len(group.kinds) - 1
                kinds.append(
                    _CopyKind(
                        group=number,
                        times=times,
                        single=tuple(use for use in uses if len(use.scope) == 1),
                        double=double,
                        sends=tuple(
                            not border or between or len(group.kinds) == 2 or use.scope not in inside for use in double
                        ),
                        ahead=ahead,
                        place=places[group.variables[1 if last else 0]] + (0.25 if between else 0.0),
                    )
                )
        return kinds

    def _total(self, kind: _CopyKind) -> Table:
        total = np.zeros(len(self.model.states[self.groups[kind.group].variables[0]]))
        for use in kind.single:
            total = total + use.times * self.cost[use.scope]
        for use in kind.double:
            total = total + use.times * self.messages[use.scope, use.dim]
        return total

    def _sweep(self, forth: bool) -> None:
        """Each variable takes what its tables can give, and hands it on in equal shares to those ahead."""
        for kind in self.kinds if forth else reversed(self.kinds):
            own = [u for u, sends in zip(kind.double, kind.sends, strict=True) if sends]
            onward = [u for u, s, a in zip(kind.double, kind.sends, kind.ahead, strict=True) if s and a == forth]
            for use in own:
                self.messages[use.scope, use.dim] = self._all_of(use)
            if onward:
                ahead = sum(use.times for use in onward)
                behind = sum(use.times for use in kind.double) - ahead
                share = self._total(kind) / max(ahead, behind)
                for use in onward:
                    self.messages[use.scope, use.dim] = self.messages[use.scope, use.dim] - share

    def _all_of(self, use: Use) -> Table:
        """The message that leaves nothing with a table beyond what its other variable was given."""
        other = self.messages[use.scope, 1 - use.dim]
        table = self.cost[use.scope]
        least: Table = (table - other).min(axis=1) if use.dim == 0 else (table - other[:, None]).min(axis=0)
        return least

    def _bound(self) -> float:
        """The bound that the messages prove."""
        times = dict.fromkeys(self.cost, 1)
        for block, scopes in zip(self.model.layout.blocks, self.model.layout.in_block, strict=True):
            times.update(dict.fromkeys(scopes, block.count))
        total = sum(kind.times * float(self._total(kind).min()) for kind in self.kinds)
        for scope in self.cost:
            if len(scope) == 2:
                total += times[scope] * float(self.left(scope).min())
        return total

    def left(self, scope: Variables) -> Table:
        """What a table of two variables costs after its messages."""
        return self.cost[scope] - self.messages[scope, 0][:, None] - self.messages[scope, 1]

    def tighten(self, stop: Callable[[], bool], sweeps: int = SWEEPS) -> float:
        """Sweep until the bound settles; keeps the best messages and returns their bound."""
        best, kept, waited = self.bound, dict(self.messages), 0
        for number in range(sweeps):
            if stop():
                break
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

    def _floor(self, kind: _CopyKind) -> float:
        """What a variable and its tables add to the bound."""
        floor = float(self._total(kind).min())
        return floor + sum(use.times * float(self.left(use.scope).min()) for use in kind.double)

    def total_of(self, variable: int) -> Table:
        """What a variable's states cost with their messages, where there are no runs."""
        return self._total(self._kind_of[variable])

    def uses_of(self, variable: int) -> tuple[Use, ...]:
        """Tables of a variable and another one, where there are no runs."""
        return self._kind_of[variable].double

    def below(self, threshold: float) -> list[Mask]:
        """States that some plan of at most `threshold` may take, as far as the messages tell."""
        keep = [np.zeros(len(s), dtype=np.bool_) for s in self.model.states]
        slack = threshold + 1e-9 * abs(threshold) - self.bound
        for kind in self.kinds:
            cost = self._total(kind)
            for use in kind.double:
                left = self.left(use.scope)
                cost = cost + use.times * left.min(axis=1 - use.dim)
            lives = cost <= self._floor(kind) + slack
            for v in self.groups[kind.group].variables:
                keep[v] = keep[v] | lives
        return keep


def _ahead(use: Use, inside: dict[Variables, int], entrances: set[int], places: Sequence[float]) -> bool:
    own, other = use.scope[use.dim], use.scope[1 - use.dim]
    if use.scope in inside and own in entrances:
        return True
    return places[other] > places[own]


def _order(model: Model) -> list[float]:
    """Places of the variables on a walk through the graph, breadth first; of a block, its entrance first, exit last."""
    neighbours: list[dict[int, None]] = [{} for _ in model.states]
    for scope in model.time:
        if len(scope) == 2:
            neighbours[scope[0]][scope[1]] = neighbours[scope[1]][scope[0]] = None
    place = [-1.0] * len(neighbours)
    count = 0
    for start in sorted(range(len(neighbours)), key=lambda v: (len(neighbours[v]), v)):
        queue = deque([start] if place[start] < 0 else [])
        while queue:
            v = queue.popleft()
            if place[v] >= 0:
                continue
            place[v] = float(count)
            count += 1
            queue.extend(n for n in neighbours[v] if place[n] < 0)
    for block in model.layout.blocks:
        enter = min((place[v] for v in block.entrance), default=-1.0)
        for v in block.entrance:
            place[v] = enter
        ranked = sorted(block.inside, key=lambda v: place[v])
        for rank, v in enumerate(ranked):
            place[v] = enter + 0.3 + 0.5 * (rank + 1) / (len(ranked) + 1)
        for v in block.exit:
            place[v] = enter + 0.9
        for v in block.shared:
            place[v] = min(place[v], enter - 1.0)
    return place


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
