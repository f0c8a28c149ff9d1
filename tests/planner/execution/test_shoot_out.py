"""The best plans of a search against one another."""

import dataclasses
import json

import pytest

from planner.execution.measuring.shoot_out import SUFFIX, Outcome, order_figures, shoot_out
from planner.execution.options import ExecuteOptions
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.file import alternative_file, write_alternatives, write_plan
from simulator.errors import ExecutionError, InputError


@dataclasses.dataclass
class StepTime:
    median: float
    p10: float
    p90: float


@dataclasses.dataclass
class Report:
    predicted_step_time_s: float
    measured_step_time_s: StepTime
    predicted_peak_memory_bytes: int = 1
    measured_peak_memory_bytes: int = 2


@pytest.fixture
def strategy(tmp_path):
    request = PlanRequest(network="zoo:mlp", hardware="dgx-a100", devices=2, global_batch=16, top=3)
    plans = [(c.plan, {}) for c in plan_network(request).candidates]
    path = tmp_path / "plan.json"
    write_plan(plans[0][0], path)
    write_alternatives(path, [(plan, None) for plan, _ in plans[1:]])
    return path


class Runs:
    """Stands for real runs: plan k takes as long as said, or dies."""

    def __init__(self, *times):
        self.times, self.count = times, 0

    def __call__(self, plan, options):
        self.count += 1
        time = self.times[self.count - 1]
        if isinstance(time, BaseException):
            raise time
        return Report(predicted_step_time_s=float(self.count), measured_step_time_s=StepTime(time, time, time))


def options(path):
    return ExecuteOptions(strategy=path, steps=3)


def test_orders_are_compared(strategy):
    found = shoot_out(strategy, 3, options(strategy), run=Runs(2.0, 1.0, 3.0))
    assert [one.measured_step_time_s for one in found.outcomes] == [2.0, 1.0, 3.0]
    assert found.kendall_tau == pytest.approx(1 / 3)
    assert found.regret == pytest.approx(1.0)
    assert [one.strategy for one in found.outcomes] == [str(alternative_file(strategy, k)) for k in (1, 2, 3)]


def test_a_plan_that_dies_does_not_end_the_others(strategy):
    found = shoot_out(strategy, 3, options(strategy), run=Runs(1.0, ExecutionError("rank 1 was killed"), 2.0))
    assert [one.error for one in found.outcomes] == ["", "rank 1 was killed", ""]
    assert found.kendall_tau == pytest.approx(1.0)
    assert found.regret == 0
    assert not strategy.with_name(strategy.name + SUFFIX).exists()


def test_an_interrupted_run_is_gone_on_with(strategy):
    with pytest.raises(KeyboardInterrupt):
        shoot_out(strategy, 3, options(strategy), run=Runs(1.0, KeyboardInterrupt()))
    journal = strategy.with_name(strategy.name + SUFFIX)
    journal.write_bytes(journal.read_bytes() + b'{"key": "torn')
    again = Runs(2.0, 3.0)
    found = shoot_out(strategy, 3, options(strategy), run=again)
    assert again.count == 2
    assert found.resumed == 1
    assert [one.measured_step_time_s for one in found.outcomes] == [1.0, 2.0, 3.0]


def test_a_plan_that_ends_the_command_twice_is_left_out(strategy):
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            shoot_out(strategy, 2, options(strategy), run=Runs(KeyboardInterrupt()))
    found = shoot_out(strategy, 2, options(strategy), run=Runs(1.0))
    assert "2 times" in found.outcomes[0].error
    assert found.outcomes[1].measured_step_time_s == 1.0


def test_other_settings_are_another_run(strategy):
    with pytest.raises(KeyboardInterrupt):
        shoot_out(strategy, 2, options(strategy), run=Runs(1.0, KeyboardInterrupt()))
    other = dataclasses.replace(options(strategy), steps=5)
    assert shoot_out(strategy, 2, other, run=Runs(1.0, 2.0)).resumed == 0


def test_missing_and_foreign_plans_are_refused(strategy):
    with pytest.raises(InputError, match="3 of 4 plans"):
        shoot_out(strategy, 4, options(strategy), run=Runs())
    second = alternative_file(strategy, 2)
    document = json.loads(second.read_text())
    document["optimizer"] = "adamw"
    second.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"plan\.2\.json is a plan of another"):
        shoot_out(strategy, 2, options(strategy), run=Runs())


def test_figures_of_few_plans():
    def outcome(predicted, measured):
        return Outcome(strategy="x", predicted_step_time_s=predicted, measured_step_time_s=measured)

    assert order_figures([]) == (None, None)
    assert order_figures([outcome(1.0, 2.0)]) == (None, 0.0)
    assert order_figures([outcome(1.0, 2.0), outcome(1.0, 3.0)])[0] is None


@pytest.mark.slow
def test_real_plans_are_run(strategy):
    found = shoot_out(strategy, 2, options(strategy))
    assert not any(one.error for one in found.outcomes)
    assert found.regret >= 0
