"""The examples run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*arguments: str, folder: Path) -> str:
    """What a Python process prints."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_planning_from_python(tmp_path: Path) -> None:
    lines = run(str(ROOT / "examples" / "plan_from_python.py"), folder=tmp_path).splitlines()
    assert [line.split(":")[0] for line in lines] == ["dgx1-v100", "dgx-a100", "dgx-h100"]


def test_planning_a_network_of_ones_own(tmp_path: Path) -> None:
    command = ("plan", "py:my_network:autoencoder", "--hw", "dgx-a100", "--devices", "8")
    out = tmp_path / "mine.json"
    assert run("-m", "planner.cli", *command, "--out", str(out), "-q", folder=ROOT / "examples") == f"{out}\n"
    assert out.is_file()
