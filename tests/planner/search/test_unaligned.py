"""A block that offers other choices than its like is taken out of its run."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from planner.graph.folding import unfold
from planner.graph.operator_graph import OperatorGraph
from planner.lowering.checked import checked_graph
from planner.networks import load_network
from planner.planning.planning import PlanRequest, plan_network
from planner.planning.prediction import predict_plan
from planner.plans.pins import Pins
from planner.plans.request import SEARCH_MODES
from planner.search.dynamic_programming import fastest, smallest, solve
from planner.search.problem.problem import node_rules
from planner.search.problem.unaligned import aligned, in_runs
from simulator.errors import UnsupportedError
from simulator.profiles import load_profile
from tests.planner.search.problems import captured, make_mesh, make_problem


class Negated(nn.Module):
    """Partial sums pass through; the loss behind the last block does not take them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.inner(x)


class Twofold(nn.Module):
    """Two readers of what is handed on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.one(x)) + self.other(x)


def graph_of(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch, count: int = 5) -> OperatorGraph:
    def make() -> tuple[nn.Module, tuple[torch.Tensor, ...], nn.Module]:
        network = nn.Sequential(nn.Linear(16, 16), nn.Sequential(*(block() for _ in range(count))))
        return network, (torch.randn(4, 16), torch.randn(4, 16)), nn.MSELoss()

    module = ModuleType("made_of_blocks")
    module.make = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_of_blocks", module)
    return load_network("py:made_of_blocks:make").capture()


@pytest.mark.parametrize("block", [Negated, Twofold])
def test_the_odd_block_is_taken_out(block: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(block, monkeypatch)
    (run,) = graph.runs
    assert run.count == 5
    even, _ = aligned(graph)
    assert [r.count for r in even.runs] == [4]
    assert [n.name for n in unfold(even).nodes] == [n.name for n in unfold(graph).nodes]
    mesh = make_mesh(data=2, tensor=2)
    folded, whole = make_problem(even, mesh), make_problem(graph, mesh, unfolded=True)
    for search in (fastest, smallest):
        one, other = search(folded), search(whole)
        assert one.objective_s == pytest.approx(other.objective_s, rel=1e-10)
        assert one.memory_bytes == other.memory_bytes
    rules, layers = in_runs(graph, *node_rules(folded, fastest(folded)))
    assert [n for part in layers for n in range(part.first, part.last + 1)] == list(range(5))
    assert len({tuple(sorted(part.rules)) for part in layers}) == 1
    assert not any(name.startswith(f"{run.prefix}.") for name in rules)
    limit = 0.5 * (smallest(folded).memory_bytes + fastest(folded).memory_bytes)
    found, expected = solve(folded, limit), solve(whole, limit)
    assert found is not None
    assert expected is not None
    assert found.objective_s == pytest.approx(expected.objective_s, rel=1e-9)
    assert found.memory_bytes <= limit


@pytest.mark.parametrize("mode", SEARCH_MODES)
def test_every_mode_plans_such_a_network(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(Negated, monkeypatch)
    request = PlanRequest(
        network="py:made_of_blocks:make",
        hardware="dgx-h100",
        devices=4,
        global_batch=8,
        search_mode=mode,
        pins=Pins(pp=1, micro_batch=2),
    )
    result = plan_network(request, graph=graph)
    for candidate in result.candidates:
        whole = checked_graph(candidate.plan, graph)
        step_time_s = predict_plan(candidate.plan, whole, load_profile("dgx-h100")).step_time_s
        assert step_time_s == candidate.prediction.step_time_s
        layers = [number for part in candidate.plan.layers for number in range(part.first, part.last + 1)]
        assert layers == list(range(5))
    assert result.candidates


def test_without_it_such_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of(Negated, monkeypatch)
    with pytest.raises(UnsupportedError, match="offer different strategies"):
        fastest(make_problem(graph, make_mesh(data=2, tensor=2)))


def test_runs_of_equal_blocks_stay() -> None:
    graph = captured("gpt2-tiny", 5)
    assert aligned(graph)[0] is graph
