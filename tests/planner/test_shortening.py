"""Predictions of deep networks from shallow ones equal those of the whole network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.planning import PlanRequest, lower, plan_network, predict, quick_prediction
from planner.prediction import Prediction
from planner.shortening import LONG, SHORT, WORTHWHILE, extrapolated, shallow_versions
from planner.strategy.plan import Plan
from simulator.hardware import load_profile
from tests.planner.search.problems import captured

DEPTH = 32
SMALL_BUCKET = 1
"""A message that every tensor fills: every layer sends the same messages."""


@cache
def plans(hardware: str, devices: int, pins: tuple[tuple[str, str], ...], depth: int = DEPTH) -> tuple[Plan, ...]:
    request = PlanRequest(network="zoo:gpt2-tiny", hardware=hardware, devices=devices, global_batch=32, pins=dict(pins))
    return tuple(c.plan for c in plan_network(request, graph=captured("gpt2-tiny", depth)).candidates)


def both(plan: Plan, hardware: str, depth: int = DEPTH) -> tuple[Prediction, Prediction]:
    graph, profile = captured("gpt2-tiny", depth), load_profile(hardware)
    return quick_prediction(plan, graph, profile), predict(plan, lower(plan, graph), profile)[0]


CASES: tuple[tuple[str, int, Mapping[str, str]], ...] = (
    ("dgx-a100", 4, {}),
    ("dgx-h100", 8, {"dp": "2", "tp": "4"}),
    ("dgx-a100", 4, {"optimizer_sharding": "zero2", "dp": "4"}),
    ("ascend910-atlas800", 8, {"micro_batch": "2"}),
)


@pytest.mark.parametrize(("hardware", "devices", "pins"), CASES)
def test_the_extrapolated_prediction_equals_that_of_the_whole_network(
    hardware: str, devices: int, pins: Mapping[str, str]
) -> None:
    for plan in plans(hardware, devices, tuple(pins.items()))[:2]:
        plan = replace(plan, bucket_bytes=SMALL_BUCKET)
        assert shallow_versions(captured("gpt2-tiny", DEPTH), plan)
        quick, whole = both(plan, hardware)
        assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=1e-3)
        assert quick.interval_s == pytest.approx(whole.interval_s, rel=1e-3)
        assert quick.samples_per_s == pytest.approx(whole.samples_per_s, rel=1e-3)
        assert quick.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-3)
        assert quick.mfu == pytest.approx(whole.mfu, rel=1e-3)
        check_what_grows_evenly(quick, whole)


@pytest.mark.parametrize(("hardware", "devices", "pins"), CASES)
def test_layers_that_share_a_message_leave_the_step_time_out_by_less_than_a_hundredth(
    hardware: str, devices: int, pins: Mapping[str, str]
) -> None:
    for plan in plans(hardware, devices, tuple(pins.items()))[:2]:
        quick, whole = both(plan, hardware)
        assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=1e-2)
        check_what_grows_evenly(quick, whole)


def check_what_grows_evenly(quick: Prediction, whole: Prediction) -> None:
    for part in ("compute_s", "optimizer_s"):
        assert quick.breakdown[part] == pytest.approx(whole.breakdown[part], rel=1e-9)
    assert sum(quick.breakdown.values()) == pytest.approx(quick.step_time_s, rel=1e-9)
    assert quick.peak_memory_bytes == pytest.approx(whole.peak_memory_bytes, rel=1e-3)
    assert sum(quick.memory_at_peak.values()) == pytest.approx(quick.peak_memory_bytes, abs=16)


def test_a_network_that_is_not_deep_is_predicted_whole() -> None:
    plan = plans("dgx-a100", 4, (), WORTHWHILE)[0]
    assert shallow_versions(captured("gpt2-tiny", WORTHWHILE), plan) == ()
    quick, whole = both(plan, "dgx-a100", WORTHWHILE)
    assert quick == whole


def in_ranges(plan: Plan, *ends: int) -> Plan:
    """The plan with its layers in ranges that end at `ends`, all with the strategies of the first."""
    starts = [0, *(end + 1 for end in ends)]
    (part, *_) = plan.layers
    return replace(plan, layers=tuple(replace(part, first=a, last=b) for a, b in zip(starts[:-1], ends, strict=True)))


def test_every_deep_range_is_cut_in_turn() -> None:
    graph = captured("gpt2-tiny", 80)
    plan = in_ranges(plans("dgx-a100", 4, ())[0], 29, 39, 79)
    versions = shallow_versions(graph, plan)
    assert [[(p.first, p.last) for p in v.plan.layers] for v in versions] == [
        [(0, LONG - 1), (LONG, LONG + 9), (LONG + 10, 2 * LONG + 9)],
        [(0, SHORT - 1), (SHORT, SHORT + 9), (SHORT + 10, SHORT + LONG + 9)],
        [(0, LONG - 1), (LONG, LONG + 9), (LONG + 10, LONG + SHORT + 9)],
    ]
    assert [v.graph.runs[0].count for v in versions] == [2 * LONG + 10, SHORT + LONG + 10, LONG + SHORT + 10]
    assert [v.steps for v in versions[1:]] == [(30 - LONG) / (LONG - SHORT), (40 - LONG) / (LONG - SHORT)]
    quick, whole = both(replace(plan, bucket_bytes=SMALL_BUCKET), "dgx-a100", 80)
    assert quick.step_time_s == pytest.approx(whole.step_time_s, rel=1e-3)
    check_what_grows_evenly(quick, whole)


def test_extrapolation_is_linear_in_every_figure() -> None:
    plan = plans("dgx-a100", 4, ())[0]
    graph: OperatorGraph = captured("gpt2-tiny", DEPTH)
    one = predict(plan, lower(plan, graph), load_profile("dgx-a100"))[0]
    half = replace(
        one,
        step_time_s=one.step_time_s / 2,
        peak_memory_bytes=one.peak_memory_bytes // 2,
        breakdown={part: seconds / 2 for part, seconds in one.breakdown.items()},
    )
    more = extrapolated(one, [(half, 3.0)], flops_ratio=2.5)
    assert more.step_time_s == pytest.approx(2.5 * one.step_time_s)
    assert more.mfu == pytest.approx(one.mfu)
    assert more.samples_per_s == pytest.approx(one.samples_per_s / 2.5)
    assert more.peak_memory_bytes == pytest.approx(2.5 * one.peak_memory_bytes, abs=4)
    assert more.breakdown["compute_s"] == pytest.approx(2.5 * one.breakdown["compute_s"])
