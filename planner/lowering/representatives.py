"""A shallow network that stands for a deep one: every kind of unit, beside the neighbours it has there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from planner.graph.chain import Chain, chain
from planner.graph.folding import run_start, unfold
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch
from planner.lowering.options import lowering_options, recompute_modes
from planner.lowering.placed import LoweringOptions, PlacedGraph
from planner.lowering.program import spread
from planner.strategy.plan import LayerRules, Plan, expanded_rules
from simulator.errors import StrategyError

KEPT = 3
"""Of a row of equal layers: the first, which another precedes, one in the middle, and the last."""


@dataclass(frozen=True, kw_only=True)
class Representatives:
    """Few units that stand for all.

    ``names`` are all units in model order, ``of_unit`` the unit of ``chain``, the shallow network's, that each is like.
    """

    source: PlacedGraph
    chain: Chain
    names: tuple[str, ...]
    of_unit: tuple[int, ...]


def representatives(plan: Plan, graph: OperatorGraph) -> Representatives:
    """Cut every row of layers with equal strategies and recomputation to at most `KEPT`.

    Parameters
    ----------
    graph : OperatorGraph
        Folded, at the plan's precision and any batch.
    """
    deep = chain(graph)
    names = deep.names()
    modes = recompute_modes(plan, names)
    kept = {run.prefix: _kept(plan, run.prefix, run_start(graph, run), run.count, modes) for run in graph.runs}
    whole = {deep.heads[unit.run][0] for unit in deep.units if unit.run is not None}
    kept = {prefix: numbers if prefix in whole else list(range(len(numbers))) for prefix, numbers in kept.items()}
    short_graph = replace(
        at_batch(graph, plan.micro_batch * plan.degree("data")),
        runs=tuple(replace(run, count=max(kept[run.prefix]) + 1) for run in graph.runs),
    )
    short = replace(plan, layers=_short_layers(plan, graph, kept))
    unfolded = unfold(short_graph)
    found = chain(unfolded)
    of_unit = _of_unit(deep, kept)
    if max(of_unit) != len(found.units) - 1:
        raise StrategyError(
            f"{plan.network}: {len(found.units)} units of the shallow network do not stand for those of the whole; "
            "plan it on one stage"
        )
    short_modes = {found.units[of_unit[i]].name: modes[name] for i, name in enumerate(names) if name in modes}
    options: LoweringOptions = replace(
        lowering_options(replace(plan, recompute_ranges=()), graph), recompute=short_modes
    )
    options, rules = spread(unfolded, expanded_rules(short), options)
    return Representatives(
        source=PlacedGraph(unfolded, rules, options, found), chain=found, names=names, of_unit=of_unit
    )


def _kept(plan: Plan, prefix: str, start: int, count: int, modes: Mapping[str, str]) -> list[int]:
    """Number in the shallow run of each layer of a run."""
    part_of = {n: i for i, p in enumerate(plan.layers) if p.prefix == prefix for n in range(p.first, p.last + 1)}
    kinds = [(part_of.get(n), modes.get(f"{prefix}.{n}", "none")) for n in range(start, start + count)]
    numbers: list[int] = []
    for _, group in groupby(kinds):
        length, base = len(list(group)), numbers[-1] + 1 if numbers else 0
        short = min(length, KEPT)
        numbers += [base + (i if i < short - 1 else short - 1 if i == length - 1 else short - 2) for i in range(length)]
    return numbers


def _short_layers(plan: Plan, graph: OperatorGraph, kept: Mapping[str, list[int]]) -> tuple[LayerRules, ...]:
    """Ranges of layers of the shallow network."""
    starts = {run.prefix: run_start(graph, run) for run in graph.runs}
    found = []
    for part in plan.layers:
        if part.prefix not in starts:
            raise StrategyError(f"layers: {part.prefix!r} is no run of equal blocks of {plan.network}; plan it again")
        start, numbers = starts[part.prefix], kept[part.prefix]
        if not start <= part.first <= part.last < start + len(numbers):
            raise StrategyError(
                f"layers: those of {part.prefix!r} reach from {part.first} to {part.last}, but the network has "
                f"{start} to {start + len(numbers) - 1}; plan it again"
            )
        found.append(replace(part, first=start + numbers[part.first - start], last=start + numbers[part.last - start]))
    return tuple(found)


def _of_unit(deep: Chain, kept: Mapping[str, list[int]]) -> tuple[int, ...]:
    found: list[int] = []
    base = 0
    layer: dict[int, int] = {}
    for unit in deep.units:
        if unit.run is None:
            found += [base] * unit.count
            base += 1
            continue
        numbers = kept[deep.heads[unit.run][0]]
        done = layer.get(unit.run, 0)
        first = numbers[done]
        found += [base + numbers[done + i] - first for i in range(unit.count)]
        layer[unit.run] = done + unit.count
        base = found[-1] + 1
    return tuple(found)
