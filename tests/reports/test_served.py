"""The page that plans, asked over the loopback."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image

from reports.served import LOOPBACK, Served, State, server
from simulator.errors import InputError

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=20)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with server(0, Served.with_shipped()) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running.server_address[1]
        running.shutdown()
        thread.join()


def asked(port: int, path: str, host: str | None = None) -> tuple[int, str]:
    connection = HTTPConnection(LOOPBACK, port, timeout=60)
    try:
        connection.request("GET", path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


@given(TEXT, TEXT, TEXT)
def test_a_link_reproduces_the_state(network: str, hw: str, pins: str) -> None:
    state = State(network=network or "a", hw=hw or "b", pins=pins)
    assert State.of(state.link().removeprefix("/?")) == state


def test_a_link_shows_the_plans(port: int) -> None:
    status, text = asked(port, State(network="zoo:mlp", hw="dgx-a100", devices="8", pins="tp=2").link())
    assert status == 200
    for words in (
        "Best plans",
        "tp=2",
        "One step, simulated",
        "<svg",
        "Memory at its peak",
        "<option selected>zoo:mlp",
    ):
        assert words in text
    assert 'value="tp=2"' in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State(network="py:os:system"), "not served"),
        (State(hw="/etc/passwd"), "not served"),
        (State(hw="/etc/passwd:network=1Gb"), "not served"),
        (State(hw="rank_table.json"), "not served"),
        (State(devices="-1"), "whole number"),
        (State(pins="nonsense=1"), "choose one of dp"),
        (State(network="zoo:mlp", hw="dgx-a100", devices="9"), "9 devices do not fit"),
        (State(pins="<script>alert(1)</script>"), "&lt;script&gt;"),
    ],
)
def test_what_is_wrong_is_said_on_the_page(port: int, state: State, said: str) -> None:
    status, text = asked(port, state.link())
    assert (status, said in text) == (400, True)
    assert "<script>alert" not in text


def test_other_pages_names_and_hosts_are_refused(port: int) -> None:
    assert asked(port, "/other")[0] == 404
    assert asked(port, "/?" + "a" * 3000)[0] == 404
    status, text = asked(port, "/?unknown=1")
    assert status == 400
    assert "'unknown' is nothing that the page knows; use devices, global_batch, hw" in text
    assert asked(port, "/", host="evil.example")[0] == 403
    assert asked(port, "/", host="evil.example:80")[0] == 403


def test_a_taken_port_is_an_error(port: int) -> None:
    with pytest.raises(InputError, match=f"--port {port}: .*choose another, or 0"):
        server(port, Served((), ()))
    with pytest.raises(InputError, match="--port 70000"):
        server(70000, Served((), ()))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_shows_the_plan_and_its_form_holds_the_state(port: int, tmp_path: Path) -> None:
    state = State(network="zoo:gpt2-tiny", hw="dgx-a100", devices="16", pins="tp=2 pp=2")
    dump = browsed(port, state, tmp_path, "--dump-dom")
    fields = dict(re.findall(r'<input name="(\w+)" value="([^"]*)"', dump))
    chosen = dict(re.findall(r'<select name="(\w+)">.*?<option selected="">([^<]*)', dump))
    assert State(**fields, **chosen) == state
    assert dump.count("<title>device ") == 16
    shot = tmp_path / "page.png"
    browsed(port, state, tmp_path, f"--screenshot={shot}")
    pixels = image.imread(shot)[..., :3].reshape(-1, 3)
    assert len(np.unique(pixels, axis=0)) > 50


def browsed(port: int, state: State, folder: Path, act: str) -> str:
    """What Chromium makes of the page in a window of 400 pixels."""
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'browser'}",
               "--window-size=400,3000", act, f"http://{LOOPBACK}:{port}{state.link()}"]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
