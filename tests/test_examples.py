"""The examples run."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from planner.plans.file import read_plan

ROOT = Path(__file__).parents[1]


def run(*arguments: str, folder: Path) -> str:
    """What a Python process prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / "plan_from_python.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["dgx1-v100", "dgx-a100", "dgx-h100"]


@pytest.mark.slow
def test_planning_a_network_of_ones_own(tmp_path: Path) -> None:
    command = ("plan", "py:my_network:autoencoder", "--hw", "dgx-a100", "--devices", "8")
    out = tmp_path / "mine.json"
    assert run("-m", "planner.cli", *command, "--out", str(out), "-q", folder=ROOT / "examples") == f"{out}\n"
    assert out.is_file()


def example(name: str) -> list[str]:
    """Lines that an example prints in its own folder."""
    return run(name, folder=ROOT / "examples").splitlines()


def check_training(lines: list[str], steps: int) -> None:
    """Every step says its loss, and the losses are those of one process to rounding."""
    assert [line.split(",")[0] for line in lines[:-1]] == [f"step: {done} of {steps}" for done in range(1, steps + 1)]
    assert float(lines[-1].rpartition(" ")[2]) < 1e-10


@pytest.mark.slow
def test_double_recursion_with_a_pipeline() -> None:
    plan, *training = example("double_recursive.py")
    assert "× 2 stages" in plan
    check_training(training, 4)


@pytest.mark.slow
def test_resnet_with_its_loss_in_small_operators() -> None:
    _, *training = example("resnet50_auto_parallel.py")
    check_training(training, 2)


@pytest.mark.slow
def test_a_gpt_from_a_file_in_mindformers_style(tmp_path: Path) -> None:
    strategy, out = tmp_path / "gpt2.json", tmp_path / "run.json"
    options = ("--hw", "ascend910-atlas800", "--devices", "8", "--config", "examples/gpt2_mindformers.yaml")
    run("-m", "planner.cli", "plan", "zoo:gpt2-tiny", *options, "--out", str(strategy), "-q", folder=ROOT)
    plan = read_plan(strategy)
    assert (plan.degree("data"), plan.degree("tensor"), plan.pipeline, plan.virtual) == (2, 2, 2, 1)
    assert plan.sequence_parallel
    assert len({group for _, group in plan.exchange.fusion_groups}) == 4
    training = ("--steps", "3", "--verify", "--precision", "fp64", "--out", str(out), "-q")
    run("-m", "planner.cli", "execute", str(strategy), *training, folder=ROOT)
    assert json.loads(out.read_text())["max_loss_difference"] < 1e-10
