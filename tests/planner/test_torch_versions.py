"""What is said of a torch that nobody tried, where networks are captured and ranks started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from planner.execution.options import ExecuteOptions
from planner.execution.run import rehearse
from planner.graph.cache import SWITCH
from planner.networks.loading import load_network
from planner.plans.file import write_plan
from simulator.torch_versions import NEWEST_TRIED, OLDEST, torch_version, untried_torch, written
from tests.planner.execution.made import make_plan


@pytest.mark.parametrize(
    ("said", "version", "notes"),
    [
        ("2.9.1", OLDEST, 0),
        ("2.9.0a0+git1234", OLDEST, 0),
        (f"{written(NEWEST_TRIED)}.7", NEWEST_TRIED, 0),
        ("2.100.0+cu150", (2, 100), 1),
        ("3.0", (3, 0), 1),
    ],
)
def test_only_a_torch_newer_than_any_tried_is_told(
    said: str, version: tuple[int, int], notes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", said)
    assert torch_version() == version
    assert len(untried_torch()) == notes


def test_it_is_told_once_where_networks_are_captured_and_ranks_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "off")
    monkeypatch.setattr("simulator.torch_versions.NEWEST_TRIED", (2, 0))
    told = untried_torch()
    assert "newer than any that Meshwright was tried with (up to 2.0)" in told[0]
    network = replace(load_network("zoo:mlp"), content="")
    assert [note for note in network.capture().notes if note in told] == list(told)
    path = tmp_path / "strategy.json"
    write_plan(make_plan("zoo:mlp", 2, batch=16, tp=2), path)
    assert [note for note in rehearse(ExecuteOptions(strategy=path)).notes if note in told] == list(told)
