"""Hosts whose names stand for themselves alone reach each other all the same."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.execution.launch import joining
from planner.execution.launch.joining import VARIABLE, interface_of, name_interface
from planner.plans.file import write_plan
from tests.planner.execution.made import make_plan

ROOT = Path(__file__).parents[3]
LOOPBACK = "127.0.0.1"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the addresses of interfaces")


@linux
def test_interfaces_are_found_by_address() -> None:
    found = interface_of(LOOPBACK)
    assert found in {name for _, name in socket.if_nameindex()}
    assert interface_of("192.0.2.1") is None


@linux
def test_the_way_to_the_meeting_point_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that what is named here goes with the test
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(joining, "_own_address", lambda *_: LOOPBACK)
    monkeypatch.setattr(joining, "means_loopback", lambda host: host == socket.gethostname())
    assert name_interface("host0", 29400) == interface_of(LOOPBACK) == os.environ[VARIABLE]


@pytest.mark.parametrize("case", ["chosen", "one host", "named well", "no way"])
def test_what_works_is_left_alone(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if case == "chosen":
        monkeypatch.setenv(VARIABLE, "ib0")
    answers = {"one host": True, "named well": False}
    alone = answers.get(case)
    monkeypatch.setattr(
        joining, "means_loopback", lambda host: host == socket.gethostname() if alone is None else alone
    )
    monkeypatch.setattr(joining, "_own_address", lambda *_: None)
    assert name_interface("host0", 29400) is None
    assert os.environ.get(VARIABLE) == ("ib0" if case == "chosen" else None)


# Two network namespaces stand for two hosts


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces, joined by a cable: 198.51.100.1 and 198.51.100.2."""
    token = secrets.token_hex(3)
    names = f"mwa{token}", f"mwb{token}"
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
            for number, name in enumerate(names, 1):
                _ip("-n", name, "addr", "add", f"198.51.100.{number}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "cable", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30)


@pytest.mark.slow
@linux
def test_hosts_that_only_a_network_joins_train_together(hosts: tuple[str, str], tmp_path: Path) -> None:
    write_plan(make_plan("zoo:mlp", 2, batch=16, dp=2), tmp_path / "strategy.json")
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    unnamed = {name: value for name, value in os.environ.items() if name != VARIABLE}
    started = []
    for node, host in enumerate(hosts):
        command = [
            *("ip", "netns", "exec", host, sys.executable, *launcher),
            *("--node-rank", str(node), "--master-addr", "198.51.100.1", "--master-port", "29400"),
            *("-m", "planner.cli", "execute", str(tmp_path / "strategy.json"), "--quiet"),
            *("--steps", "3", "--verify", "--precision", "fp64", "--device", "cpu"),
        ]
        with (tmp_path / f"out{node}").open("w") as out, (tmp_path / f"errors{node}").open("w") as errors:
            started.append(subprocess.Popen(command, cwd=ROOT, env=unnamed, stdout=out, stderr=errors))
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.terminate()
    assert codes == [0, 0], [(tmp_path / f"errors{node}").read_text() for node in range(2)]
    assert [bool((tmp_path / f"out{node}").read_text().strip()) for node in range(2)] == [True, False]
