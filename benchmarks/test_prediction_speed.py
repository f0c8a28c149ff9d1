"""How long it takes to lower and simulate one plan, capture and search excluded: `make bench`.

Goals: 0.25 s for GPT-3 175B on 1,024 devices, on one stage with ZeRO-3 or in an interleaved pipeline, layers computing
again in three ways by turns; 0.05 s for ResNet-50 on 64; and as long for 24 layers as for 96, but for the engine.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import cycle

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.graph.chain import chain
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_precision
from planner.networks import load_network
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import predict_plan
from planner.plans.pins import Pins
from planner.plans.plan import Plan, RecomputeRange
from simulator.profiles import load_profile

HARDWARE = "dgx-a100"
WAYS = ("none", "selective", "selective", "full", "selective")
ONE_STAGE = {"pp": "1", "tp": "2", "optimizer_sharding": "zero3", "micro_batch": "3"}
INTERLEAVED = {"pp": "8", "vpp": "12", "tp": "2", "schedule": "interleaved_1f1b", "micro_batch": "1"}


@cache
def captured(network: str, layers: int | None = None) -> OperatorGraph:
    graph = load_network(network).capture()
    return graph if layers is None else replace(graph, runs=tuple(replace(r, count=layers) for r in graph.runs))


@cache
def best(network: str, devices: int, pins: tuple[tuple[str, str], ...], layers: int | None = None) -> Plan:
    request = PlanRequest(network=network, hardware=HARDWARE, devices=devices, pins=Pins.read(dict(pins)))
    return plan_network(request, graph=captured(network, layers)).candidates[0].plan


def by_turns(plan: Plan, graph: OperatorGraph) -> Plan:
    """The plan with its layers computing again in three ways by turns."""
    names = chain(graph).names()[1:-1]
    ranges = tuple(
        RecomputeRange(first=name, last=name, mode=mode)
        for name, mode in zip(names, cycle(WAYS), strict=False)
        if mode != "none"
    )
    return replace(plan, recompute="full", recompute_ranges=ranges)


@pytest.mark.parametrize("layers", [24, 96])
@pytest.mark.parametrize("pins", [ONE_STAGE, INTERLEAVED], ids=["one stage", "interleaved"])
def test_gpt3(benchmark: BenchmarkFixture, pins: dict[str, str], layers: int) -> None:
    network, devices = "zoo:gpt3-175b", 1024
    if layers < int(pins.get("pp", "1")) * int(pins.get("vpp", "1")):
        pins = {**pins, "vpp": "2"}
    graph = at_precision(captured(network, layers), "bfloat16")
    plan = by_turns(best(network, devices, tuple(pins.items()), layers), graph)
    found = benchmark(predict_plan, plan, graph, load_profile(HARDWARE))
    benchmark.extra_info["step_time_s"] = round(found.step_time_s, 3)


@pytest.mark.parametrize("pins", [{"pp": "1"}, {"pp": "2"}], ids=["one stage", "pipeline"])
@pytest.mark.parametrize(("network", "devices"), [("zoo:resnet50", 64), ("zoo:mlp", 1024)])
def test_others(benchmark: BenchmarkFixture, network: str, devices: int, pins: dict[str, str]) -> None:
    plan = best(network, devices, tuple(pins.items()))
    found = benchmark(predict_plan, plan, at_precision(captured(network), "bfloat16"), load_profile(HARDWARE))
    benchmark.extra_info["step_time_s"] = round(found.step_time_s, 5)
