"""Ctrl-C in every phase of `meshwright plan`: the best plan so far is written with its gap; 130 where there is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from planner.strategy.file import read_plan

DRIVER = """
import importlib, signal, sys
module, name, after = sys.argv[1], sys.argv[2], int(sys.argv[3])
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
    owner = getattr(owner, part)
plain, calls = getattr(owner, last), []

def interrupted(*args, **kwargs):
    calls.append(None)
    if len(calls) == after:
        signal.raise_signal(signal.SIGINT)
    return plain(*args, **kwargs)

setattr(owner, last, interrupted)
from planner.cli.app import app
sys.argv = ["meshwright", *sys.argv[4:]]
app()
"""


def plan_interrupted(folder: Path, where: str, after: int = 1) -> tuple[int, str, Path]:
    """Exit code, what stdout holds and the strategy file where SIGINT comes at a function's call number `after`."""
    module, _, name = where.partition(":")
    out = folder / "strategy.json"
    options = (
        "plan",
        "zoo:gpt2-tiny",
        "--hw",
        "dgx-a100",
        "--devices",
        "4",
        "--pin",
        "pp=1",
        "--json",
        "--out",
        str(out),
    )
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, module, name, str(after), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 0:
        assert "interrupted: this is the best plan so far, at most" in done.stderr
    return done.returncode, done.stdout, out


@pytest.mark.parametrize(
    ("where", "after"),
    [
        pytest.param("planner.configured:predict_plan", 1, id="first simulation"),
        pytest.param("planner.configured:predict_plan", 3, id="third simulation", marks=pytest.mark.slow),
        pytest.param("planner.planning:shadow_prices", 1, id="prices", marks=pytest.mark.slow),
        pytest.param("planner.planning:search_one_stage", 1, id="operators", marks=pytest.mark.slow),
        pytest.param("planner.planning:refined", 1, id="refining", marks=pytest.mark.slow),
        pytest.param(
            "planner.search.configurations.branch_and_bound:_Search._further", 1, id="bounds", marks=pytest.mark.slow
        ),
    ],
)
def test_the_best_plan_so_far_is_written_with_its_gap(tmp_path: Path, where: str, after: int) -> None:
    code, text, out = plan_interrupted(tmp_path, where, after)
    assert code == 0
    best = json.loads(text)
    assert best["search"]["gap"] >= 0
    assert best["prediction"]["peak_memory_bytes"] <= best["prediction"]["device_memory_bytes"]
    assert read_plan(out).certificate.gap == pytest.approx(best["search"]["gap"])


@pytest.mark.slow
@pytest.mark.parametrize("where", ["planner.configured:stage_tables", "planner.setting:load_network"])
def test_before_any_plan_nothing_is_written(tmp_path: Path, where: str) -> None:
    code, text, out = plan_interrupted(tmp_path, where)
    assert code == 130
    assert text == ""
    assert not out.exists()
