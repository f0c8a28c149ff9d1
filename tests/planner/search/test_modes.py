"""The search modes from a request to a plan, and hints from a file to a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.graph.scaling import at_batch
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import read_plan
from planner.plans.hints import hint
from planner.plans.pins import Pins
from planner.plans.plan import Status, expanded_rules
from planner.plans.request import SEARCH_MODES
from planner.search.problem.hints import first_not_kept
from simulator.errors import UnsupportedError
from tests.planner.lowering.steps import lowered_of
from tests.planner.search.problems import captured

REQUEST = PlanRequest(network="zoo:gpt2-tiny", hardware="dgx-a100", devices=4, global_batch=64)
NOTHING = (hint("blocks.*.expand", "context", outputs=["R"]),)
"""Hints along an axis that no mesh here has: all modes then search data and tensor parallelism."""


@pytest.mark.parametrize("mode", SEARCH_MODES)
def test_every_mode_makes_a_plan_that_is_close_to_the_exact_one(mode: str) -> None:
    graph = captured("gpt2-tiny")
    best, exact = (
        plan_network(PlanRequest(**{**vars(REQUEST), "search_mode": name, "hints": NOTHING}), graph=graph).candidates[0]
        for name in (mode, "dynamic_programming")
    )
    proven = mode == "dynamic_programming"
    assert (best.plan.search_mode, best.plan.certificate.status == Status.HEURISTIC) == (mode, not proven)
    assert 0 < best.plan.certificate.lower_bound_s <= best.plan.certificate.objective_s
    assert best.plan.certificate.gap <= 0.05
    assert best.prediction.step_time_s <= 1.05 * exact.prediction.step_time_s
    lowered_of(best.plan, graph)


@pytest.mark.parametrize("mode", SEARCH_MODES)
def test_every_mode_keeps_hints(mode: str) -> None:
    graph = captured("gpt2-tiny")
    fields = {
        **vars(REQUEST),
        "search_mode": mode,
        "pins": Pins(tp=4),
        "hints": (hint("blocks.*.expand", "tensor", outputs=["P"]),),
    }
    plan = plan_network(PlanRequest(**fields), graph=graph).candidates[0].plan
    for layers in plan.layers:
        assert [rule.outputs for rule in layers.rules["blocks.*.expand/addmm"]] == [(-2,)]


@pytest.mark.parametrize("mode", ["recursive_programming", "sharding_propagation"])
def test_the_fast_modes_leave_pipelines_to_the_search_over_configurations(mode: str) -> None:
    fields = {**vars(REQUEST), "search_mode": mode, "pins": Pins(pp=2)}
    result = plan_network(PlanRequest(**fields), graph=captured("gpt2-tiny"))
    assert {candidate.plan.pipeline for candidate in result.candidates} == {2}
    assert any(message.startswith(mode) and "over configurations" in message for message in result.messages)


def test_pipelines_of_modes_that_shard_batches_are_refused_with_the_reason() -> None:
    fields = {**vars(REQUEST), "pins": Pins(recompute="full"), "parallel_mode": "data_parallel"}
    with pytest.raises(UnsupportedError, match=r"recompute=full.*'data_parallel' shards batches.*leave out"):
        plan_network(PlanRequest(**fields), graph=captured("gpt2-tiny"))


@pytest.mark.parametrize("search_mode", ["dynamic_programming", "sharding_propagation"])
def test_hints_come_from_a_file(tmp_path: Path, search_mode: str) -> None:
    hints = tmp_path / "hints.yaml"
    hints.write_text("- {operators: blocks.2.expand, axis: tensor, outputs: [P]}\n")
    command = ["plan", "zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "2", "--global-batch", "8", "--pin", "tp=2"]
    command += ["--hints", str(hints), "--json", "--out", str(tmp_path / "plan.json"), "--search-mode", search_mode]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["search"]["mode"] == search_mode
    plan = read_plan(str(tmp_path / "plan.json"))
    graph = at_batch(captured("gpt2-tiny"), plan.samples)
    asked = hint("blocks.2.expand", "tensor", outputs=["P"])
    assert first_not_kept(graph, expanded_rules(plan), plan.mesh.axes, (asked,)) is None
