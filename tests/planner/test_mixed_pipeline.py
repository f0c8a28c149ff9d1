"""Pipelines whose stages lie on devices of several types."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from planner.planning.mixed_pipeline import lower_mixed, nodes_of_ranks
from planner.planning.prediction import simulate_plan
from planner.plans.plan import Plan
from simulator import engine, launches
from simulator.errors import ProfileError
from simulator.mixed_cluster import MixedCluster, pacing_hardware, parse_cluster
from simulator.profiles import load_profile
from tests.planner.lowering.plans import one_stage, pipelined
from tests.planner.search.problems import captured

LAYERS = 4
NEW, OLD = "dgx-a100", "dgx1-v100"


@pytest.fixture(autouse=True)
def _hosts_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are never late: of so small a network nothing else would be seen."""
    monkeypatch.setattr(launches, "launch_time", lambda _: 0.0)


@cache
def cluster(*profiles: str) -> MixedCluster:
    nodes = "\n".join(f"  - {{profile: {name}, count: 1}}" for name in profiles)
    text = f"format: meshwright-cluster\nversion: 1\nname: some\nnodes:\n{nodes}\n"
    return parse_cluster(text.encode(), "some.yaml", load_profile)


def plan_of(
    cuts: tuple[int, ...] = (0, 3, 6), axes: tuple[tuple[str, int], ...] = (("data", 8),), micro_batch: int = 2
) -> Plan:
    plan = one_stage("gpt2-tiny", LAYERS, axes, micro_batch=micro_batch)
    return pipelined(plan, captured("gpt2-tiny", LAYERS), 2, "1f1b", cuts=cuts)


def step_s(plan: Plan, nodes: MixedCluster | None, **options: object) -> float:
    graph = captured("gpt2-tiny", LAYERS)
    hardware = load_profile(NEW) if nodes is None else pacing_hardware(nodes)
    found = simulate_plan(plan, graph, hardware, cluster=nodes, **options)  # type: ignore[arg-type]
    return found.prediction.step_time_s


def test_stages_lie_on_the_nodes_of_their_devices() -> None:
    assert nodes_of_ranks(plan_of(), cluster(NEW, OLD)) == [{0}, {1}]
    across = plan_of(axes=(("data", 4),))
    assert nodes_of_ranks(across, cluster(NEW, OLD)) == [{0}, {0}]


@pytest.mark.parametrize("axes", [(("data", 8),), (("data", 4), ("tensor", 2))])
def test_devices_of_one_type_are_no_mixed_cluster(axes: tuple[tuple[str, int], ...]) -> None:
    nodes = cluster(NEW, NEW)
    graph = captured("gpt2-tiny", LAYERS)
    plan = plan_of(axes=axes)
    mixed = lower_mixed(plan, graph, nodes, pacing_hardware(nodes)).costs
    alone = simulate_plan(plan, graph, load_profile(NEW)).lowered.costs
    for kind, passes in alone.passes.items():
        for one, other in zip(passes, mixed.passes[kind], strict=True):
            assert np.array_equal(one.seconds, other.seconds)
    assert np.array_equal(mixed.epilogue_s, alone.epilogue_s)


def test_each_stage_runs_at_its_own_pace() -> None:
    plan, fast, slow = plan_of(), "dgx-h100", "dgx-a100"
    pairs = ((fast, fast), (fast, slow), (slow, fast), (slow, slow))
    new, mixed, turned, old = (step_s(plan, cluster(*names)) for names in pairs)
    paced = simulate_plan(plan, captured("gpt2-tiny", LAYERS), pacing_hardware(cluster(fast, slow)))
    assert new < mixed <= paced.prediction.step_time_s
    assert new < turned <= paced.prediction.step_time_s
    assert mixed < old


def test_more_layers_on_the_faster_devices_are_faster() -> None:
    nodes, many = cluster(NEW, OLD), 256  # so that arithmetic decides, not overheads of kernels
    assert step_s(plan_of((0, 4, 6), micro_batch=many), nodes) < step_s(plan_of((0, 2, 6), micro_batch=many), nodes)


def test_a_stage_on_both_types_takes_the_slower_ones_time() -> None:
    plan, graph = plan_of(axes=(("data", 8), ("tensor", 2))), captured("gpt2-tiny", LAYERS)
    nodes = cluster(NEW, OLD, NEW, NEW)
    first, second = nodes_of_ranks(plan, nodes)
    assert (first, second) == ({0, 1}, {2, 3})
    mixed = lower_mixed(plan, graph, nodes, pacing_hardware(nodes)).costs
    turned = lower_mixed(plan, graph, cluster(OLD, NEW, NEW, NEW), pacing_hardware(nodes)).costs
    alone = lower_mixed(plan, graph, cluster(NEW, NEW, NEW, NEW), pacing_hardware(cluster(NEW, NEW))).costs
    for kind, passes in mixed.passes.items():
        assert np.array_equal(passes[0].seconds, turned.passes[kind][0].seconds)
        assert (passes[0].seconds >= alone.passes[kind][0].seconds).all()
        assert np.array_equal(passes[1].seconds, alone.passes[kind][1].seconds)


def test_both_engines_agree() -> None:
    nodes = cluster(NEW, OLD)
    assert step_s(plan_of(), nodes, engine=engine.run) == pytest.approx(step_s(plan_of(), nodes), rel=1e-9)


def test_too_few_devices_are_said() -> None:
    with pytest.raises(ProfileError, match=r"needs 16 devices, cluster some has 8; add nodes"):
        step_s(plan_of(), cluster(NEW))


def test_the_command_takes_the_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from planner.cli.app import app
    from planner.plans.file import write_plan

    strategy = write_plan(plan_of(), tmp_path / "strategy.json")
    steps = []
    for second in (NEW, OLD):
        file = tmp_path / f"{second}.yaml"
        text = "format: meshwright-cluster\nversion: 1\nname: some\nnodes:\n"
        file.write_text(text + f"  - {{profile: {NEW}, count: 1}}\n  - {{profile: {second}, count: 1}}\n")
        found = CliRunner().invoke(app, ["simulate", str(strategy), "--hw", str(file), "--quiet"])
        assert found.exit_code == 0, found.output
        steps.append(float(found.stdout))
    assert steps[0] < steps[1]
