"""Search by propagation: strategies spread from configured operators to all others.

Hints (`planner.search.problem.hints`) fix what they say of an operator; the inputs of the network are seeds too (on
the data axis the batch, so that without hints everything follows the batch). From the seeds waves go along the graph,
forward and backward alike; an operator takes what costs least beside the neighbours the wave has reached, and what
those not reached yet could answer: seconds of redistribution, and of its own work, which it has to divide well where
redistribution leaves the choice. Then later waves revise what the first decided with fewer neighbours in view, and
never make the sum worse. What no wave reaches takes the strategy of least cost; nothing is replicated because it is
far away.

Hints may differ between layers: layers of a run with equal hints are decided as one. Of hints that contradict each
other the one with the more specific pattern holds; of equally specific ones the cheaper. Every such decision, and
every tied parameter whose uses disagree, is reported with what it costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import TensorRef
from planner.plans.hints import Hint
from planner.search import dynamic_programming
from planner.search.exact.blocks import TooWideError
from planner.search.problem.hints import Target, Targets, constrained, mask_of, targets
from planner.search.problem.layered_tables import LayeredTables
from planner.search.problem.problem import Problem, Solution, choices_of
from planner.search.problem.variables import Kind
from planner.search.sequential import Descent, by_distance, by_weight, within_limit
from planner.sharding.placement import placement_name
from simulator.errors import InputError, UnsupportedError

COSTED_CONFLICTS = 4
"""For so many pairs of contradicting hints the plan is searched both ways."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagation:
    """What propagation found: a plan, None where none fits, and what there is to say about the hints."""

    solution: Solution | None
    messages: tuple[str, ...]


def propagate(problem: Problem, memory_limit_bytes: float, hints: Sequence[Hint] = ()) -> Propagation:
    """Spread the strategies of hinted operators over the problem, under a memory limit.

    Raises
    ------
    InputError
        For hints that match nothing, that an operator cannot take, or that no plan can keep all together.
    """
    wanted = targets(problem.parts, hints) if hints else {}
    tables = LayeredTables(problem, _starts(problem, wanted))
    waves = _Waves(tables, hints, wanted, memory_limit_bytes)
    ranks = sorted(range(len(hints)), key=lambda h: (hints[h].vagueness, h))
    chosen = waves.under(ranks)
    messages = []
    for winner, loser in chosen.conflicts[:COSTED_CONFLICTS]:
        other = waves.under(_swapped(ranks, winner, loser))
        equal = hints[winner].vagueness == hints[loser].vagueness
        if equal and other.seconds < chosen.seconds:
            messages.append(_said(waves, other, (loser, winner), chosen.seconds))
            chosen, ranks = other, _swapped(ranks, winner, loser)
        else:
            messages.append(_said(waves, chosen, (winner, loser), other.seconds))
    messages += [_said(waves, chosen, pair, None) for pair in chosen.conflicts[COSTED_CONFLICTS:]]
    if chosen.solution is not None:
        messages += _tied(tables, tables.states_of(chosen.solution))
    return Propagation(solution=chosen.solution, messages=tuple(messages))


def _starts(problem: Problem, wanted: Targets) -> list[set[int]]:
    """Layers of each run at which the hints become others than those of the layer before."""
    starts = []
    for run in problem.graph.runs:
        inside = set(run.second)
        found: set[int] = set()
        for variable, layers in wanted.items():
            nodes = problem.decisions.variables[variable].nodes
            if nodes and nodes[0] in inside:
                said = [layers.get(layer, ()) for layer in range(1, run.count)]
                found.update(n for n, (a, b) in enumerate(pairwise(said), 2) if a != b)
        starts.append(found)
    return starts


def _swapped(ranks: Sequence[int], one: int, other: int) -> list[int]:
    exchange = {one: other, other: one}
    return [exchange.get(r, r) for r in ranks]


