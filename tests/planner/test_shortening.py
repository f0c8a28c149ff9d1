"""Peak memory of deep networks, continued from shallow ones, is that of the whole network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from planner.one_stage import quick_peak
from planner.planning import PlanRequest, lower, plan_network, predict
from planner.shortening import LONG, SHORT, WORTHWHILE, shallow_versions
from planner.strategy.plan import Plan
from simulator.hardware import load_profile
from tests.planner.search.problems import captured

DEPTH = 32


@cache
def plans(hardware: str, devices: int, pins: tuple[tuple[str, str], ...], depth: int = DEPTH) -> tuple[Plan, ...]:
    pinned = {"pp": "1", "recompute": "none", **dict(pins)}
    request = PlanRequest(network="zoo:gpt2-tiny", hardware=hardware, devices=devices, global_batch=32, pins=pinned)
    return tuple(c.plan for c in plan_network(request, graph=captured("gpt2-tiny", depth)).candidates)


def both(plan: Plan, hardware: str, depth: int = DEPTH) -> tuple[int, int]:
    graph, profile = captured("gpt2-tiny", depth), load_profile(hardware)
    return quick_peak(plan, graph, profile), predict(plan, lower(plan, graph), profile)[0].peak_memory_bytes


@pytest.mark.parametrize(
    ("hardware", "devices", "pins"),
    [
        ("dgx-h100", 8, {"dp": "2", "tp": "4"}),
        ("dgx-a100", 4, {"optimizer_sharding": "zero2", "dp": "4"}),
        ("ascend910-atlas800", 8, {"micro_batch": "2"}),
    ],
)
def test_the_continued_peak_is_that_of_the_whole_network(hardware: str, devices: int, pins: Mapping[str, str]) -> None:
    for plan in plans(hardware, devices, tuple(pins.items()))[:1]:
        assert shallow_versions(captured("gpt2-tiny", DEPTH), plan)
        quick, whole = both(plan, hardware)
        assert quick == pytest.approx(whole, rel=1e-3)


def test_a_network_that_is_not_deep_is_simulated_whole() -> None:
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
    quick, whole = both(plan, "dgx-a100", 80)
    assert quick == pytest.approx(whole, rel=1e-3)
