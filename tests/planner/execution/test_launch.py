"""Workers end in every case: by themselves, by an error, by a signal, with their launcher."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from simulator.calibration.launch import ask_process, is_peer_failure, run_workers
from simulator.errors import ExecutionError
from tests.planner.execution.processes import wait_until_gone

ROOT = Path(__file__).parents[3]
SOON_S = 60


def _join(folder):
    (Path(folder) / os.environ["RANK"]).write_text(str(os.getpid()))
    dist.init_process_group("gloo", timeout=timedelta(seconds=2))
    dist.barrier()


def healthy(folder, value):
    _join(folder)
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), float(total) + value, torch.get_num_threads(), os.sched_getscheduler(0)


def killed(folder):
    _join(folder)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def raising(folder):
    _join(folder)
    if dist.get_rank() == 1:
        raise ValueError("the disk is full")
    dist.all_reduce(torch.ones(1))


def hanging(folder):
    _join(folder)
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.all_reduce(torch.ones(1))


def waiting(folder):
    _join(folder)
    time.sleep(600)


def alive(pid):
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_gone(folder, processes):
    pids = [int((folder / str(rank)).read_text()) for rank in range(processes)]
    end = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not [pid for pid in pids if alive(pid)]


def test_results_come_by_rank(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    found = run_workers(healthy, (str(tmp_path), 0.5), 2)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert [entry[:2] for entry in found] == [(0, 1.5), (1, 1.5)]
    assert {entry[2] for entry in found} == {1}
    if hasattr(os, "SCHED_BATCH"):
        assert {entry[3] for entry in found} == {os.SCHED_BATCH}
    assert_gone(tmp_path, 2)


def test_a_process_is_asked_and_ends():
    found = ask_process(os.getpid, (), __name__)
    assert found != os.getpid()
    assert not alive(found)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (killed, "rank 1 of 2 failed: it was ended by signal SIGKILL"),
        (raising, "rank 1 of 2 failed: ValueError: the disk is full"),
        pytest.param(hanging, "rank 0 of 2 failed: .*[Tt]imed out", marks=pytest.mark.slow),
    ],
)
def test_a_failing_rank_ends_the_others(tmp_path, function, words):
    start = time.monotonic()
    with pytest.raises(ExecutionError, match=words) as raised:
        run_workers(function, (str(tmp_path),), 2)
    assert time.monotonic() - start < SOON_S
    assert raised.value.exit_code == 4
    assert_gone(tmp_path, 2)
    logs = Path(str(raised.value).rpartition(" ")[2])
    assert logs.is_dir()


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.planner.execution.test_launch import waiting
from simulator.calibration.launch import run_workers
if __name__ == "__main__":
    try:
        run_workers(waiting, (sys.argv[1],), 2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def start_waiting(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    process = subprocess.Popen(
        [sys.executable, str(program), str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    end = time.monotonic() + 240  # the first import of torch reads gigabytes
    while not all((tmp_path / str(rank)).exists() for rank in range(2)) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)
    return process


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_an_interrupt_ends_all_without_a_traceback(tmp_path, number, code):
    process = start_waiting(tmp_path)
    # A terminal sends Ctrl-C to the whole group, workers included.
    os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
    _, errors = process.communicate(timeout=SOON_S)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert_gone(tmp_path, 2)


@pytest.mark.slow
def test_workers_die_with_their_launcher(tmp_path):
    process = start_waiting(tmp_path)
    process.kill()
    process.communicate(timeout=SOON_S)
    assert_gone(tmp_path, 2)


HELPER_STOPPED = """
import os, signal, time
from multiprocessing import resource_tracker
from simulator.calibration.launch import run_workers
from simulator.calibration.process import process_state

run_workers(os.getpid, (), 1, module="os")
helper = resource_tracker._resource_tracker._pid
os.kill(helper, signal.SIGSTOP)
while process_state(helper) != "T":
    time.sleep(0.01)
print(helper)
"""


@pytest.mark.slow
def test_a_stopped_helper_does_not_outlive_its_command():
    done = subprocess.run(
        [sys.executable, "-c", HELPER_STOPPED], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=SOON_S
    )
    try:
        assert wait_until_gone([int(done.stdout)], 10) == []
    finally:
        with suppress(ProcessLookupError):
            os.kill(int(done.stdout), signal.SIGKILL)


def test_peer_failures_are_told_from_own_ones():
    assert is_peer_failure(RuntimeError("Connection closed by peer"))
    assert is_peer_failure(RuntimeError("Timed out waiting 4000ms for recv"))
    assert not is_peer_failure(ValueError("connection string is wrong"))
    assert not is_peer_failure(RuntimeError("out of memory"))
