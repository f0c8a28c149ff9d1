"""The command line on plans with pipeline stages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from planner.cli.app import app
from planner.plans.file import read_plan, write_plan
from simulator.schedules import make_schedule
from simulator.schedules.exchange import format_schedule_csv
from tests.planner.lowering.plans import one_stage, pipelined, recomputing
from tests.planner.search.problems import captured

GRAPH = captured("gpt2-tiny")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="meshwright")


@pytest.fixture(scope="module")
def strategy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = recomputing(one_stage(axes=(("data", 2), ("tensor", 2)), storage="sharded"), GRAPH, "full")
    return write_plan(pipelined(plan, GRAPH, 2, "1f1b"), tmp_path_factory.mktemp("plans") / "pipeline.json")


def test_simulate_says_what_every_rank_does(strategy: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    found = json.loads(run("simulate", str(strategy), "--json", "--trace", str(trace)).stdout)
    reference = json.loads(run("simulate", str(strategy), "--json", "--engine", "reference").stdout)
    assert reference["step_time_s"] == pytest.approx(found["step_time_s"], rel=1e-12)
    assert sum(found["prediction"]["breakdown"].values()) == pytest.approx(found["step_time_s"])
    plan = found["plan"]
    assert (plan["devices"], plan["pp"], plan["schedule"], plan["recompute"]) == (8, 2, "1f1b", "full")
    peaks = [rank["peak_memory_bytes"] for rank in found["ranks"]]
    assert max(peaks) == found["prediction"]["peak_memory_bytes"]
    assert any(operator["name"].startswith("recompute ") for operator in found["operators"])
    assert {message["axis"] for message in found["collectives"]} <= {"data", "tensor"}
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    shown = run("simulate", str(strategy)).stdout
    for words in ("2 ranks, 1f1b", "peak memory", "on pipeline rank", "blocks.1", "idle"):
        assert words in shown


@pytest.mark.parametrize("schedule", ["zbv", "dualpipe_v"])
def test_what_plan_writes_simulate_reads(schedule: str, tmp_path: Path) -> None:
    """Nothing in a breakdown is less than nothing because sums were taken in another order."""
    out = str(tmp_path / "strategy.json")
    pins = ("--pin", "pp=2", "--pin", "micro_batch=2", "--pin", f"schedule={schedule}")
    request = ("zoo:gpt2-tiny", "--hw", "dgx-a100", "--devices", "2", "--global-batch", "16", *pins)
    planned = run("plan", *request, "--out", out, "--top", "1", "--json")
    assert planned.exit_code == 0, planned.stderr
    simulated = run("simulate", out, "--json")
    assert simulated.exit_code == 0, simulated.stderr
    found = json.loads(simulated.stdout)
    assert (found["plan"]["schedule"], found["plan"]["vpp"]) == (schedule, 2)
    assert min(found["prediction"]["breakdown"].values()) >= 0
    assert found["step_time_s"] == pytest.approx(json.loads(planned.stdout)["prediction"]["step_time_s"])


def test_a_schedule_from_a_file_orders_the_passes(strategy: Path, tmp_path: Path) -> None:
    plan = read_plan(strategy)
    path = tmp_path / "gpipe.csv"
    path.write_text(format_schedule_csv(make_schedule("gpipe", 2, plan.micro_batches)))
    usual, other = (
        json.loads(run("simulate", str(strategy), "--json", *more).stdout)["prediction"]["peak_memory_bytes"]
        for more in ((), ("--schedule-file", str(path)))
    )
    assert other > usual


def test_one_stage_has_no_schedule(tmp_path: Path) -> None:
    one = write_plan(one_stage(), tmp_path / "one.json")
    result = run("simulate", str(one), "--schedule-file", "none.csv")
    assert result.exit_code == 2
    assert "the plan has one stage" in result.stderr


def test_slow_ranks_links_and_failures_of_a_pipeline(strategy: Path) -> None:
    options = ("--stragglers", "1", "--slow-link", "NVSwitch=0.5", "--goodput", "--device-mtbf", "1e6", "--days", "3")
    texts = [run("simulate", str(strategy), *options, "--seed", "2", "--json").stdout for _ in range(2)]
    assert texts[0] == texts[1]
    found = json.loads(texts[0])
    assert found["stragglers"]["slowdown"] > 1.0
    assert [rank["factor"] for rank in found["stragglers"]["slow_ranks"]] == [1.5]
    assert set(found["stragglers"]["slow_link_ranks"]) == {"NVSwitch"}
    assert 0.9 < found["goodput"]["goodput"] < 1.0
    assert found["goodput"]["job_mtbf_s"] == pytest.approx(1e6 / 8)
    shown = run("simulate", str(strategy), *options).stdout
    for words in ("stragglers", "slow ranks", "slow links", "NVSwitch of rank", "goodput", "checkpoint"):
        assert words in shown


def test_chunks_that_contradict_the_network_name_the_file(strategy: Path, tmp_path: Path) -> None:
    plan = read_plan(strategy)
    wrong = replace(plan, chunks=(replace(plan.chunks[0], last="blocks.0"), plan.chunks[1]))
    path = write_plan(wrong, tmp_path / "wrong.json")
    result = run("simulate", str(path))
    assert result.exit_code == 2
    assert f"{path}: stages.1" in result.stderr
