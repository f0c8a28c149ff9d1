"""The options of `meshwright what-if`, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import planner.planning.planning
from planner.cli.app import app
from planner.planning.planning import Candidate, PlanRequest, SearchResult
from simulator.errors import ProfileError
from tests.results import infeasible_result, make_plan, make_prediction, make_result

SWEEP = ("what-if", "zoo:gpt2", "--hw", "dgx-a100", "--devices", "8,16,32,64", "--jobs", "1")


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


class Planner:
    """Plans without searching; largest count first, Ctrl-C after `patience` points."""

    def __init__(self) -> None:
        self.requests: list[PlanRequest] = []
        self.patience = 100

    def __call__(self, request: PlanRequest, **_: object) -> SearchResult:
        if len(self.requests) == self.patience:
            raise KeyboardInterrupt
        self.requests.append(request)
        if request.devices == 8:
            return infeasible_result()
        if request.devices == 32:
            raise ProfileError("global batch 33 does not divide by 32 devices; use 32 or 64")
        candidate = Candidate(
            plan=make_plan(request.devices, 1), prediction=make_prediction(samples=request.global_batch or 0), reason=""
        )
        return SearchResult(
            status=make_result().status, candidates=(candidate,), elapsed_s=0.1, capture_s=0.0, messages=()
        )


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Planner:
    made = Planner()
    monkeypatch.setattr(planner.planning.planning, "plan_network", made)
    return made


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), prog_name="meshwright")


def test_points_that_fail_are_rows_with_their_reason(search: Planner) -> None:
    result = run(*SWEEP, "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [(row["devices"], row["status"]) for row in rows] == [
        *((8, "infeasible"), (16, "optimal"), (32, "infeasible"), (64, "optimal"))
    ]
    assert rows[0]["reason"].startswith("peak memory 120 GiB")
    assert rows[2]["reason"].startswith("global batch 33 does not divide")


def test_ctrl_c_keeps_the_points_and_says_how_to_go_on(search: Planner) -> None:
    search.patience = 3
    stopped = run(*SWEEP, "--out", "report.html")
    assert stopped.exit_code == 130
    journal = Path("report.html.partial.jsonl").resolve()
    assert f"3 of 4 points are kept in {journal}; the same command goes on from there" in stopped.stderr
    assert not Path("report.html").exists()

    search.patience = 100
    search.requests.clear()
    done = run(*SWEEP, "--out", "report.html")
    assert done.exit_code == 0, done.stderr
    assert "3 of 4 points from the interrupted run (--fresh plans them anew)" in done.stderr
    assert [request.devices for request in search.requests] == [8]
    assert Path("report.html").exists()
    assert not journal.exists()


def test_fresh_plans_every_point_anew(search: Planner) -> None:
    search.patience = 3
    run(*SWEEP, "--out", "report.html")
    search.patience = 100
    search.requests.clear()
    done = run(*SWEEP, "--out", "report.html", "--fresh")
    assert "interrupted" not in done.stderr
    assert len(search.requests) == 4


def test_ctrl_c_without_a_report_keeps_nothing(search: Planner) -> None:
    search.patience = 3
    stopped = run(*SWEEP)
    assert stopped.exit_code == 130
    assert stopped.stderr == "meshwright: interrupted\n"
    assert list(Path().iterdir()) == []


def test_ctrl_c_before_the_first_point_leaves_no_file(search: Planner) -> None:
    search.patience = 0
    stopped = run(*SWEEP, "--out", "report.html")
    assert (stopped.exit_code, stopped.stderr) == (130, "meshwright: interrupted\n")
    assert list(Path().iterdir()) == []


def test_quiet_says_nothing_of_the_journal(search: Planner) -> None:
    search.patience = 3
    assert run(*SWEEP, "--out", "report.html", "--quiet").stderr == "meshwright: interrupted\n"
    search.patience = 100
    done = run(*SWEEP, "--out", "report.html", "--quiet")
    assert (done.stdout, done.stderr) == ("report.html\n", "")


def test_the_batch_of_a_device(search: Planner) -> None:
    result = run(*SWEEP, "--batch-per-device", "3", "--json")
    assert json.loads(result.stdout)["batch_rule"] == "weak scaling: the global batch is 3 × devices"
    assert sorted(request.global_batch or 0 for request in search.requests) == [24, 48, 96, 192]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--batch-per-device", "3", "--global-batch", "64"),
            ["--batch-per-device 3", "--global-batch 64", "give one"],
        ),
        (("--cluster", "dask://localhost:1"), ["--jobs 1", "dask://localhost:1", "give one"]),
        (("--fresh",), ["--fresh", "--out"]),
        (("--jobs", "0"), ["'0'", "at least 1"]),
    ],
)
def test_options_that_contradict_say_so(options: tuple[str, ...], words: list[str], search: Planner) -> None:
    result = run(*SWEEP, *options)
    assert result.exit_code == 2
    assert search.requests == []
    for word in words:
        assert word in result.stderr