@dataclass(frozen=True, slots=True)
class _Spread:
    """A plan under one ranking of the hints, with the pairs (winner, loser) that contradicted each other, and where."""

    solution: Solution | None
    conflicts: tuple[tuple[int, int], ...]
    places: Mapping[tuple[int, int], tuple[int, ...]]

    @property
    def seconds(self) -> float:
        return np.inf if self.solution is None else self.solution.objective_s


class _Waves:
    """Propagation of one problem's hints, under any ranking of them."""

    def __init__(self, tables: LayeredTables, hints: Sequence[Hint], wanted: Targets, limit: float) -> None:
        self.tables = tables
        self.hints = hints
        self.limit = limit
        self.hinted: dict[int, tuple[Target, ...]] = {}
        for number, instance in enumerate(tables.instances):
            found = wanted.get(instance.variable, {}).get(instance.first)
            if found:
                self.hinted[number] = found
        self.weights, self.waves = by_weight(tables), by_distance(tables, self.hinted)
        self._masks: dict[tuple[int, Target], Mask] = {}

    def mask(self, instance: int, target: Target) -> Mask:
        variable = self.tables.instances[instance].variable
        key = (variable, target)
        if key not in self._masks:
            self._masks[key] = mask_of(self.tables.problem.parts, variable, target, self.hints[target.hint])
        return self._masks[key]

    def under(self, ranks: Sequence[int]) -> _Spread:
        """Spread the hints; of two that contradict each other the one that comes first in `ranks` holds."""
        rank = {h: n for n, h in enumerate(ranks)}
        allowed, places = self._resolved(rank)
        self._unlinked(rank, allowed, places)

        def at_price(price: float, start: Sequence[int] | None) -> list[int]:
            descent = Descent(self.tables, price, allowed)
            return self._spread(descent) if start is None else descent.settle(start, self.weights, 1)

        solution = within_limit(self.tables, self.limit, at_price, partial(self._least, allowed))
        return _Spread(solution, tuple(places), {pair: tuple(where) for pair, where in places.items()})

    def _spread(self, descent: Descent) -> list[int]:
        return descent.search(self.weights, self.waves, list(self.hinted))

    def _resolved(self, rank: Mapping[int, int]) -> tuple[dict[int, Mask], dict[tuple[int, int], list[int]]]:
        """States that the hints leave to each instance, and where hints contradict each other at one operator."""
        allowed: dict[int, Mask] = {}
        places: dict[tuple[int, int], list[int]] = {}
        for instance, found in self.hinted.items():
            held: list[Target] = []
            mask = np.ones(self.tables.size(instance), dtype=np.bool_)
            for target in sorted(found, key=lambda t: rank[t.hint]):
                both = mask & self.mask(instance, target)
                if both.any():
                    mask = both
                    held.append(target)
                    continue
                own = self.mask(instance, target)
                against = next((h for h in held if not (self.mask(instance, h) & own).any()), held[0])
                places.setdefault((against.hint, target.hint), []).append(instance)
            allowed[instance] = mask
        return allowed, places

    def _unlinked(
        self, rank: Mapping[int, int], allowed: dict[int, Mask], places: dict[tuple[int, int], list[int]]
    ) -> None:
        """Free hinted neighbours between which no redistribution leads, the lower in rank first."""

        def best(instance: int) -> int:
            return min((t.hint for t in self.hinted[instance]), key=lambda h: rank[h])

        for pair, cost in self.tables.pairs.items():
            if not (pair[0] in allowed and pair[1] in allowed):
                continue
            if np.isfinite(cost.time[np.ix_(allowed[pair[0]], allowed[pair[1]])]).any():
                continue
            winner, loser = sorted(pair, key=lambda i: rank[best(i)])
            places.setdefault((best(winner), best(loser)), []).append(loser)
            del allowed[loser]

    def _least(self, allowed: Mapping[int, Mask]) -> Solution:
        """The plan of least memory under the hints: exact where they do not tell layers apart."""
        problem = self.tables.problem
        try:
            least = dynamic_programming.smallest(constrained(problem, self.hints) if self.hints else problem)
        except (UnsupportedError, InputError, TooWideError):
            price = 1e3 * (1.0 + float(self.tables.weights().sum()))
            least = self.tables.solution(self._spread(Descent(self.tables, price, allowed)))
        if not np.isfinite(least.objective_s):
            asked = ", ".join(str(h) for h in self.hints)
            raise InputError(f"no plan keeps all hints together: {asked}; leave one of them out")
        return least


