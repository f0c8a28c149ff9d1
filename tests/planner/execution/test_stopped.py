"""Nobody but this host reaches a run, and whichever of its processes is stopped, the others end."""

import multiprocessing.forkserver
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.execution.launch import joining
from planner.execution.launch.joining import LISTEN, meet
from planner.execution.launch.membership import Membership
from simulator.calibration import launch
from simulator.calibration.launch import run_workers
from simulator.errors import ExecutionError
from tests.planner.execution.processes import (
    MARK,
    alive,
    is_loopback,
    listening,
    marked,
    parent,
    state,
    wait_until_gone,
)

ROOT = Path(__file__).parents[3]
PROMISE_S = 30.0
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at processes in /proc")


def connected(folder):
    """Connect to all other ranks, say so, and wait."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    (Path(folder) / f"{dist.get_rank()}").write_text(str(os.getpid()))
    time.sleep(600)


def stops(folder, rank):
    """One rank is stopped before it has joined the others."""
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.init_process_group("gloo")


def rank_of_place():
    return os.environ["RANK"]


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.planner.execution.test_stopped import connected
from simulator.calibration.launch import run_workers
from simulator.errors import ExecutionError
if __name__ == "__main__":
    try:
        run_workers(connected, (sys.argv[1],), 2)
    except ExecutionError as error:
        sys.exit(str(error))
"""


@pytest.fixture
def started(tmp_path):
    """A program that runs two ranks, its mark, and the processes of the ranks."""
    mark = secrets.token_hex(8)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, MARK: mark},
    )
    files = [tmp_path / "0", tmp_path / "1"]
    end = time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < end:
        time.sleep(0.05)
    yield process, mark, [int(file.read_text()) for file in files]
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)
    process.communicate()


def test_a_run_listens_on_the_loopback_alone(started):
    process, mark, ranks = started
    everyone = marked(mark)
    assert {process.pid, *ranks} < set(everyone)
    found = listening(everyone)
    assert found, "the ranks have met"
    assert all(map(is_loopback, found)), found


@pytest.mark.slow
def test_a_stopped_launcher_does_not_keep_its_ranks(started):
    process, mark, ranks = started
    server = parent(ranks[0])
    os.kill(process.pid, signal.SIGSTOP)
    assert wait_until_gone([*ranks, server], PROMISE_S) == []
    os.kill(process.pid, signal.SIGCONT)
    _, errors = process.communicate(timeout=PROMISE_S)
    assert process.returncode == 1
    assert "failed: ExecutionError: the process that started the ranks was stopped (SIGSTOP)" in errors
    assert wait_until_gone(marked(mark), PROMISE_S) == []


@pytest.mark.slow
def test_nothing_is_left_of_stopped_ranks_whose_launcher_is_killed(started):
    process, mark, ranks = started
    for pid in (*ranks, parent(ranks[0])):
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    left = wait_until_gone([*ranks], PROMISE_S)
    server = [pid for pid in marked(mark) if state(pid) == "T"]
    for pid in server:  # a stopped server can only be ended by ranks that run
        os.kill(pid, signal.SIGCONT)
    assert wait_until_gone([*ranks, *left, *marked(mark)], PROMISE_S) == []


@pytest.mark.slow
def test_a_server_stopped_beside_its_killed_launcher_is_ended_by_a_rank(started):
    process, mark, ranks = started
    os.kill(parent(ranks[0]), signal.SIGSTOP)
    process.kill()
    assert wait_until_gone([*ranks, *marked(mark)], PROMISE_S) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_stopped_while_it_starts_ends_the_run(rank, tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STOPPED_S", 2.0)
    monkeypatch.setattr(launch, "SHUTDOWN_S", 0.5)
    begin = time.monotonic()
    with pytest.raises(ExecutionError, match=rf"rank {rank} of 2 failed: it has been stopped \(SIGSTOP\) for 2 s"):
        run_workers(stops, (str(tmp_path), rank), 2)
    assert time.monotonic() - begin < PROMISE_S
    assert not [one for one in range(2) if alive(int((tmp_path / str(one)).read_text()))]


def test_a_stopped_server_is_replaced(monkeypatch):
    monkeypatch.setattr(launch, "STOPPED_S", 2.0)
    assert run_workers(rank_of_place, (), 2) == ["0", "1"]
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    with pytest.raises(ExecutionError, match="the server that starts the ranks failed: it has been stopped"):
        run_workers(rank_of_place, (), 2)
    assert run_workers(rank_of_place, (), 2) == ["0", "1"]


def test_an_interrupt_does_not_wait_for_a_start(monkeypatch):
    assert run_workers(rank_of_place, (), 1) == ["0"]
    os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGSTOP)
    seen = launch._NotedSignals.check

    def check(noted):
        noted.note(signal.SIGINT, None)
        seen(noted)

    with monkeypatch.context() as patch:
        patch.setattr(launch._NotedSignals, "check", check)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run_workers(rank_of_place, (), 1)
        assert time.monotonic() - begin < 10
    assert run_workers(rank_of_place, (), 1) == ["0"]


def test_an_interrupt_before_the_server_runs_does_not_wait_for_it(monkeypatch):
    util, starting, interrupted = multiprocessing.forkserver.util, threading.Event(), threading.Event()
    spawn = util.spawnv_passfds

    def spawn_late_and_stopped(path, arguments, files):
        if "forkserver" not in " ".join(map(str, arguments)):
            return spawn(path, arguments, files)
        starting.set()
        interrupted.wait()
        time.sleep(1)  # meanwhile the main thread ends what it knows of
        pid = spawn(path, arguments, files)
        os.kill(pid, signal.SIGSTOP)
        return pid

    def check(noted):
        if starting.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    multiprocessing.forkserver._forkserver._stop()
    with monkeypatch.context() as patch:
        patch.setattr(launch._NotedSignals, "check", check)
        patch.setattr(util, "spawnv_passfds", spawn_late_and_stopped)
        with pytest.raises(KeyboardInterrupt):
            run_workers(rank_of_place, (), 1)
    assert run_workers(rank_of_place, (), 1) == ["0"]


def test_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with launch._noted_signals() as noted:
            os.kill(os.getpid(), signal.SIGHUP)
            noted.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


# Jobs of several hosts


def member(address, *, rank=0, size=1):
    with socket.socket() as probe:
        probe.bind((address if address[0].isdigit() else "127.0.0.1", 0))
        port = probe.getsockname()[1]
    return Membership(launcher="test", rank=rank, world_size=size, local_rank=0, address=address, port=port)


def test_the_first_rank_listens_where_the_job_says_alone():
    here = member("127.0.0.1")
    before = listening([os.getpid()])
    store = meet(here, 10.0, "a")
    assert listening([os.getpid()]) - before <= {"127.0.0.1"}
    del store


def test_the_user_may_say_where_the_first_rank_listens(monkeypatch):
    monkeypatch.setenv(LISTEN, "127.0.0.2")
    with joining._listen(member("localhost")) as found:
        assert found.getsockname()[0] == "127.0.0.2"


def test_a_name_that_means_the_loopback_is_no_place_for_other_hosts(monkeypatch):
    monkeypatch.setattr(joining, "means_loopback", lambda host: True)
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 1))]
    )
    with pytest.raises(ExecutionError, match=r"the name node7 stands for 127.0.1.1, which no other host reaches; .*"):
        joining._listen(member("node7", size=2))
