"""Plans for clusters of several device types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from planner.cli.app import app
from planner.cost.software import cluster_as_run, machine_of
from planner.lowering.checked import checked_graph
from planner.planning.mixed_cluster import plan_on_cluster, shares
from planner.planning.planning import capture_for, plan_network, with_usual_software
from planner.planning.prediction import simulate_plan
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from simulator.profiles import cluster_at, load_profile


def cluster(folder: Path, *types: str) -> str:
    nodes = "".join(f"  - {{profile: {name}, count: 1}}\n" for name in types)
    path = folder / "cluster.yaml"
    path.write_text(f"format: meshwright-cluster\nversion: 1\nname: mixed\nnodes:\n{nodes}")
    return str(path)


def asked(network: str, hardware: str, devices: int, batch: int, **pins: str) -> PlanRequest:
    request = PlanRequest(
        network=network,
        hardware=hardware,
        devices=devices,
        global_batch=batch,
        top=1,
        sensitivity=False,
        pins=Pins.read(pins),
    )
    return with_usual_software(request)


@given(st.integers(1, 200), st.lists(st.floats(0.1, 100.0), min_size=1, max_size=8))
def test_shares_add_up_and_none_could_be_moved_to_shorten_the_longest(layers: int, rates: list[float]) -> None:
    layers = max(layers, len(rates))
    found = shares(layers, rates)
    assert sum(found) == layers
    assert min(found) >= 1
    longest = max((count / rate for count, rate in zip(found, rates, strict=True) if count > 1), default=0.0)
    assert all((count + 1) / rate >= longest * (1 - 1e-9) for count, rate in zip(found, rates, strict=True))


def test_faster_devices_are_not_held_up_by_slower_ones(tmp_path: Path) -> None:
    """No worse than either type alone or all in step, and as `simulate` predicts it."""
    path = cluster(tmp_path, "dgx-h100", "dgx1-v100")
    result, answered = plan_on_cluster(asked("zoo:mlp", path, 16, 4096))
    best = result.candidates[0]
    alone = [plan_network(asked("zoo:mlp", name, 8, 4096)).candidates[0] for name in ("dgx-h100", "dgx1-v100")]
    in_step = plan_network(asked("zoo:mlp", path, 16, 4096)).candidates[0]
    assert in_step.prediction.step_time_s > alone[0].prediction.step_time_s, "the slower node makes it slower"
    least = min(one.prediction.step_time_s for one in alone)
    assert best.prediction.step_time_s <= least * (1 + 1e-9)
    assert "8 × dgx-h100 alone" in result.messages[0]
    assert (best.plan.hardware, best.plan.devices) == (answered.hardware, answered.devices)


def test_the_command_names_the_types_and_says_which_are_left_out(tmp_path: Path) -> None:
    path = cluster(tmp_path, "dgx-h100", "dgx1-v100")
    command = ["plan", "zoo:mlp", "--hw", path, "--devices", "16", "--out", str(tmp_path / "strategy.json")]
    said = CliRunner().invoke(app, [*command, "--global-batch", "4096"], prog_name="meshwright").stdout
    assert said.startswith("zoo:mlp on 8 × NVIDIA H100-SXM5-80GB (dgx-h100)")
    assert "8 slower devices are left out" in said
    assert load_profile(path).devices_text(12) == "8 × NVIDIA H100-SXM5-80GB + 4 × NVIDIA V100-SXM2-32GB"
    assert load_profile("dgx-h100").devices_text(12) == "12 × NVIDIA H100-SXM5-80GB"
    refused = CliRunner().invoke(app, ["plan", "zoo:mlp", "--hw", "dgx-h100,dgx-a100", "--devices", "16"])
    assert refused.exit_code == 2
    assert "docs/how-to/my-cluster.md" in refused.stderr


@pytest.mark.slow
def test_faster_devices_have_more_layers(tmp_path: Path) -> None:
    path = cluster(tmp_path, "dgx-h100", "dgx-a100")
    request = asked("zoo:llama2-7b", path, 16, 64, pp="2", tp="1", schedule="1f1b", micro_batch="1")
    result, answered = plan_on_cluster(request)
    assert answered.hardware == path
    plan = result.candidates[0].plan
    first, second = answered.pins.stage_layers or ()
    assert first > second
    nodes = cluster_at(path)
    assert nodes is not None
    graph = checked_graph(plan, capture_for(answered))
    again = simulate_plan(plan, graph, machine_of(plan), cluster=cluster_as_run(nodes, plan)).prediction
    assert again.step_time_s == pytest.approx(result.candidates[0].prediction.step_time_s)
    even = simulate_plan(
        plan_network(replace(request, pins=replace(request.pins, stage_layers=(16, 16)))).candidates[0].plan,
        graph,
        machine_of(plan),
        cluster=cluster_as_run(nodes, plan),
    )
    assert again.step_time_s < even.prediction.step_time_s


def test_nodes_of_one_type_are_planned_as_ever(tmp_path: Path) -> None:
    path = cluster(tmp_path, "dgx-h100", "dgx-h100")
    request = asked("zoo:mlp", path, 8, 512)
    result, answered = plan_on_cluster(request)
    assert answered is request
    assert not any("several types" in message for message in result.messages)
