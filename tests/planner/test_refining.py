"""What is tried once the best plan is known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.planning import refining
from planner.planning.one_stage import Candidate
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import Prediction, predict_plan
from planner.planning.setting import setting_of
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from planner.search.configurations.buckets import MIB
from simulator.hardware import Hardware

REQUEST = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=2, pins=Pins(dp=2, pp=1))


@cache
def planned() -> Candidate:
    return plan_network(replace(REQUEST, top=1)).candidates[0]


@pytest.mark.parametrize(("size", "tried"), [(MIB, [5 * MIB]), (5 * MIB, [MIB]), (25 * MIB, [])])
def test_messages_larger_than_all_gradients_are_not_tried(
    size: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    search, best = setting_of(REQUEST).search, planned()
    plans = {mib: replace(best.plan, bucket_bytes=mib * MIB) for mib in (1, 5, 25)}
    times = {mib: predict_plan(plan, search.graph, search.hardware).step_time_s for mib, plan in plans.items()}
    gradients = refining.gradient_bytes(search.graph, best.plan.exchange.gradient_dtype)
    assert MIB < gradients < 5 * MIB
    assert times[5] == times[25] != times[1]
    asked: list[int] = []

    def predicted(plan: Plan, graph: OperatorGraph, hardware: Hardware) -> Prediction:
        asked.append(plan.bucket_bytes)
        return predict_plan(plan, graph, hardware)

    monkeypatch.setattr(refining, "predict_plan", predicted)
    plan = plans[size // MIB]
    candidate = replace(best, plan=plan, prediction=predict_plan(plan, search.graph, search.hardware))
    refining._other_buckets(search, candidate)
    assert asked == tried
