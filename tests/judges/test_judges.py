"""What we export is legal for the frameworks themselves, and what we call illegal is illegal there.

The frameworks live in an environment of their own: `make judges` makes it and names its Python in MESHWRIGHT_JUDGES.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module", params=JUDGES)
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judged:
    """What a framework says of legal and illegal files, in one process of its own environment."""
    form = FORMATS[request.param]
    configs = drawn(form, COUNT)
    legal = [(config, form.write(config).text) for config in configs]
    illegal = spread([file for config in configs for file in spoiled(form, config)], COUNT)
    folder = tmp_path_factory.mktemp("judged")
    cases = [
        case_of(form, config, text, folder / f"{number}{form.suffix}")
        for number, (config, text) in enumerate([*legal, *illegal])
    ]
    script = Path(__file__).with_name("judge.py")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, str(script)], input=json.dumps(cases), capture_output=True, text=True, check=True, env=clean
    )
    found = json.loads(done.stdout.splitlines()[-1])
    verdicts = found["verdicts"]
    return Judged(
        version=found["version"],
        legal=[*zip(legal, verdicts[: len(legal)], strict=True)],
        illegal=[*zip(illegal, verdicts[len(legal) :], strict=True)],
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Files with what a framework of some version says of them; nothing where it takes them."""

    version: str
    legal: list[tuple[tuple[TrainingConfig, str], str]]
    illegal: list[tuple[tuple[TrainingConfig, str], str]]


def show(capsys: pytest.CaptureFixture[str], version: str, kind: str, tried: int, disagreements: int) -> None:
    """Print a line of the table of judges."""
    with capsys.disabled():
        print(f"\n{version}: {tried} {kind} files tried, {disagreements} disagreements")


def test_what_is_exported_is_legal(judged: Judged, capsys: pytest.CaptureFixture[str]) -> None:
    refused = [(config, verdict) for (config, _), verdict in judged.legal if verdict]
    show(capsys, judged.version, "legal", len(judged.legal), len(refused))
    assert len(judged.legal) == COUNT
    assert refused == []


def test_what_is_called_illegal_is_illegal(judged: Judged, capsys: pytest.CaptureFixture[str]) -> None:
    taken = [text for (_, text), verdict in judged.illegal if not verdict]
    show(capsys, judged.version, "illegal", len(judged.illegal), len(taken))
    assert len(judged.illegal) == COUNT
    assert taken == []
