"""A network's own code may crash, wait or run for ever: planning says so, and goes on living."""

import ctypes
import faulthandler
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from planner.networks import child, load_network
from planner.networks.child import LIMIT, in_child
from simulator.errors import InputError, NetworkError
from simulator.machine_memory import free_memory
from tests.planner.execution.processes import alive

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Without the stacks that Python writes when a process crashes, and in a child even where other tests trained."""
    monkeypatch.setattr(child, "_one_thread", lambda: torch.set_num_threads(1))
    enabled = faulthandler.is_enabled()
    faulthandler.disable()
    yield
    if enabled:
        faulthandler.enable()


def spin():
    while True:
        pass


def raise_base():
    raise type("Odd", (BaseException,), {})("of its own")


@pytest.mark.parametrize(
    ("work", "words"),
    [
        (os.abort, "ends the process with signal SIGABRT; correct it"),
        (lambda: ctypes.string_at(0), "ends the process with signal SIGSEGV"),
        (lambda: os._exit(3), "ends the process with exit code 3"),
        (lambda: os._exit(0), "ends the process with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "SIGKILL .*memory runs out"),
        (raise_base, "raises Odd: of its own"),
        (lambda: lambda: None, "cannot be passed on"),
        (lambda: os.closerange(3, 1000), "connection"),
    ],
    ids=["abort", "segment", "exit", "exit 0", "kill", "odd error", "no value", "closes all"],
)
def test_what_ends_it_is_told(work, words):
    if words == "connection":
        words = r"its code (closes the connection|ends the process)"
    with pytest.raises(NetworkError, match=rf"network 'py:a:b': .*{words}"):
        in_child("py:a:b", work)


def test_a_module_larger_than_the_memory_is_an_error_before_it_is_filled():
    gigabytes = 2 * (free_memory() or 2**40) // 2**30 + 8

    def make():
        return len([torch.empty(2**30, dtype=torch.uint8) for _ in range(gigabytes)])  # pages are never touched

    with pytest.raises(NetworkError, match="py:a:b.*memory"):
        in_child("py:a:b", make)


def test_its_own_errors_come_as_they_are():
    def fail():
        raise InputError("a value; the rule; a remedy")

    with pytest.raises(InputError, match="a value; the rule; a remedy"):
        in_child("py:a:b", fail)


@pytest.mark.parametrize("work", [signal.pause, lambda: os.kill(os.getpid(), signal.SIGSTOP)], ids=["waits", "stopped"])
def test_what_waits_for_ever_is_ended(work, tmp_path, monkeypatch):
    monkeypatch.setattr(child, "IDLE_S", 2.0)
    monkeypatch.setattr(child, "POLL_S", 0.2)

    def told():
        (tmp_path / "pid").write_text(str(os.getpid()))
        work()

    with pytest.raises(NetworkError, match="has waited for 2 s without computing"):
        in_child("py:a:b", told)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_what_computes_for_ever_is_ended(monkeypatch):
    monkeypatch.setenv(LIMIT, "1.5")
    monkeypatch.setattr(child, "POLL_S", 0.2)
    begin = time.monotonic()
    with pytest.raises(NetworkError, match=rf"has not ended within 1.5 s; .*{LIMIT}"):
        in_child("py:a:b", spin)
    assert time.monotonic() - begin < 30


def test_nothing_it_does_changes_this_process(tmp_path, capfd):
    def meddle():
        print("said")
        os.chdir(tmp_path)
        torch.set_default_dtype(torch.float64)
        os.environ["MEDDLED"] = "1"
        return os.getpid()

    before = Path.cwd()
    assert in_child("py:a:b", meddle) != os.getpid()
    assert (Path.cwd(), torch.get_default_dtype(), "MEDDLED" in os.environ) == (before, torch.float32, False)
    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "said\n")


def test_a_process_that_has_trained_does_it_itself():
    script = (
        "import os, torch; from planner.networks.child import in_child; "
        "torch.nn.Linear(2, 2)(torch.zeros(1, 2)).sum().backward(); "
        "work = lambda: (torch.nn.Linear(2, 2)(torch.zeros(1, 2)).sum().backward(), os.getpid())[1]; "
        "in_child('py:a:b', work); print('done')"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr


class Crashing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        os.abort()


SOURCE = "from tests.planner.networks.test_child import Crashing\nimport torch\n"
SOURCE += "def make(): return Crashing(), torch.zeros(4, 4)\n"


def test_a_network_that_crashes_when_it_is_captured_is_an_error(tmp_path, monkeypatch):
    name = f"crashing_{secrets.token_hex(4)}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    network = load_network(f"py:{name}:make")
    assert network.inputs[0].shape == (4,)
    with pytest.raises(NetworkError, match="ends the process with signal SIGABRT"):
        network.capture()
    assert isinstance(network.build(0), nn.Module)
