"""The machine's pace beside the steps of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.execution import worker
from planner.execution.options import ExecuteOptions
from planner.execution.run import execute
from planner.execution.worker import MOST_SPANS, PacedSteps
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import write_plan
from simulator.profiles import write_profile
from tests.simulator.test_hardware import calibrated

CPU = torch.device("cpu")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, whose typical kernels take 30 ms."""
    monkeypatch.setattr(worker, "Pace", lambda device: device)
    monkeypatch.setattr(worker, "timed_paces", lambda pace, meet, rounds: [0.03] * rounds)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, op: None)


@pytest.mark.parametrize(
    ("step_s", "steps", "every"),
    [(0.1, 20, 3), (5.0, 4, 1), (1e-3, 100, 100), (0.1, 1000, -(-1000 // MOST_SPANS)), (0.0, 7, 7)],
)
@pytest.mark.usefixtures("alone")
def test_rounds_lie_between_spans_of_steps_and_take_a_tenth_of_their_time(
    step_s: float, steps: int, every: int
) -> None:
    paced = PacedSteps(CPU, step_s, wanted=True)
    spans = list(paced.spans(3, 3 + steps))
    assert [step for begin, end in spans for step in range(begin, end)] == list(range(3, 3 + steps))
    assert {end - begin for begin, end in spans[:-1]} <= {every}
    assert spans[0] == (3, 3 + every)
    assert len(paced.found) == len(spans) + 1
    assert len(spans) <= MOST_SPANS


@pytest.mark.usefixtures("alone")
def test_accelerators_are_timed_when_the_steps_are_done() -> None:
    paced = PacedSteps(torch.device("cuda"), 0.1, wanted=True)
    spans = paced.spans(0, 9)
    assert next(spans) == (0, 9)
    assert paced.found == []
    assert list(spans) == []
    assert len(paced.found) == worker.AFTER_ROUNDS


@pytest.mark.usefixtures("alone")
def test_nothing_is_timed_that_no_profile_asks_for() -> None:
    paced = PacedSteps(CPU, 0.1, wanted=False)
    assert list(paced.spans(2, 9)) == [(2, 9)]
    assert paced.found == []


@pytest.mark.slow
def test_a_run_says_how_fast_and_how_quiet_the_machine_was(tmp_path: Path) -> None:
    """Typical kernels never take as long as this profile says, so that the machine has become faster."""
    data = calibrated()
    part = {"processes": [1, 2], "pace_s": [1e5, 1e5], "pace_spread": 0.1, "others_share": 0.01, "stolen_share": 0.0}
    data["conditions"] = {**part, "source": "measured: for this test on 2026-01-01"}
    profile, strategy = tmp_path / "machine.yaml", tmp_path / "strategy.json"
    write_profile(data, profile)
    network = "py:planner.networks.small:tiny_perceptron"
    request = PlanRequest(network=network, hardware=str(profile), devices=2, global_batch=16, precision="fp32", top=1)
    write_plan(plan_network(request).candidates[0].plan, strategy)
    report = execute(ExecuteOptions(strategy=strategy, device="cpu", steps=5))
    assert len(report.losses) == 5
    assert report.machine_speed is not None
    assert report.predicted_step_time_s is not None
    assert report.machine_speed > 1
    assert report.predicted_at_this_speed_s == pytest.approx(report.predicted_step_time_s / report.machine_speed)
    assert any("typical kernels on all processes together" in note for note in report.notes)
    for share in (report.others_share, report.stolen_share):
        assert share is None or 0 <= share <= 1.01


@pytest.mark.parametrize(("device", "wanted", "meetings"), [("cpu", True, 1), ("cpu", False, 0), ("cuda", True, 0)])
def test_timed_steps_begin_together_where_ranks_share_cores(
    monkeypatch: pytest.MonkeyPatch, device: str, wanted: bool, meetings: int
) -> None:
    met: list[str] = []
    monkeypatch.setattr("planner.execution.worker.dist.barrier", lambda: met.append("all"))
    PacedSteps(torch.device(device), 0.1, wanted=wanted).meet()
    assert len(met) == meetings
