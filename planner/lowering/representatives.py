"""A shallow network that stands for a deep one: every kind of unit, beside the neighbours it has there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.graph.chain import Boundary, Chain, chain
from planner.graph.folding import run_start, template_name, unfold
from planner.graph.operator_graph import OperatorGraph, Run, TensorRef
from planner.graph.recompute import KeptByGraph
from planner.graph.scaling import at_batch
from planner.lowering.groups import message_groups, trained_names
from planner.lowering.options import keeps_messages, lowering_options, recompute_modes, spread, swaps
from planner.lowering.placed import LoweringOptions, PlacedGraph
from planner.plans.plan import LayerRules, NodeRules, Plan, expanded_rules
from planner.sharding.placement import PARTIAL, Placements
from simulator.errors import StrategyError

Edge = tuple[object, object, object]
"""A layer between two states: what lies before it, its own kind, and what lies behind it."""


class UnalikeError(StrategyError):
    """The units of a shallow network cannot stand for those of the whole."""


@dataclass(frozen=True, kw_only=True)
class Representatives:
    """Few units that stand for all.

    ``names`` are all units in model order, ``chain`` is that of the shallow network, and ``of_unit`` has its unit that
    each of ``names`` is like.
    """

    source: PlacedGraph
    chain: Chain
    names: tuple[str, ...]
    of_unit: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Layers of a run that are kept: ``layers`` are their places in it, ``places`` the kept one that each is like."""

    layers: tuple[int, ...]
    places: tuple[int, ...]


def representatives(plan: Plan, graph: OperatorGraph) -> Representatives:
    """Keep as few layers of every run as show each kind of layer between the same ends.

    Two layers are alike if their strategies and their recomputation are, the tensors at both their ends, and the groups
    that their gradients travel in. Where layers cannot stand for each other, every unit stands for itself.

    Parameters
    ----------
    graph : OperatorGraph
        Folded, at the plan's precision and any batch.
    """
    try:
        return _shortened(plan, graph)
    except UnalikeError:
        return _whole(plan, graph)


def _whole(plan: Plan, graph: OperatorGraph) -> Representatives:
    """Every unit of the network for itself."""
    whole = unfold(at_batch(graph, plan.samples))
    options, rules = spread(whole, expanded_rules(plan), lowering_options(plan, graph))
    found = chain(whole)
    of_unit = tuple(range(len(found.units)))
    return Representatives(
        source=PlacedGraph(whole, rules, options, found), chain=found, names=found.names(), of_unit=of_unit
    )


def _shortened(plan: Plan, graph: OperatorGraph) -> Representatives:
    """Few layers for all; raises UnalikeError where they cannot stand for the others."""
    asked = plan.exchange
    groups = message_groups(asked, list(trained_names(graph))) if asked.fusion_places or asked.fusion_groups else {}
    if asked.layerwise:
        raise UnalikeError(f"{plan.network}: the context says of single layers what is sent")
    deep = _DEEP.once(graph, None, lambda: chain(graph))
    names = deep.names()
    modes, keeping, away = recompute_modes(plan, names), keeps_messages(plan, names), swaps(plan, names)
    treated = {name: (modes.get(name), name in keeping, away.get(name)) for name in (*modes, *away)}
    kinds = _Kinds(plan, graph, deep, treated, groups)
    kept = {run.prefix: kinds.kept(number) for number, run in enumerate(graph.runs)}
    short = replace(plan, layers=kinds.short_layers(kept))
    counts = tuple(len(kept[run.prefix].layers) for run in graph.runs)
    unfolded, found = _SHALLOW.once(graph, counts, lambda: _shallow(graph, counts))
    unfolded = at_batch(unfolded, plan.samples)
    of_unit = _of_unit(deep, kept)
    if max(of_unit) != len(found.units) - 1:
        raise UnalikeError(
            f"{plan.network}: {len(found.units)} units of the shallow network do not stand for those of the whole"
        )
    short_modes = {found.units[of_unit[i]].name: modes[name] for i, name in enumerate(names) if name in modes}
    options: LoweringOptions = replace(
        lowering_options(replace(plan, recompute_ranges=(), offload_ranges=()), graph),
        recompute=short_modes,
        keeps_messages=frozenset(found.units[of_unit[i]].name for i, name in enumerate(names) if name in keeping),
        offload={found.units[of_unit[i]].name: away[name] for i, name in enumerate(names) if name in away},
        groups=kinds.short_groups(kept) if groups else None,
    )
    options, rules = spread(unfolded, expanded_rules(short), options)
    source = PlacedGraph(unfolded, rules, options, found)
    return Representatives(source=source, chain=found, names=names, of_unit=of_unit)


