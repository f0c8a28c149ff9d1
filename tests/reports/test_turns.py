"""A plan and the same by hand in turns."""

import numpy as np
import pytest

from reports.execution import turns
from reports.execution.turns import MOST_STEPS, Turns, rounds_within


def test_a_machine_that_drifts_favours_neither():
    """Each round is slower than the one before; the ratio of a round is that of its own times."""
    found = Turns(plan_s=(1.1, 2.2, 4.4), by_hand_s=(1.0, 2.0, 4.0), loss_difference=0.0)
    assert found.ratios == pytest.approx((1.1, 1.1, 1.1))


@pytest.mark.parametrize("step_s", [1e-5, 0.05, 0.3, 2.0, 60.0])
def test_rounds_keep_to_the_time_where_steps_allow_it(step_s):
    rounds, steps = rounds_within(12.0, step_s)
    assert rounds == turns.ROUNDS
    assert 1 <= steps <= MOST_STEPS
    assert steps == 1 or 2 * rounds * steps * step_s <= 12.0


def test_blocks_of_both_are_told_apart(monkeypatch):
    """Two ranks, three rounds of two steps behind the warm-up; the slowest rank of each step counts."""
    plan, hand = np.arange(8.0), 10 + np.arange(8.0)
    losses = np.array([np.full(8, 2.0), np.full(8, 2.5)])

    def run_workers(function, arguments, processes):
        assert arguments[2:] == (3, 2)
        return [(np.array([plan, hand]), losses), (np.array([plan / 2, hand + 1]), losses)]

    class Lowered:
        devices = 2

    class Job:
        lowered = Lowered()

    monkeypatch.setattr(turns, "run_workers", run_workers)
    monkeypatch.setattr(turns, "like", lambda job, way: way)
    found = turns.take_turns(Job(), "DDP", 3, 2)
    assert found.plan_s == (2.5, 4.5, 6.5)
    assert found.by_hand_s == (13.5, 15.5, 17.5)
    assert found.loss_difference == pytest.approx(0.25)
