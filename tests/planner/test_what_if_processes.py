"""Sweeps in local processes: same rows, dead workers, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from planner.graph.operator_graph import OperatorGraph
from planner.planning.planning import PlanRequest, capture_for
from planner.what_if import WhatIfOptions, row_document, what_if
from planner.what_if.options import requests_of
from planner.what_if.processes import in_processes, usable_cores
from planner.what_if.rows import WhatIfRow, graph_text, row_of, shared_of
from simulator.calibration import process
from simulator.errors import MeshwrightError, UnsupportedError
from tests.results import infeasible_result

OPTIONS = WhatIfOptions(network="zoo:gpt2-tiny", hardware=("dgx-a100",), device_counts=(8, 16, 24, 32))
TIMES = ("elapsed_s", "capture_s", "simulation_s", "timings")


@pytest.fixture(scope="module")
def graph() -> OperatorGraph:
    return capture_for(requests_of(OPTIONS)[0])


# What the processes do instead of planning


def answer(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    assert shared_of(text).graph.fingerprint
    return number, row_of(request, infeasible_result())


def die_at_24(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    if request.devices == 24:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(number, request, text)


def hit_once(by: signal.Signals, mark: Path, number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    with suppress(FileExistsError):
        mark.touch(exist_ok=False)
        os.kill(os.getpid(), by)
    return answer(number, request, text)


def sleep_after_the_first(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    if number:
        time.sleep(600)
    return answer(number, request, text)


def refuse(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    raise UnsupportedError("pp is not supported yet")


def requests() -> dict[int, PlanRequest]:
    return dict(enumerate(requests_of(OPTIONS)))


def test_every_point_is_planned_once(graph: OperatorGraph) -> None:
    rows = dict(in_processes(graph, requests(), 2, pytest.fail, answer))
    assert {number: row.devices for number, row in rows.items()} == {0: 8, 1: 16, 2: 24, 3: 32}


def test_a_point_at_which_processes_die_is_named(graph: OperatorGraph) -> None:
    notes: list[str] = []
    done: list[tuple[int, WhatIfRow]] = []
    with pytest.raises(MeshwrightError, match="zoo:gpt2-tiny on 24 devices of dgx-a100: .* died, twice .*SIGKILL"):
        done.extend(in_processes(graph, requests(), 2, notes.append, die_at_24))
    assert len(notes) == 1
    assert "SIGKILL" in notes[0]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_is_stopped_once_stops_nothing(
    by: signal.Signals, graph: OperatorGraph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOOK_S", 0.1)
    monkeypatch.setattr(process, "STOPPED_S", 0.3)
    notes: list[str] = []
    rows = dict(in_processes(graph, requests(), 2, notes.append, partial(hit_once, by, tmp_path / "hit")))
    assert sorted(rows) == [0, 1, 2, 3]
    assert len(notes) == 1


STOPPED_AT_EXIT = """
import multiprocessing, os, signal
from joblib import Parallel, delayed
from simulator.calibration import process

process.LOOK_S, process.STOPPED_S = 0.1, 0.3
process.kill_stopped_children_until_exit()
Parallel(n_jobs=2)(delayed(abs)(number) for number in range(4))
for child in multiprocessing.active_children():
    os.kill(child.pid, signal.SIGSTOP)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_idle_processes_that_are_stopped_do_not_keep_the_command_from_ending() -> None:
    subprocess.run([sys.executable, "-c", STOPPED_AT_EXIT], check=True, timeout=60)


def test_a_sweep_that_is_left_early_says_nothing(graph: OperatorGraph, recwarn: pytest.WarningsRecorder) -> None:
    rows = in_processes(graph, requests(), 2, pytest.fail, sleep_after_the_first)
    assert next(rows)[0] == 0
    rows.close()
    assert [str(warning.message) for warning in recwarn] == []


def test_errors_of_processes_arrive_as_they_were(graph: OperatorGraph) -> None:
    with pytest.raises(UnsupportedError, match="pp is not supported yet"):
        list(in_processes(graph, requests(), 2, pytest.fail, refuse))


def test_a_process_reads_the_network_once(graph: OperatorGraph) -> None:
    text = graph_text(graph)
    assert shared_of(text).graph == graph
    assert shared_of(text) is shared_of(str(text.encode(), "utf-8"))


def test_cores_that_may_be_used_are_those_of_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.slow
def test_jobs_do_not_change_the_result() -> None:
    options = replace(OPTIONS, device_counts=(8, 16))
    found = [[row_document(row) for row in what_if(options, jobs=jobs)] for jobs in (1, 2)]
    for document in (*found[0], *found[1]):
        for name in TIMES:
            del document["search"][name]
    assert json.dumps(found[0]) == json.dumps(found[1])


def session_members(session: int) -> list[int]:
    """Processes of a session that still run, the dead that wait for their parent left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, member_of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(member_of) == session and state != "Z":
            found.append(int(folder.name))
    return found


def wait_until(condition: object, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.05)


def sweep_command(report: Path) -> list[str]:
    command = [sys.executable, "-m", "planner.cli", "what-if", "zoo:gpt2", "--hw", "dgx-a100"]
    return [*command, "--devices", "8,16,32", "--jobs", "2", "--out", str(report), "--json"]


def start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


reads_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")


@pytest.mark.slow
@reads_proc
@pytest.mark.parametrize("to_all", [False, True], ids=["this process", "all processes of the terminal"])
def test_ctrl_c_ends_every_process_and_the_next_run_goes_on(to_all: bool, tmp_path: Path) -> None:
    report, journal = tmp_path / "report.html", tmp_path / "report.html.partial.jsonl"
    command = sweep_command(report)
    running = start(command)
    wait_until(lambda: journal.exists() and b"\n" in journal.read_bytes())
    assert len(session_members(running.pid)) > 2
    (os.killpg if to_all else os.kill)(running.pid, signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130
    points = len(journal.read_bytes().splitlines())
    assert errors.splitlines()[-2:] == [
        f"{points} of 3 points are kept in {journal}; the same command goes on from there",
        "meshwright: interrupted",
    ]
    assert "Traceback" not in errors
    wait_until(lambda: not session_members(running.pid), 10)
    assert not report.exists()

    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "of 3 points from the interrupted run" in done.stderr
    assert len(json.loads(done.stdout)["rows"]) == 3
    assert report.exists()
    assert not journal.exists()


@pytest.mark.slow
@reads_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_one_that_was_killed(number: signal.Signals, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    running = start(sweep_command(report))
    wait_until(lambda: Path(f"{report}.partial.jsonl").exists() and len(session_members(running.pid)) > 3)
    time.sleep(3)  # the processes import what they need before they watch
    os.kill(running.pid, number)
    running.communicate(timeout=60)
    wait_until(lambda: not session_members(running.pid), 20)
