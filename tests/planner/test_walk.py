"""One walk through every room: plan, simulate, what-if and execute a small network from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app


def run(*arguments: str) -> dict[str, object]:
    """The document that a command prints."""
    result = CliRunner().invoke(app, [*arguments, "--json"], prog_name="meshwright")
    assert result.exit_code == 0, result.stderr
    document: dict[str, object] = json.loads(result.stdout)
    return document


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A plan of the MLP for two devices, written to strategy.json."""
    monkeypatch.chdir(tmp_path)
    return run("plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "2", "--precision", "fp32", "--pin", "dp=2")


def test_plan_and_simulate_agree_and_the_trace_opens(planned: dict[str, object]) -> None:
    prediction = planned["prediction"]
    assert isinstance(prediction, dict)
    for engine in ("fast", "reference"):
        simulated = run("simulate", "strategy.json", "--engine", engine, "--trace", "timeline.json")
        assert simulated["step_time_s"] == pytest.approx(prediction["step_time_s"], rel=1e-12)
    trace = json.loads(Path("timeline.json").read_text())
    assert {event["ph"] for event in trace["traceEvents"]} >= {"X", "C"}


def test_plans_are_the_same_every_time(planned: dict[str, object]) -> None:
    first = Path("strategy.json").read_bytes()
    run("plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "2", "--precision", "fp32", "--pin", "dp=2")
    assert Path("strategy.json").read_bytes() == first


def test_what_if_writes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = run("what-if", "zoo:mlp", "--hw", "dgx-a100", "--devices", "1,2,…,8", "--out", "report.html")
    rows = document["rows"]
    assert isinstance(rows, list)
    assert [row["devices"] for row in rows] == [1, 2, 4, 8]
    assert document["report"] == "report.html"
    assert "What if: zoo:mlp" in Path("report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_plan_trains_as_one_process_does(planned: dict[str, object]) -> None:
    result = run(
        *("execute", "strategy.json", "--processes", "2", "--steps", "4", "--verify"),
        *("--precision", "fp64", "--out", "run.json"),
    )
    assert json.loads(Path("run.json").read_text()) == result
    difference = result["max_loss_difference"]
    assert isinstance(difference, float)
    assert difference <= 1e-10
    assert set(result) >= {
        *("processes", "backend", "steps", "losses", "reference_losses", "max_loss_difference"),
        *("measured_step_time_s", "predicted_step_time_s", "error", "measured_peak_memory_bytes"),
    }
