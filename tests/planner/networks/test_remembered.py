"""Networks of users' code are described once, and again when something that the code has read is different."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from planner.networks import Network, load_network, remembered
from tests.oracles.graph_interpreter import assert_equals_autograd

SOURCE = """
import json, os
import torch
from torch import nn
from {helper} import WIDTH


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, classes))

    def forward(self, x, label):
        return nn.functional.cross_entropy(self.layers(x), label)


def make():
    classes = json.load(open("classes.json")) + int(os.environ.get("MORE_CLASSES", "0"))
    return Net(classes), (torch.zeros(2, 6), torch.zeros(2, dtype=torch.long))
"""
_serial = count()


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    number = next(_serial)
    (tmp_path / f"remembered_helper_{number}.py").write_text("WIDTH = 8\n")
    (tmp_path / f"remembered_{number}.py").write_text(SOURCE.format(helper=f"remembered_helper_{number}"))
    (tmp_path / "classes.json").write_text("3")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"py:remembered_{number}:make"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the networks whose code has run."""
    called: list[str] = []
    real: Callable[..., Any] = remembered.in_child

    def noted(name: str, work: Callable[[], Any]) -> Any:
        called.append(name)
        return real(name, work)

    monkeypatch.setattr(remembered, "in_child", noted)
    monkeypatch.setattr("planner.networks.network.in_child", noted)
    return called


def parameters(network: Network) -> int:
    return network.capture().parameter_count


def described(network: Network) -> Network:
    return replace(network, make=_same)


def _same(depth: int | None) -> Any:
    raise NotImplementedError


def test_the_code_runs_once_and_the_graph_is_what_autograd_computes(spec: str, calls: list[str]) -> None:
    first = load_network(spec)
    graph = first.capture()
    assert len(calls) == 2  # described, captured
    again = load_network(spec)
    assert again.capture() == graph
    assert len(calls) == 2
    assert described(again) == described(first)
    assert_equals_autograd(replace(graph, batch_size=1), again.build(seed=1), seed=2, rtol=1e-4)


@pytest.mark.parametrize("what", ["own module", "imported module", "opened file", "variable"])
def test_a_difference_in_what_was_read_is_seen(
    what: str, spec: str, calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert parameters(load_network(spec)) == 7 * 8 + 9 * 3
    name = spec.split(":")[1]
    for module in (name, name.replace("remembered_", "remembered_helper_")):  # as in another process
        sys.modules.pop(module, None)
    if what == "own module":
        (tmp_path / f"{name}.py").write_text(
            (tmp_path / f"{name}.py").read_text().replace("6, WIDTH", "6, WIDTH, False")
        )
    elif what == "imported module":
        helper = next(tmp_path.glob("remembered_helper_*.py"))
        helper.write_text("WIDTH = 18\n")
    elif what == "opened file":
        (tmp_path / "classes.json").write_text("4")
    else:
        monkeypatch.setenv("MORE_CLASSES", "1")
    expected = {"own module": 6 * 8 + 9 * 3, "imported module": 7 * 18 + 19 * 3}.get(what, 7 * 8 + 9 * 4)
    assert parameters(load_network(spec)) == expected
    assert len(calls) == 4


def test_a_variable_that_nobody_read_changes_nothing(
    spec: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_network(spec)
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    load_network(spec)
    assert len(calls) == 1


def test_a_damaged_note_is_none(spec: str, calls: list[str], tmp_path: Path) -> None:
    load_network(spec)
    (note,) = (tmp_path / "cache").rglob("*.network.json")
    note.write_text(note.read_text()[:50])
    assert parameters(load_network(spec)) == 7 * 8 + 9 * 3
    assert len(calls) == 3


@pytest.mark.slow
def test_the_second_use_imports_no_torch(spec: str) -> None:
    code = f"""
import sys
from planner.networks import load_network
graph = load_network({spec!r}).capture()
print(graph.parameter_count, "torch" in sys.modules)
"""
    for imported in ("True", "False"):  # both from the command line, whose modules are found in the same folders
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(7 * 8 + 9 * 3), imported]
