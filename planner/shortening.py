"""Deep networks predicted from shallow ones: a step grows evenly with every further equal layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph
from planner.prediction import Prediction
from planner.strategy.plan import LayerRules, Plan

SHORT = 4
LONG = 8
WORTHWHILE = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A graph and a plan with fewer layers, and how many were left out of the longer of two such pairs."""

    graph: OperatorGraph
    plan: Plan


def shortened(graph: OperatorGraph, plan: Plan) -> tuple[Shortened, Shortened, float] | None:
    """Cut the longest range of equal layers with equal strategies to `SHORT` and to `LONG` layers.

    Returns the two and how many steps of ``LONG − SHORT`` layers lie between the longer one and the
    whole; None where the network is not deep enough to gain from it.
    """
    longest = max(plan.layers, key=lambda part: part.last - part.first, default=None)
    if longest is None or longest.last - longest.first + 1 <= WORTHWHILE:
        return None
    count = longest.last - longest.first + 1
    short, long = (_cut(graph, plan, longest, count - keep) for keep in (SHORT, LONG))
    return short, long, (count - LONG) / (LONG - SHORT)


def _cut(graph: OperatorGraph, plan: Plan, longest: LayerRules, drop: int) -> Shortened:
    layers = []
    for part in plan.layers:
        if part.prefix == longest.prefix and part.first == longest.first:
            layers.append(replace(part, last=part.last - drop))
        elif part.prefix == longest.prefix and part.first > longest.first:
            layers.append(replace(part, first=part.first - drop, last=part.last - drop))
        else:
            layers.append(part)
    runs = tuple(
        replace(run, count=run.count - drop) if run.prefix == longest.prefix else run for run in graph.runs
    )
    return Shortened(graph=replace(graph, runs=runs), plan=replace(plan, layers=tuple(layers)))


def extrapolated(short: Prediction, long: Prediction, steps: float, flops_ratio: float) -> Prediction:
    """Continue the line through two predictions `steps` times the distance between them.

    ``flops_ratio`` is the whole network's work over the longer one's.
    """

    def line(one: float, other: float) -> float:
        return other + steps * (other - one)

    def lines(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {key: max(0.0, line(one.get(key, 0.0), value)) for key, value in other.items()}

    seconds = line(short.step_time_s, long.step_time_s)
    ratio = seconds / long.step_time_s
    return replace(
        long,
        step_time_s=seconds,
        interval_s=(long.interval_s[0] * ratio, long.interval_s[1] * ratio),
        samples_per_s=long.samples_per_s / ratio,
        tokens_per_s=None if long.tokens_per_s is None else long.tokens_per_s / ratio,
        mfu=long.mfu * flops_ratio / ratio,
        peak_memory_bytes=round(line(short.peak_memory_bytes, long.peak_memory_bytes)),
        memory_at_peak={k: round(v) for k, v in lines(short.memory_at_peak, long.memory_at_peak).items()},
        breakdown=lines(short.breakdown, long.breakdown),
    )
