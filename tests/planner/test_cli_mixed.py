"""Plans simulated on clusters of several device types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.plans.file import write_plan
from simulator import launches
from simulator.profiles import cluster_at, load_profile
from tests.planner.lowering.plans import one_stage

TYPES = ("dgx-a100", "dgx1-v100")


@pytest.fixture(autouse=True)
def _hosts_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts that are never late: of so small a network nothing else would be seen."""
    monkeypatch.setattr(launches, "launch_time", lambda _: 0.0)


def cluster(folder: Path, *types: str) -> Path:
    nodes = "".join(f"  - {{profile: {name}, count: 1}}\n" for name in types)
    path = folder / f"{'-'.join(types)}.yaml"
    path.write_text(f"format: meshwright-cluster\nversion: 1\nname: mixed\nnodes:\n{nodes}fabric: {{kind: fat-tree}}\n")
    return path


def simulated(*arguments: str) -> float:
    result = CliRunner().invoke(app, ["simulate", *arguments, "--json"], prog_name="meshwright")
    assert result.exit_code == 0, result.stderr
    return float(json.loads(result.stdout)["step_time_s"])


def test_only_the_types_that_take_part_set_the_pace(tmp_path: Path) -> None:
    """Four devices of the first node: the other node is idle, unless the first is the slow one."""
    strategy = str(write_plan(one_stage(axes=(("data", 2), ("tensor", 2))), tmp_path / "strategy.json"))
    alone = {name: simulated(strategy, "--hw", name) for name in TYPES}
    assert alone["dgx1-v100"] != alone["dgx-a100"]
    for types in (TYPES, TYPES[::-1]):
        path = str(cluster(tmp_path, *types))
        found = simulated(strategy, "--hw", path)
        assert found == pytest.approx(alone[types[0]], rel=1e-9)
        assert simulated(strategy, "--hw", path, "--engine", "reference") == pytest.approx(found, rel=1e-9)


def test_a_profile_is_no_cluster(tmp_path: Path) -> None:
    assert cluster_at("dgx-a100") is None
    found = cluster_at(str(cluster(tmp_path, *TYPES)))
    assert found is not None
    assert [node.name for node in found.nodes] == [load_profile(name).name for name in TYPES]


def test_named_software_runs_on_every_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices of the first node, as on a cluster of its type alone; slower than with what is usual."""
    monkeypatch.undo()
    strategy = str(write_plan(one_stage(axes=(("data", 2), ("tensor", 2))), tmp_path / "strategy.json"))
    path = str(cluster(tmp_path, *TYPES))
    usual, named, alone = (
        simulated(strategy, "--hw", *given)
        for given in (
            (path,),
            (path, "--software", "megatron_deepspeed"),
            (TYPES[0], "--software", "megatron_deepspeed"),
        )
    )
    assert named == pytest.approx(alone, rel=1e-9)
    assert named > usual
