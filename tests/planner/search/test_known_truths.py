"""What everyone knows about parallel training comes out of the search untold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import numpy as np
import pytest
from torch import Tensor, nn

from planner.graph.operator_graph import OperatorGraph
from planner.search import dynamic_programming, recursive_programming, sharding_propagation
from planner.search.problem.problem import Problem, Solution, choices_of
from planner.sharding.placement import PARTIAL, REPLICATE
from tests.planner.search.made_networks import captured_module, gpt
from tests.planner.search.problems import captured, make_mesh, make_problem

MODES: Mapping[str, Callable[[Problem, float], Solution | None]] = {
    "dynamic_programming": dynamic_programming.solve,
    "recursive_programming": recursive_programming.solve,
    "sharding_propagation": lambda problem, limit: sharding_propagation.propagate(problem, limit).solution,
}
every_mode = pytest.mark.parametrize("solve", MODES.values(), ids=MODES)


class Stack(nn.Module):
    """Products with weights (width × width) and ReLU, and a mean squared error."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(depth))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            features = nn.functional.relu(layer(features))
        return nn.functional.mse_loss(features, target)


class Core(nn.Module):
    """Attention of static shapes without weights in it: product, softmax, product."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(nn.init.ones_(nn.Linear(1, 1).weight))

    def forward(self, features: Tensor, target: Tensor) -> Tensor:
        weights = (features @ features.transpose(-2, -1) * self.scale).softmax(-1)
        return nn.functional.mse_loss(weights @ features, target)


@cache
def stack(width: int, depth: int) -> OperatorGraph:
    return captured_module(lambda: Stack(width, depth), (width,), (width,))


@cache
def core() -> OperatorGraph:
    return captured_module(Core, (16, 128, 64), (16, 128, 64))


def placed(problem: Problem, solution: Solution, wanted: Callable[[str], bool]) -> dict[str, list[tuple[int, ...]]]:
    """For forward operators with wanted names the placements of inputs, then outputs, along each axis."""
    found = {}
    for index, node in enumerate(problem.graph.nodes):
        variable = problem.decisions.of_node[index]
        if variable < 0 or node.phase != "forward" or not wanted(node.name):
            continue
        position = problem.decisions.variables[variable].nodes.index(index)
        rules = [c.rules[position] for c in choices_of(problem, variable, solution.assignment[variable])]
        found[node.name] = [(*rule.inputs, *rule.outputs) for rule in rules]
    return found


def products(problem: Problem, solution: Solution) -> dict[str, list[tuple[int, ...]]]:
    names = {node.name for node in problem.graph.nodes if node.flops}
    return placed(problem, solution, lambda name: name in names)


def best(solve: Callable[[Problem, float], Solution | None], problem: Problem, limit: float = np.inf) -> Solution:
    found = solve(problem, limit)
    assert found is not None
    assert found.memory_bytes <= limit
    return found


@every_mode
def test_huge_weights_and_a_small_batch_go_tensor_parallel(solve: Callable[[Problem, float], Solution | None]) -> None:
    """Weights of 4096 × 4096 against a batch of 16: no weight is read whole, no gradient of a weight is summed."""
    problem = make_problem(stack(4096, 4), make_mesh(data=8), batch=16)
    for ports in products(problem, best(solve, problem)).values():
        assert ports[0][1] >= 0


@every_mode
def test_a_small_network_and_a_big_batch_go_data_parallel(solve: Callable[[Problem, float], Solution | None]) -> None:
    problem = make_problem(stack(256, 4), make_mesh(data=8), batch=65536)
    assert {tuple(p[0]) for p in products(problem, best(solve, problem)).values()} == {(0, REPLICATE, 0)}


@every_mode
def test_a_vocabulary_projection_that_dominates_is_split_by_vocabulary(
    solve: Callable[[Problem, float], Solution | None],
) -> None:
    """Along an axis that may cut the batch instead, as it does where tokens are many and the head is light."""
    parts = {}
    for vocabulary, batch in ((262144, 8), (1024, 512)):
        graph = gpt(vocabulary=vocabulary, hidden=1024, layers=2, heads=8, length=128)
        problem = make_problem(graph, make_mesh(data=8), batch=batch)
        found = best(solve, problem)
        softmax = placed(problem, found, lambda name: "log_softmax" in name)
        parts[vocabulary] = products(problem, found)["head/mm"][0], {placements[0] for placements in softmax.values()}
    assert parts[262144] == ((REPLICATE, 1, 1), {(1, 1)}), "the loss is taken of the parts"
    assert parts[1024] == ((0, REPLICATE, 0), {(0, 0)})


@pytest.mark.parametrize("axes", [{"tensor": 8}, {"data": 4, "tensor": 8}])
@every_mode
def test_the_plan_of_megatron_is_found_for_gpt3(
    solve: Callable[[Problem, float], Solution | None], axes: dict[str, int]
) -> None:
    """Nobody says so: attention splits by heads and the projection after it by rows, and so do the two others."""
    problem = make_problem(captured("gpt3-175b"), make_mesh(**axes), batch=8 if len(axes) == 1 else 32)
    found = placed(problem, best(solve, problem), lambda name: name.startswith("blocks.1"))
    axis = list(axes).index("tensor")

    def output(name: str) -> int:
        return found[f"blocks.1{name}"][axis][-1]

    assert found["blocks.1.attention/_scaled_dot_product_flash_attention_for_cpu"][axis][0] == 1
    assert [output(f".attention.{name}/addmm") for name in ("query", "key", "value", "output")] == [1, 1, 1, PARTIAL]
    assert [output(".expand/addmm"), output("/gelu"), output(".contract/addmm")] == [1, 2, PARTIAL]


@every_mode
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5])
def test_no_plan_under_a_memory_limit_is_overlooked(
    solve: Callable[[Problem, float], Solution | None], share: float
) -> None:
    """Four layers of 4096 × 4096 on 8 devices: plans that are slow and small survive until they are needed."""
    problem = make_problem(stack(4096, 4), make_mesh(data=8), batch=256)
    least = dynamic_programming.smallest(problem).memory_bytes
    free = dynamic_programming.fastest(problem).memory_bytes
    best(solve, problem, least + share * (free - least))
    assert solve(problem, least - 1) is None


@every_mode
@pytest.mark.parametrize(("devices", "batch"), [(64, 8), (24, 16), (6, 4)])
def test_a_batch_smaller_than_the_devices_is_no_failure(
    solve: Callable[[Problem, float], Solution | None], devices: int, batch: int
) -> None:
    problem = make_problem(captured("gpt2-tiny"), make_mesh(data=devices), batch=batch)
    assert np.isfinite(best(solve, problem).objective_s)


@pytest.mark.slow
@every_mode
def test_no_convolution_is_replicated(solve: Callable[[Problem, float], Solution | None]) -> None:
    problem = make_problem(captured("resnet50"), make_mesh(data=8), batch=256)
    found = placed(problem, best(solve, problem), lambda name: "/conv" in name or "batch_norm" in name)
    assert found
    assert {ports[0][-1] for name, ports in found.items() if "/conv" in name} == {0}


@every_mode
def test_an_attention_core_without_weights_is_split(solve: Callable[[Problem, float], Solution | None]) -> None:
    problem = make_problem(core(), make_mesh(data=8), batch=8)
    found = products(problem, best(solve, problem))
    assert len(found) == 2
    assert all(ports[0][-1] >= 0 for ports in found.values())


@pytest.mark.parametrize("axis", ["tensor", "expert"])
@every_mode
def test_experts_are_split_over_devices(solve: Callable[[Problem, float], Solution | None], axis: str) -> None:
    """Each device multiplies with whole experts of its own; on an expert axis attention stays data parallel."""
    problem = make_problem(captured("mixtral-8x7b"), make_mesh(**{axis: 8}), batch=8)
    found = products(problem, best(solve, problem))
    three = [found[f"blocks.1.experts/bmm{place}"] for place in ("", ".1", ".2")]
    assert three == [[(0, 0, 0)]] * 3
    if axis == "expert":
        assert found["blocks.1.attention.query/mm"] == [(0, REPLICATE, 0)]
