"""How long the two fast search modes take, capture excluded: `make bench`.

Goals, on two cores: recursive programming on a GPT of 96 layers in 0.5 s, decisions and cost tables included;
propagation of hints on ResNet-50 over 64 devices and on a GPT of 24 layers in 1 s. `extra_info` holds the gap to
the exact optimum (under the same hints).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from planner.cost.work import optimizer
from planner.graph.operator_graph import OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.networks import load_network
from planner.plans.hints import Hint, hint
from planner.search import dynamic_programming, recursive_programming, sharding_propagation
from planner.search.configurations.buckets import USUAL
from planner.search.problem.costs import MeshCosts
from planner.search.problem.hints import constrained
from planner.search.problem.problem import Problem, Setting, Solution
from planner.search.problem.variables import decisions
from planner.sharding.placement import Mesh, MeshAxis
from simulator.profiles import load_profile

HARDWARE = "dgx-a100"
MEGATRON = (
    *(hint(f"blocks.*.attention.{name}", "tensor", outputs=["S(1)"]) for name in ("query", "key", "value")),
    hint("blocks.*.attention.output", "tensor", outputs=["P"]),
    hint("blocks.*.expand", "tensor", outputs=["S(1)"]),
    hint("blocks.*.contract", "tensor", outputs=["P"]),
)


def captured(name: str, layers: int | None = None) -> OperatorGraph:
    graph = at_precision(load_network(f"zoo:{name}").capture(), "bfloat16")
    return graph if layers is None else replace(graph, runs=tuple(replace(r, count=layers) for r in graph.runs))


def problem_of(graph: OperatorGraph, mesh: Mesh, batch: int) -> Problem:
    setting = Setting(
        costs=MeshCosts(load_profile(HARDWARE), mesh, USUAL), micro_batches=1, optimizer=optimizer("adamw")
    )
    return Problem(at_batch(graph, batch), decisions(graph), setting)


def record(benchmark: BenchmarkFixture, problem: Problem, solution: Solution | None) -> None:
    assert solution is not None
    optimum = dynamic_programming.fastest(problem).objective_s
    benchmark.extra_info["gap"] = round(1.0 - optimum / solution.objective_s, 5)


@pytest.mark.parametrize("layers", [24, 96])
@pytest.mark.parametrize(("data", "tensor"), [(8, 8), (128, 8)])
def test_recursive_programming(benchmark: BenchmarkFixture, layers: int, data: int, tensor: int) -> None:
    graph = captured("gpt3-175b", layers)
    mesh = Mesh((MeshAxis("data", data), MeshAxis("tensor", tensor)))

    def everything() -> tuple[Problem, Solution | None]:
        problem = problem_of(graph, mesh, 4 * data)
        return problem, recursive_programming.solve(problem, np.inf)

    record(benchmark, *benchmark.pedantic(everything, rounds=5, warmup_rounds=1))


@pytest.mark.parametrize(
    ("name", "layers", "hints", "axes"),
    [("resnet50", None, (), {"data": 64}), ("gpt3-175b", 24, MEGATRON, {"data": 8, "tensor": 8})],
    ids=["resnet50-64", "gpt-24"],
)
def test_sharding_propagation(
    benchmark: BenchmarkFixture, name: str, layers: int | None, hints: tuple[Hint, ...], axes: dict[str, int]
) -> None:
    graph = captured(name, layers)
    mesh = Mesh(tuple(MeshAxis(axis, size) for axis, size in axes.items()))

    def everything() -> tuple[Problem, Solution | None]:
        problem = problem_of(graph, mesh, 2048 if name == "resnet50" else 64)
        return problem, sharding_propagation.propagate(problem, np.inf, hints).solution

    problem, solution = benchmark.pedantic(everything, rounds=5, warmup_rounds=1)
    record(benchmark, constrained(problem, hints), solution)
