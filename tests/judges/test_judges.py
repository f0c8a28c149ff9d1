"""What we export is legal for the frameworks themselves, and what we call illegal is illegal there.

The frameworks live in an environment of their own: `make judges` makes it and names its Python in MESHWRIGHT_JUDGES.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.exchange.formats import ExchangeFormat
from planner.exchange.registry import FORMATS
from planner.exchange.training_config import TrainingConfig
from tests.judges.cases import case_of, drawn, spoiled
from tests.judges.judge import JUDGES

PYTHON = os.environ.get("MESHWRIGHT_JUDGES", "")
COUNT = 50
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="MESHWRIGHT_JUDGES names no Python with the frameworks; run `make judges`"),
]


def judged(cases: list[dict[str, Any]]) -> list[str]:
    """What the frameworks say of files, by the process of their own environment."""
    script = Path(__file__).with_name("judge.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(script)], input=json.dumps(cases), capture_output=True, text=True, check=True, env=clean
    )
    verdicts: list[str] = json.loads(done.stdout[done.stdout.rindex('["') :])
    return verdicts


def cases(form: ExchangeFormat, files: list[tuple[TrainingConfig, str]], folder: Path) -> list[dict[str, Any]]:
    """Write files for their judge."""
    return [case_of(form, config, text, folder / f"{n}{form.suffix}") for n, (config, text) in enumerate(files)]


@pytest.mark.parametrize("name", JUDGES)
def test_what_is_exported_is_legal(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    configs = drawn(form, COUNT)
    assert len(configs) == COUNT
    texts = [form.write(config).text for config in configs]
    verdicts = judged(cases(form, list(zip(configs, texts, strict=True)), tmp_path))
    assert [(config, verdict) for config, verdict in zip(configs, verdicts, strict=True) if verdict] == []


@pytest.mark.parametrize("name", JUDGES)
def test_what_is_called_illegal_is_illegal(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    files = [file for config in drawn(form, COUNT) for file in spoiled(form, config)][:COUNT]
    assert files
    verdicts = judged(cases(form, files, tmp_path))
    assert [text for (_, text), verdict in zip(files, verdicts, strict=True) if not verdict] == []
