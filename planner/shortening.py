"""Deep networks predicted from shallow ones: a step grows evenly with every further equal layer.

Computation, updates and memory do so exactly. What is left of the last fused message after the backward
pass depends on how layers fill it: where a layer is smaller than a message, the step time is out by some
thousandths.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph
from planner.prediction import Prediction
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


def extrapolated(base: Prediction, others: Iterable[tuple[Prediction, float]], flops_ratio: float) -> Prediction:
    """Add to `base`, for each other prediction, its distance from `base` a number of times.

    ``flops_ratio`` is the whole network's work over that of `base`.
    """
    versions = list(others)

    def line(value: float, values: Iterable[float]) -> float:
        return value + sum(steps * (value - other) for other, (_, steps) in zip(values, versions, strict=True))

    def lines(name: str) -> dict[str, float]:
        tables = [getattr(p, name) for p, _ in versions]
        return {
            key: max(0.0, line(value, (t.get(key, 0.0) for t in tables))) for key, value in getattr(base, name).items()
        }

    seconds = line(base.step_time_s, (p.step_time_s for p, _ in versions))
    ratio = seconds / base.step_time_s
    return replace(
        base,
        step_time_s=seconds,
        interval_s=(base.interval_s[0] * ratio, base.interval_s[1] * ratio),
        samples_per_s=base.samples_per_s / ratio,
        tokens_per_s=None if base.tokens_per_s is None else base.tokens_per_s / ratio,
        mfu=base.mfu * flops_ratio / ratio,
        peak_memory_bytes=round(line(base.peak_memory_bytes, (p.peak_memory_bytes for p, _ in versions))),
        memory_at_peak={kind: round(size) for kind, size in lines("memory_at_peak").items()},
        breakdown=lines("breakdown"),
    )
