"""Losses are told while ranks write them, each once and in order."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli.app import app
from planner.execution.launch.rank_log import loss_monitor, monitored, rank_folder


def write(logs: Path, rank: int, text: str) -> None:
    folder = rank_folder(logs, rank)
    folder.mkdir(exist_ok=True)
    with (folder / "train.log").open("a") as log:
        log.write(text)


def test_losses_come_while_the_run_goes_on_and_the_rest_at_its_end(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    first = threading.Event()

    def monitor(step: int, loss: float) -> None:
        told.append((step, loss))
        first.set()

    with monitored(tmp_path, 2, monitor):
        write(tmp_path, 0, "a library says something\nstep: 0, seconds: 0.1\n")
        write(tmp_path, 1, "step: 0, loss: 2.5, seconds: 0.1\nstep: 1, loss: 2.")
        assert first.wait(60)
        write(tmp_path, 1, "25, seconds: 0.1\nsaved: somewhere\nstep: 2, loss: 2, seconds: 0.1\n")
    assert told == [(0, 2.5), (1, 2.25), (2, 2.0)]


def test_a_step_that_several_ranks_know_is_told_once(tmp_path: Path) -> None:
    told: list[tuple[int, float]] = []
    with monitored(tmp_path, 2, lambda step, loss: told.append((step, loss))):
        for rank in range(2):
            write(tmp_path, rank, "".join(f"step: {step}, loss: {step + 1}, seconds: 0\n" for step in range(3)))
    assert told == [(0, 1.0), (1, 2.0), (2, 3.0)]


def test_lines_every_so_many_steps_and_after_the_last() -> None:
    lines: list[str] = []
    monitor = loss_monitor(lines.append, steps=5, every=2)
    for step in range(5):
        monitor(step, 1.0)
    assert [line.split(",")[0] for line in lines] == ["step: 2 of 5", "step: 4 of 5", "step: 5 of 5"]


@pytest.mark.slow
def test_the_command_says_losses_meanwhile(tmp_path: Path) -> None:
    strategy = str(tmp_path / "strategy.json")
    run = CliRunner().invoke
    made = run(app, ["plan", "zoo:mlp", "--hw", "dgx-a100", "--devices", "1", "--top", "1", "--out", strategy, "-q"])
    assert made.exit_code == 0, made.output
    found = run(app, ["execute", strategy, "--steps", "4", "--log-every", "2", "--device", "cpu"])
    assert found.exit_code == 0, found.output
    lines = [line.split(",")[0] for line in found.stderr.splitlines() if line.startswith("step:")]
    assert lines == ["step: 2 of 4", "step: 4 of 4"]
