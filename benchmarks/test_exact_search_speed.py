"""How long the exact search takes, cost tables included and capture excluded: `make bench`.

Goals, on two cores: Llama-3 8B on meshes of 4 × 8 and of 32 × 8, any placement on both axes, in 1 s; ResNet-50 on 64
devices in 1 s; a perceptron of three layers on 1,024 devices, every factorisation, in 0.2 s; 96 layers of a GPT in at
most 1.2 times what 12 take, the operators alone and the whole plan.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.cost.work import optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from planner.planning.planning import PlanRequest, capture_for, plan_network
from planner.search.dynamic_programming import DynamicProgramming, fastest, smallest, solve
from planner.search.problem.costs import MeshCosts
from planner.search.problem.problem import Problem, Setting, Solution
from planner.search.problem.variables import decisions
from planner.sharding.placement import Mesh, MeshAxis
from simulator.profiles import load_profile

LLAMA3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json"""

DEPTH = PlanRequest(network="zoo:gpt2", hardware="dgx-a100", devices=8, global_batch=64)
FREE = frozenset({"tensor"})
"""Any placement on both axes: the tensor axis else leaves the batch alone."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> OperatorGraph:
    folder = tmp_path_factory.mktemp("llama3-8b")
    Path(folder, "config.json").write_text(json.dumps(LLAMA3_8B))
    return at_precision(load_network(f"hf:{folder}", sequence_length=2048).capture(), "bfloat16")


def problem_of(graph: OperatorGraph, *axes: tuple[str, int], free_axes: frozenset[str] = frozenset[str]()) -> Problem:
    mesh = Mesh(tuple(MeshAxis(name, size) for name, size in axes))
    graph = at_batch(graph, mesh.size)
    setting = Setting(
        costs=MeshCosts(load_profile("dgx-a100"), mesh, 25 * 2**20),
        micro_batches=1,
        optimizer=optimizer("adamw"),
        free_axes=free_axes,
    )
    return Problem(graph, decisions(graph), setting)


@pytest.mark.parametrize("data", [4, 32])
def test_llama3_8b_any_placement(benchmark: BenchmarkFixture, llama: OperatorGraph, data: int) -> None:
    """Decisions, cost tables and elimination; `extra_info` holds the process time of the median round.

    A warm-up finds the ways between placements, which a process does once, and has numpy loaded.
    """
    taken: list[float] = []

    def search() -> Solution:
        started = process_time()
        found = fastest(problem_of(llama, ("data", data), ("tensor", 8), free_axes=FREE))
        taken.append(process_time() - started)
        return found

    solution = benchmark.pedantic(search, rounds=5, warmup_rounds=1)
    benchmark.extra_info["process time, s"] = round(statistics.median(taken[1:]), 3)
    benchmark.extra_info["gap"] = solution.gap
    benchmark.extra_info["states"] = f"{solution.states}, {solution.states_left} after reductions"
    benchmark.extra_info["width"] = solution.width


@pytest.mark.parametrize("part", ["tables", "elimination"])
def test_llama3_8b_by_part(benchmark: BenchmarkFixture, llama: OperatorGraph, part: str) -> None:
    axes = (("data", 4), ("tensor", 8))
    problem = problem_of(llama, *axes, free_axes=FREE)
    if part == "tables":
        benchmark.pedantic(lambda: problem_of(llama, *axes, free_axes=FREE).pairs, rounds=5, warmup_rounds=1)
    else:
        made = problem.pairs
        assert made
        benchmark.pedantic(lambda: DynamicProgramming(problem).minimise(0.0), rounds=5)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.1])
def test_llama3_8b_under_a_memory_limit(benchmark: BenchmarkFixture, llama: OperatorGraph, share: float) -> None:
    """`share` of the way from the least memory to that of the fastest plan."""
    problem = problem_of(llama, ("data", 4), ("tensor", 8))
    low, high = smallest(problem).memory_bytes, fastest(problem).memory_bytes
    found = benchmark.pedantic(solve, args=(problem, low + share * (high - low)), rounds=1)
    benchmark.extra_info["gap"] = found.gap


def test_llama3_8b_on_three_axes(benchmark: BenchmarkFixture, llama: OperatorGraph) -> None:
    """Elimination alone, compiled loop loaded."""
    problem = problem_of(llama, ("data", 2), ("context", 2), ("tensor", 2))
    solution = benchmark.pedantic(lambda: DynamicProgramming(problem).minimise(0.0)[1], rounds=1, warmup_rounds=1)
    benchmark.extra_info["largest table"] = solution.largest_table


def test_perceptron_on_1024_devices(benchmark: BenchmarkFixture) -> None:
    """The whole plan on two cores: every data × tensor mesh, and the simulation of the best."""
    request = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=1024, global_batch=4096)
    graph = capture_for(request)
    search: list[float] = []
    benchmark.pedantic(lambda: search.append(plan_network(request, graph=graph, cores=2).elapsed_s), rounds=5)
    benchmark.extra_info["first plan, s"] = round(search[0], 3)
    benchmark.extra_info["later ones, s"] = round(statistics.median(search[1:]), 3)


def test_eight_times_the_depth(benchmark: BenchmarkFixture) -> None:
    """Pairs of searches, 96 layers beside 12, on one mesh; `extra_info` holds the median ratios, of whole plans too."""
    captured = capture_for(DEPTH)
    deeper = replace(captured, runs=tuple(replace(run, count=run.count * 8) for run in captured.runs))
    shallow, deep = (at_precision(graph, "bfloat16") for graph in (captured, deeper))
    once: list[float] = []
    eight: list[float] = []

    def pair() -> None:
        for graph, taken in ((shallow, once), (deep, eight)):
            started = perf_counter()
            fastest(problem_of(graph, ("data", 8), ("tensor", 4)))
            taken.append(perf_counter() - started)

    benchmark.pedantic(pair, rounds=7, warmup_rounds=1)
    ratios = [b / a for a, b in zip(once[1:], eight[1:], strict=True)]
    benchmark.extra_info["96 layers / 12"] = round(statistics.median(ratios), 3)


@pytest.mark.parametrize("cores", [1, 2])
def test_eight_times_the_depth_of_a_whole_plan(benchmark: BenchmarkFixture, cores: int) -> None:
    """Every phase but the capture: the ratio of pairs of plans, and by how many seconds each phase grows."""
    captured = capture_for(DEPTH)
    deeper = replace(captured, runs=tuple(replace(run, count=run.count * 8) for run in captured.runs))
    ratios: list[float] = []
    longer: list[dict[str, float]] = []

    def pair() -> None:
        shallow, deep = (plan_network(DEPTH, graph=graph, cores=cores) for graph in (captured, deeper))
        ratios.append(deep.elapsed_s / shallow.elapsed_s)
        longer.append({name: deep.timings.get(name, 0.0) - took for name, took in shallow.timings.items()})

    benchmark.pedantic(pair, rounds=9, warmup_rounds=1)
    benchmark.extra_info["96 layers / 12, whole plan"] = round(statistics.median(ratios[1:]), 3)
    for name in longer[0]:
        benchmark.extra_info[f"{name}, s more"] = round(statistics.median(each[name] for each in longer[1:]), 3)