_DEEP: KeptByGraph[None, Chain] = KeptByGraph()
_SHALLOW: KeptByGraph[tuple[int, ...], tuple[OperatorGraph, Chain]] = KeptByGraph()


def _shallow(graph: OperatorGraph, counts: tuple[int, ...]) -> tuple[OperatorGraph, Chain]:
    """The network with so many layers in its runs, unfolded; and its chain, which is the same at any batch."""
    runs = tuple(replace(run, count=count) for run, count in zip(graph.runs, counts, strict=True))
    unfolded = unfold(replace(graph, runs=runs))
    return unfolded, chain(unfolded)


class _Kinds:
    """Kinds of the layers of a plan, and the states between them."""

    def __init__(
        self,
        plan: Plan,
        graph: OperatorGraph,
        deep: Chain,
        treated: Mapping[str, object],
        groups: Mapping[str, int],
    ) -> None:
        self.plan, self.graph, self.deep, self.treated = plan, graph, deep, treated
        self.starts = {run.prefix: run_start(graph, run) for run in graph.runs}
        self.outside: dict[str, int] = {}
        self.inside: dict[str, dict[str, int]] = {}
        heads = [f"{run.prefix}.{self.starts[run.prefix] + n}" for run in graph.runs for n in range(run.count)]
        for name, group in groups.items():
            head = next((head for head in heads if name.startswith(f"{head}.")), "")
            (self.inside.setdefault(head, {}) if head else self.outside)[name[len(head) :]] = group
        self._states: dict[tuple[int, int, int], tuple[Placements, ...]] = {}
        for part in plan.layers:
            self._check(part)

    def _check(self, part: LayerRules) -> None:
        run = next((run for run in self.graph.runs if run.prefix == part.prefix), None)
        if run is None:
            raise StrategyError(
                f"layers: {part.prefix!r} is no run of equal blocks of {self.plan.network}; plan it again"
            )
        start = self.starts[part.prefix]
        if not start <= part.first <= part.last < start + run.count:
            raise StrategyError(
                f"layers: those of {part.prefix!r} reach from {part.first} to {part.last}, but the network has "
                f"{start} to {start + run.count - 1}; plan it again"
            )

    @cached_property
    def _numbers(self) -> tuple[int, ...]:
        """A number for every part of the layers, the same for equal strategies."""
        by_identity: dict[int, int] = {}
        by_value: dict[NodeRules, int] = {}
        known: dict[tuple[object, ...], int] = {}
        found = []
        for part in self.plan.layers:
            key: list[object] = [part.prefix]
            for name in sorted(part.rules):
                rules = part.rules[name]
                if id(rules) not in by_identity:
                    by_identity[id(rules)] = by_value.setdefault(rules, len(by_value))
                key += (name, by_identity[id(rules)])
            found.append(known.setdefault(tuple(key), len(known)))
        return tuple(found)

    def kept(self, number: int) -> _Kept:
        """The layers of a run that are kept: all where its blocks are no units of the chain."""
        run = self.graph.runs[number]
        unit = next((i for i, unit in enumerate(self.deep.units) if unit.run == number), None)
        if unit is None or run.count < 3:
            return _Kept(tuple(range(run.count)), tuple(range(run.count)))
        start = self.starts[run.prefix]
        part_of = {
            n: i for i, p in enumerate(self.plan.layers) if p.prefix == run.prefix for n in range(p.first, p.last + 1)
        }
        parts = [part_of.get(n, -1) for n in range(start, start + run.count)]
        kinds = [
            (
                self._numbers[part] if part >= 0 else -1,
                self.treated.get(f"{run.prefix}.{n}"),
                tuple(self.inside.get(f"{run.prefix}.{n}", {}).items()),
            )
            for n, part in enumerate(parts, start)
        ]
        boundary = self.deep.boundaries[unit]
        states: list[object] = ["begin"]
        for before, behind, one, other in zip(parts, parts[1:], kinds, kinds[1:], strict=False):
            states.append(self._state(number, boundary, before, behind) or (one, other))
        return _cover([*zip(states, kinds, [*states[1:], "end"], strict=True)])

    def _state(self, number: int, boundary: Boundary, before: int, behind: int) -> tuple[Placements, ...]:
        """How the tensors between two layers are written, if that is all that these have to do with each other.

        It is not where others read them as well, and where both layers read one otherwise than it is written: what one
        has moved serves the other. Then nothing is returned.
        """
        ours = -1 if before < 0 else self._numbers[before], -1 if behind < 0 else self._numbers[behind]
        key = (number, *ours)
        if key not in self._states:
            run = self.graph.runs[number]
            tables = [{} if part < 0 else self.plan.layers[part].rules for part in (before, behind)]
            refs = [ref for ref in (boundary.forward, boundary.gradient) if ref is not None]
            found = [self._written(run, ref, tables) for ref in refs]
            self._states[key] = () if None in found else tuple(one for one in found if one is not None)
        return self._states[key]

    def _written(self, run: Run, ref: TensorRef, tables: Sequence[Mapping[str, NodeRules]]) -> Placements | None:
        """Placements in which a tensor is written; None where both layers, or others, move it."""
        first, second = set(run.first), set(run.second)
        movers: set[bool] = set()
        written: Placements | None = None
        for index in (ref.node, *self.graph.consumers.get(ref, ())):
            if index not in first and index not in second:
                return None
            rules = tables[index in second].get(template_name(self.graph.nodes[index].name, run.prefix))
            if rules is None:
                return None
            if written is None:
                written = tuple([rule.outputs[ref.output] for rule in rules])
                continue
            for place, used in enumerate(self.graph.nodes[index].tensor_inputs):
                if used == ref and tuple([rule.inputs[place] for rule in rules]) != written:
                    movers.add(index in second)
        assert written is not None  # the tensor's own node comes first
        return None if len(movers) > 1 or (movers and PARTIAL in written) else written

    def short_layers(self, kept: Mapping[str, _Kept]) -> tuple[LayerRules, ...]:
        """Strategies of the shallow network."""
        found = []
        for run in self.graph.runs:
            start = self.starts[run.prefix]
            parts = [part for part in self.plan.layers if part.prefix == run.prefix]
            for place, layer in enumerate(kept[run.prefix].layers):
                part = next((p for p in parts if p.first <= start + layer <= p.last), None)
                if part is not None:
                    found.append(replace(part, first=start + place, last=start + place))
        return tuple(found)

    def short_groups(self, kept: Mapping[str, _Kept]) -> dict[str, int]:
        """Groups of gradients by the names that parameters have in the shallow network."""
        found = dict(self.outside)
        for prefix, start in self.starts.items():
            for place, layer in enumerate(kept[prefix].layers):
                own = self.inside.get(f"{prefix}.{start + layer}", {})
                found |= {f"{prefix}.{start + place}{rest}": group for rest, group in own.items()}
        return found


