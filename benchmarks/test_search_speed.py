"""How long planning takes, capture excluded: `make bench`.

Goals, on two cores: an exact plan of 12-layer GPT-2 on 8 devices in 1 s, of ResNet-50 on 64 devices in 3 s, one
step of GPT-3 175B on 1,024 devices run by the SimPy engine in 2 s, a network
twice as deep at most 1.2 times the search time, `meshwright --help` in 0.3 s, peak memory under 2 GB.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.pipeline import lower_pipeline
from planner.lowering.stages import lower_stages
from planner.planning.planning import PlanRequest, capture_for, plan_network
from planner.plans.pins import Pins
from planner.plans.plan import Plan
from simulator import engine
from simulator.pipeline_operators import operator_table
from simulator.profiles import load_profile

COMMAND = Path(sys.executable).with_name("meshwright")
GPT2 = PlanRequest(network="zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64)
RESNET50 = PlanRequest(network="zoo:resnet50", hardware="ascend910-atlas800", devices=64, global_batch=2048)
GPT3 = PlanRequest(network="zoo:gpt3-175b", hardware="dgx-a100", devices=1024, global_batch=1536)


@pytest.mark.parametrize("request_", [GPT2, RESNET50], ids=["gpt2-8", "resnet50-64"])
def test_exact_plan(benchmark: BenchmarkFixture, request_: PlanRequest) -> None:
    graph = capture_for(request_)
    result = benchmark(plan_network, request_, graph=graph)
    benchmark.extra_info["status"] = str(result.status)


def deeper(graph: OperatorGraph, times: int) -> OperatorGraph:
    """The same network with more layers."""
    return replace(graph, runs=tuple(replace(run, count=run.count * times) for run in graph.runs))


def test_twice_the_depth(benchmark: BenchmarkFixture) -> None:
    """Pairs of plans, 24 layers beside 12, in one run; `extra_info` holds the median ratios.

    The search does not see the depth; the simulation goes through every layer.
    """
    graph = capture_for(GPT2)
    twice = deeper(graph, 2)
    search, everything = [], []

    def pair() -> None:
        once, double = (plan_network(GPT2, graph=one) for one in (graph, twice))
        search.append((double.elapsed_s - double.simulation_s) / (once.elapsed_s - once.simulation_s))
        everything.append(double.elapsed_s / once.elapsed_s)

    benchmark.pedantic(pair, rounds=7, warmup_rounds=1)
    benchmark.extra_info["search, twice as deep / once"] = round(statistics.median(search[1:]), 3)
    benchmark.extra_info["with simulation"] = round(statistics.median(everything[1:]), 3)


@pytest.fixture(scope="module")
def gpt3() -> tuple[OperatorGraph, Plan]:
    graph = capture_for(GPT3)
    return graph, plan_network(replace(GPT3, pins=Pins(dp=64, tp=16)), graph=graph).candidates[0].plan


def test_simulate_gpt3_on_1024_devices(benchmark: BenchmarkFixture, gpt3: tuple[OperatorGraph, Plan]) -> None:
    """The SimPy engine alone: all operators of a step of 96 layers, accumulated over micro-batches."""
    graph, plan = gpt3
    lowered = lower_pipeline(plan, checked_graph(plan, graph), load_profile(GPT3.hardware))
    table = operator_table(lowered.schedule, lowered.costs)
    benchmark.extra_info["operators"] = table.size
    benchmark.pedantic(engine.run, args=(table,), rounds=5)


def test_lower_gpt3(benchmark: BenchmarkFixture, gpt3: tuple[OperatorGraph, Plan]) -> None:
    graph, plan = gpt3
    benchmark.pedantic(lower_stages, args=(plan, checked_graph(plan, graph)), rounds=5)


def test_help(benchmark: BenchmarkFixture) -> None:
    benchmark(subprocess.run, [str(COMMAND), "--help"], check=True, capture_output=True)


def test_peak_memory_of_a_plan(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """Whole process, GPT-3 on 1,024 devices; `extra_info` holds the peak resident memory of the largest child."""
    command = [str(COMMAND), "plan", GPT3.network, "--hw", GPT3.hardware, "--devices", str(GPT3.devices)]
    command += ["--global-batch", str(GPT3.global_batch), "--json", "--out", str(tmp_path / "plan.json")]
    done = benchmark.pedantic(subprocess.run, args=(command,), kwargs={"check": True, "capture_output": True}, rounds=1)
    benchmark.extra_info["search_s"] = json.loads(done.stdout)["search"]["elapsed_s"]
    benchmark.extra_info["peak_GB"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
