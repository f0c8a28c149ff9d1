"""Deep networks from shallow ones: peak memory grows evenly with every further equal layer.

Step time does so but for what is left of the last fused message after the backward pass, which depends on
how layers fill messages: it is simulated on the whole network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph
from planner.strategy.plan import LayerRules, Plan

SHORT = 4
LONG = 8
WORTHWHILE = 24
"""Up to so many layers the whole network is lowered as fast as its shallow versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shallow:
    """A graph and a plan with fewer layers.

    ``steps`` says how many times ``LONG − SHORT`` layers the whole network has more of the range that
    this one has cut to `SHORT`; 0 where every long range is cut to `LONG`.
    """

    graph: OperatorGraph
    plan: Plan
    steps: float = 0.0


def shallow_versions(graph: OperatorGraph, plan: Plan) -> tuple[Shallow, ...]:
    """Cut every range of more than `WORTHWHILE` layers with equal strategies to `LONG` layers.

    The first version is that; in each further one a single range is cut to `SHORT`. Empty where the
    network is not deep enough to gain from it.
    """
    deep = [i for i, part in enumerate(plan.layers) if _layers(part) > WORTHWHILE]
    if not deep:
        return ()
    lengths = dict.fromkeys(deep, LONG)
    versions = [_cut(graph, plan, lengths)]
    for i in deep:
        steps = (_layers(plan.layers[i]) - LONG) / (LONG - SHORT)
        versions.append(replace(_cut(graph, plan, {**lengths, i: SHORT}), steps=steps))
    return tuple(versions)


def _layers(part: LayerRules) -> int:
    return part.last - part.first + 1


def _cut(graph: OperatorGraph, plan: Plan, lengths: Mapping[int, int]) -> Shallow:
    layers: list[LayerRules] = []
    dropped: dict[str, int] = {}
    for i, part in enumerate(plan.layers):
        before = dropped.get(part.prefix, 0)
        drop = _layers(part) - lengths.get(i, _layers(part))
        layers.append(replace(part, first=part.first - before, last=part.last - before - drop))
        dropped[part.prefix] = before + drop
    runs = tuple(replace(run, count=run.count - dropped.get(run.prefix, 0)) for run in graph.runs)
    return Shallow(graph=replace(graph, runs=runs), plan=replace(plan, layers=tuple(layers)))
