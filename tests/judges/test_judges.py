"""What we export is legal for the frameworks themselves, and what we call illegal is illegal there.

The frameworks live in an environment of their own: `make judges` makes it and names its Python in MESHWRIGHT_JUDGES.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from planner.exchange.formats import ExchangeFormat
from planner.exchange.registry import FORMATS
from planner.exchange.training_config import TrainingConfig
from tests.judges.cases import case_of, drawn, spoiled, spread
from tests.judges.judge import JUDGES

PYTHON = os.environ.get("MESHWRIGHT_JUDGES", "")
COUNT = 50
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_JUDGES names no Python with the frameworks; run `make judges`"),
]


def judged(form: ExchangeFormat, files: list[tuple[TrainingConfig, str]], folder: Path) -> tuple[list[str], str]:
    """What a framework says of files, in a process of its own environment, and the framework's version."""
    cases = [case_of(form, config, text, folder / f"{n}{form.suffix}") for n, (config, text) in enumerate(files)]
    script = Path(__file__).with_name("judge.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(script)], input=json.dumps(cases), capture_output=True, text=True, check=True, env=clean
    )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["verdicts"], found["version"]


def show(capsys: pytest.CaptureFixture[str], version: str, kind: str, tried: int, disagreements: int) -> None:
    """Print a line of the table of judges."""
    with capsys.disabled():
        print(f"\n{version}: {tried} {kind} files tried, {disagreements} disagreements")


@pytest.mark.parametrize("name", JUDGES)
def test_what_is_exported_is_legal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = FORMATS[name]
    files = [(config, form.write(config).text) for config in drawn(form, COUNT)]
    assert len(files) == COUNT
    verdicts, version = judged(form, files, tmp_path)
    refused = [(config, verdict) for (config, _), verdict in zip(files, verdicts, strict=True) if verdict]
    show(capsys, version, "legal", len(files), len(refused))
    assert refused == []


@pytest.mark.parametrize("name", JUDGES)
def test_what_is_called_illegal_is_illegal(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    form = FORMATS[name]
    files = spread([file for config in drawn(form, COUNT) for file in spoiled(form, config)], COUNT)
    assert len(files) == COUNT
    verdicts, version = judged(form, files, tmp_path)
    taken = [text for (_, text), verdict in zip(files, verdicts, strict=True) if not verdict]
    show(capsys, version, "illegal", len(files), len(taken))
    assert taken == []
