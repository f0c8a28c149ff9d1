"""`meshwright profiles rank-table`, and planning on the cluster that a table describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app

runner = CliRunner()
A2 = "ascend910b-atlas800t-a2"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_written_table_is_a_cluster_to_plan_on() -> None:
    assert runner.invoke(app, ["profiles", "rank-table", A2, "--servers", "10.0.0.1,10.0.0.2"]).exit_code == 0
    table = json.loads(Path("rank_table.json").read_text())
    assert [device["rank_id"] for server in table["server_list"] for device in server["device"]] == [
        str(rank) for rank in range(16)
    ]
    options = ["--hw", f"{A2}@rank_table.json", "--devices", "16", "--out", "plans/strategy.json", "--json"]
    Path("plans").mkdir()
    planned = runner.invoke(app, ["plan", "zoo:mlp", *options])
    assert planned.exit_code == 0, planned.output
    simulated = runner.invoke(app, ["simulate", "plans/strategy.json", "--json"])
    step = json.loads(planned.stdout)["prediction"]["step_time_s"]
    assert json.loads(simulated.stdout)["prediction"]["step_time_s"] == pytest.approx(step)


def test_a_table_takes_another_form() -> None:
    runner.invoke(app, ["profiles", "rank-table", A2, "--servers", "10.0.0.1", "--out", "new.json"])
    result = runner.invoke(app, ["profiles", "rank-table", "new.json", "--form", "group_list", "--out", "old.json"])
    assert result.exit_code == 0
    assert len(json.loads(Path("old.json").read_text())["group_list"][0]["instance_list"]) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([A2], "--servers is missing"),
        ([A2, "--servers", "a,a"], "stand"),
        ([A2, "--servers", "a,b", "--devices-per-server", "9"], "device_id 8"),
        ([A2, "--servers", "a", "--form", "2.0"], "no form '2.0'; use one of group_list, 1.0, 1.2"),
        ([A2, "--servers", "a,b", "--device-ip", "192.0.0.{rank}"], "use {server} and {device}"),
        ([A2, "--servers", "a,b", "--device-ip", "192.0.0.{device}"], "device_ip 192.0.0.0 stands 2 times"),
        (["dgx-a100", "--servers", "a"], "rank tables describe Ascend servers"),
        (["none.json"], "'none.json' does not exist"),
        (["none.json", "--servers", "a"], "leave out --servers"),
    ],
)
def test_wrong_requests_end_with_two(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["profiles", "rank-table", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ") or message in str(result.exception)
    assert not Path("rank_table.json").exists()


def test_a_cluster_file_is_checked_as_one() -> None:
    runner.invoke(app, ["profiles", "rank-table", A2, "--servers", "10.0.0.1"])
    Path("topo.txt").write_text("\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n")
    for file, said in ((f"{A2}@rank_table.json", "8 devices"), ("dgx-a100@topo.txt", "devices as the file joins them")):
        found = runner.invoke(app, ["profiles", "check", file])
        assert found.exit_code == 0, found.output
        assert said in found.output
        assert f"plan with --hw {file}" in found.output
    for file, said in (("rank_table.json", f"--hw {A2}@rank_table.json"), ("topo.txt", "dgx-a100@topo.txt")):
        found = runner.invoke(app, ["profiles", "check", file])
        assert found.exit_code == 2
        assert said in found.output