def _cover(edges: Sequence[Edge]) -> _Kept:
    """A short walk through all kinds of edges, from the first edge to the last.

    The walk along all edges is followed; a detour that leads back to where it began and shows nothing that the rest of
    the walk so far does not show is taken out.

    >>> _cover([(0, "a", 1), (1, "b", 1), (1, "b", 1), (1, "c", 1), (1, "b", 1), (1, "a", 2)])
    _Kept(layers=(0, 1, 3, 5), places=(0, 1, 1, 2, 1, 3))
    """
    walk: list[int] = []
    shown: Counter[Edge] = Counter()
    for number, edge in enumerate(edges):
        walk.append(number)
        shown[edge] += 1
        detour: Counter[Edge] = Counter()
        begin = len(walk)
        for place in range(len(walk) - 1, 0, -1):
            at = edges[walk[place]]
            detour[at] += 1
            if shown[at] == detour[at]:
                break
            if edges[walk[place - 1]][2] == edge[2]:
                begin = place
        shown.subtract(edges[i] for i in walk[begin:])
        del walk[begin:]
    first: dict[Edge, int] = {}
    for place, number in enumerate(walk):
        first.setdefault(edges[number], place)
    return _Kept(tuple(walk), tuple(first[edge] for edge in edges))


def _of_unit(deep: Chain, kept: Mapping[str, _Kept]) -> tuple[int, ...]:
    """The unit of the shallow chain that each unit in model order is like."""
    found: list[int] = []
    base = 0
    done: dict[int, int] = {}
    for unit in deep.units:
        if unit.run is None:
            found += [base] * unit.count
            base += 1
            continue
        run = kept[deep.heads[unit.run][0]]
        begin = done.get(unit.run, 0)
        found += [base + place for place in run.places[begin : begin + unit.count]]
        done[unit.run] = begin + unit.count
        if done[unit.run] == len(run.places):
            base += len(run.layers)
    return tuple(found)
