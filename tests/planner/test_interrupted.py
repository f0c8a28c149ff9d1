"""Ctrl-C in every phase of `meshwright plan`: the best plan so far, or the next, is written with its gap."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import read_plan
from planner.plans.pins import Pins
from planner.plans.plan import Status
from planner.search.patience import Patience
from simulator.calibration.process import available_cores
from tests.planner.search.problems import captured

DRIVER = """
import importlib, os, signal, sys
module, name, after = sys.argv[1], sys.argv[2], [int(each) for each in sys.argv[3].split(",")]
process = os.getpid()
if sys.argv[4] == "alone" and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
owner = importlib.import_module(module)
*path, last = name.split(".")
for part in path:
    owner = getattr(owner, part)
plain, calls = getattr(owner, last), []

def interrupted(*args, **kwargs):
    calls.append(None)
    if len(calls) in after:
        os.kill(process, signal.SIGINT)
    return plain(*args, **kwargs)

setattr(owner, last, interrupted)
from planner.cli.app import app
sys.argv = ["meshwright", *sys.argv[5:]]
app()
"""


def plan_interrupted(folder: Path, where: str, *after: int, cores: str = "alone") -> tuple[int, str, Path]:
    """Exit code, what stdout holds and the strategy file where SIGINT comes at a function's calls of those numbers.

    On one core, where all calls are those of one process, or on all.
    """
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
        [sys.executable, "-c", DRIVER, module, name, ",".join(map(str, after)), cores, *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    if done.returncode == 0:
        assert "interrupted: this is the best plan so far, at most" in done.stderr
    return done.returncode, done.stdout, out


@pytest.mark.parametrize(
    ("where", "after"),
    [
        pytest.param("planner.planning.configured:stage_tables", 1, id="first table"),
        pytest.param("planner.planning.configured:predict_plan", 1, id="first simulation", marks=pytest.mark.slow),
        pytest.param("planner.planning.configured:predict_plan", 3, id="third simulation", marks=pytest.mark.slow),
        pytest.param("planner.planning.found_configurations:shadow_prices", 1, id="prices", marks=pytest.mark.slow),
        pytest.param("planner.planning.planning:search_one_stage", 1, id="operators", marks=pytest.mark.slow),
        pytest.param("planner.planning.planning:refined", 1, id="refining", marks=pytest.mark.slow),
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
@pytest.mark.skipif(available_cores() < 2, reason="plans are simulated beside on a second core")
@pytest.mark.parametrize("where", ["planner.planning.configured:predict_plan", "planner.planning.beside:Beside.value"])
def test_an_interrupt_while_another_process_simulates_writes_the_best_plan(tmp_path: Path, where: str) -> None:
    code, text, out = plan_interrupted(tmp_path, where, 1, cores="all")
    assert code == 0
    assert read_plan(out).certificate.gap == pytest.approx(json.loads(text)["search"]["gap"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("planner.planning.setting:load_network", (1,)),
        ("planner.search.configurations.branch_and_bound:_Search._open", (1, 2)),
    ],
)
def test_before_the_capture_or_asked_twice_nothing_is_written(
    tmp_path: Path, where: str, after: tuple[int, ...]
) -> None:
    code, text, out = plan_interrupted(tmp_path, where, *after)
    assert code == 130
    assert text == ""
    assert not out.exists()


class Hurried(Patience):
    """Is asked to end when the network is captured."""

    def wait(self) -> None:
        super().wait()
        self.asked = True


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"devices": 8}, Status.BOUNDED),
        ({"devices": 16, "pins": Pins(pp=4, recompute="full")}, Status.BOUNDED),
        ({"devices": 8, "search_mode": "recursive_programming"}, Status.HEURISTIC),
        ({"devices": 1, "global_batch": 2**21, "pins": Pins(micro_batches=1)}, Status.INFEASIBLE),
    ],
)
def test_whoever_does_not_wait_gets_the_first_plan_that_fits(fields: Mapping[str, Any], status: Status) -> None:
    """With a bound under the objective that the whole search finds."""
    request = PlanRequest(**{"network": "zoo:gpt2-tiny", "hardware": "dgx-a100", "sensitivity": False, **fields})
    graph = captured("gpt2-tiny")
    result = plan_network(request, graph=graph, patience=Hurried())
    assert result.status is status
    if status is Status.INFEASIBLE:
        assert not result.candidates
        return
    proof = result.candidates[0].plan.certificate
    if status is Status.HEURISTIC:  # nothing is known of meshes that were not looked into
        assert proof.lower_bound_s == 0
    else:
        best = plan_network(request, graph=graph).candidates[0].plan.certificate
        assert proof.partitions == 1 < best.partitions
        assert proof.lower_bound_s <= best.objective_s <= proof.objective_s
    assert any("interrupted: this is the best plan so far" in message for message in result.messages)
