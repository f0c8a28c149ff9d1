"""What is chosen once the best plan is known: the size of gradient messages, and which parameters stay whole.

Both are tried by simulation, for the best plan alone: they change little, and the configurations come with sizes that
`planner.search.configurations.buckets` chose by formula.
"""

from __future__ import annotations

from dataclasses import replace

from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph
from planner.planning.configured import Configured, Scored
from planner.planning.one_stage import Candidate
from planner.planning.prediction import predict_plan
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.search.configurations.buckets import BUCKETS

WORTH = 2e-3
"""Part of the step that must be exposed communication for either to be tried."""
THRESHOLDS = (2**16, 2**20)
"""Bytes below which parameters stay whole."""


def refined(search: Configured, pins: Pins, best: Candidate, source: Scored | None) -> Candidate:
    """Try other sizes of messages and thresholds; `source` is the configuration that the plan comes from, if any."""
    exposed = best.prediction.breakdown.get("exposed_communication_s", 0.0)
    if exposed < WORTH * best.prediction.step_time_s or best.plan.degree("data") == 1:
        return best
    found = best
    if pins.bucket_mb is None and (best.plan.optimizer_sharding != "zero3" or best.plan.shard_size):
        found = _other_buckets(search, found)
    if pins.sharding_threshold_kb is None and source is not None and best.plan.optimizer_sharding != "none":
        most = largest_threshold(search.graph, best.plan.degree("tensor") * best.plan.degree("expert"))
        lost: Plan | None = None
        for threshold in (size for size in THRESHOLDS if size <= most):
            plan = _with_threshold(search, source, found.plan, threshold)
            # Where no parameter lies between two thresholds, both leave the same ones whole.
            if lost is None or not _alike(plan, lost):
                tried = _better(search, found, plan)
                lost = plan if tried is found else None
                found = tried
    return found


def _other_buckets(search: Configured, found: Candidate) -> Candidate:
    """Larger messages as long as they help, and where they do not, smaller ones."""
    sizes, gradients = sorted(BUCKETS), gradient_bytes(search.graph, found.plan.exchange.gradient_dtype)
    here = min(range(len(sizes)), key=lambda n: abs(sizes[n] - found.plan.bucket_bytes))
    for ahead in (sizes[here + 1 :], sizes[:here][::-1]):
        started = found
        for size in ahead:
            before = found
            if gradients < min(size, before.plan.bucket_bytes):
                break  # all of them travel at once in both
            found = _better(search, found, replace(before.plan, bucket_bytes=size))
            if found is before:
                break
        if found is not started:
            break
    return found


def gradient_bytes(graph: OperatorGraph, dtype: str) -> int:
    """Bytes of the gradients of all parameters together, summed in `dtype` unless that is empty."""
    specs = [
        (graph.multiplicity[p.node], graph.nodes[p.node].outputs[0]) for p in graph.parameters if p.gradient is not None
    ]
    return sum(
        times * spec.elements * max(DTYPE_BYTES[spec.dtype], DTYPE_BYTES[dtype or spec.dtype]) for times, spec in specs
    )


def _with_threshold(search: Configured, source: Scored, plan: Plan, threshold_bytes: int) -> Plan:
    made = search.plan(source.placed, plan.certificate, threshold_bytes=threshold_bytes)
    return replace(made, bucket_bytes=plan.bucket_bytes)


def _better(search: Configured, found: Candidate, plan: Plan) -> Candidate:
    """The faster of two plans, the one before where they are equal; the closed form's account is that of the latter."""
    if _alike(plan, found.plan):
        return found
    prediction = predict_plan(plan, search.graph, search.runs_on(plan.expert_overlap))
    if not prediction.fits or prediction.step_time_s >= found.prediction.step_time_s * (1 - 1e-6):
        return found
    return replace(found, plan=plan, prediction=replace(prediction, analytic=found.prediction.analytic))


def _alike(one: Plan, other: Plan) -> bool:
    """Whether two plans that differ in messages and thresholds alone do the same."""
    return (one.rules, one.layers, one.bucket_bytes) == (other.rules, other.layers, other.bucket_bytes)


def largest_threshold(graph: OperatorGraph, parts: int) -> int:
    """The largest threshold with which more than half of the network is sharded, each parameter in `parts` before."""
    sizes = [(graph.nodes[p.node].outputs[0].size_bytes, graph.multiplicity[p.node]) for p in graph.parameters]
    total = sum(size * times for size, times in sizes)
    enough = (size for size, _ in sizes if 2 * sum(other * times for other, times in sizes if other >= size) > total)
    return max(enough, default=0) // parts


def threshold_cost_s(search: Configured, scored: Scored) -> float:
    """Seconds of a simulated step that a pinned threshold costs."""
    plan = search.plan(scored.placed, scored.plan.certificate, threshold_bytes=0)
    free = replace(plan, bucket_bytes=scored.plan.bucket_bytes)
    free_s = predict_plan(free, search.graph, search.runs_on(plan.expert_overlap)).step_time_s
    return max(0.0, scored.prediction.step_time_s - free_s)