# Messages


def _said(waves: _Waves, spread: _Spread, pair: tuple[int, int], other_seconds: float | None) -> str:
    winner, loser = (waves.hints[h] for h in pair)
    where = spread.places.get(pair, ())
    tables = waves.tables
    names = [_name(tables, i) for i in where]
    text = f"hints {winner} and {loser} contradict each other at {_listed(names)}: the first holds"
    if other_seconds is None or spread.solution is None:
        return text
    if not np.isfinite(other_seconds):
        return f"{text}; with the other no plan fits"
    more = other_seconds - spread.solution.objective_s
    return f"{text}; with the other a step would take {abs(more) * 1e3:.3g} ms {'more' if more >= 0 else 'less'}"


def _name(tables: LayeredTables, instance: int) -> str:
    """Name of the operator an instance stands for, with its layers."""
    item = tables.instances[instance]
    states = tables.problem.states[item.variable]
    node = tables.problem.graph.nodes[states.variable.nodes[0]]
    if item.run < 0:
        return repr(node.name)
    layers = f"layer {item.first}" if item.first == item.last else f"layers {item.first} to {item.last}"
    return f"{node.name!r} ({layers})"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _tied(tables: LayeredTables, states: Sequence[int]) -> list[str]:
    """A message for each tied parameter whose uses read it in different placements."""
    problem = tables.problem
    instance_of = {item.variable: i for i, item in enumerate(tables.instances)}
    messages = []
    for parameter in problem.graph.parameters:
        if not parameter.aliases:
            continue
        owner = problem.decisions.of_node[parameter.node]
        uses = _uses(problem, parameter.node)
        for axis_number, axis in enumerate(problem.setting.costs.mesh.axes):
            read = {}
            for tensor, user in uses:
                choice = choices_of(problem, user, states[instance_of[user]])[axis_number]
                read[_name(tables, instance_of[user])] = choice.reads[tensor]
            if len(set(read.values())) < 2:
                continue
            held = choices_of(problem, owner, states[instance_of[owner]])[axis_number].rules[0].outputs[0]
            around = _seconds_around(tables, states, owner, [user for _, user in uses])
            told = ", ".join(f"{placement_name(p)} by {name}" for name, p in read.items())
            messages.append(
                f"tied parameter {parameter.name!r} (also {', '.join(parameter.aliases)}) is stored "
                f"{placement_name(held)} along {axis.name} and read {told}: {around * 1e3:.3g} ms of redistribution "
                "a step"
            )
    return messages


def _uses(problem: Problem, parameter: int) -> list[tuple[TensorRef, int]]:
    """Variables that read a parameter to compute with it."""
    ref = TensorRef(parameter)
    kinds = problem.decisions.variables
    ends = (edge.target for edge in problem.decisions.edges if edge.tensor == ref)
    return [(ref, target) for target in dict.fromkeys(ends) if kinds[target].kind is Kind.OPERATOR]


def _seconds_around(tables: LayeredTables, states: Sequence[int], owner: int, users: Sequence[int]) -> float:
    """Seconds of what is moved between a parameter, its station and its users in one step."""
    decisions = tables.problem.decisions
    stations = {v for v, item in enumerate(decisions.variables) if item.kind is Kind.STATION}
    around = {owner, *users}
    around |= {e.target for e in decisions.edges if e.source == owner and e.target in stations}
    members = [i for i, item in enumerate(tables.instances) if item.variable in around]
    return sum(
        float(tables.pairs[i, j].time[states[i], states[j]])
        for i, j in combinations(members, 2)
        if (i, j) in tables.pairs
    )
