"""Steps that follow one another: the period at which they do, beside steps simulated one after the other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import fast_engine
from simulator.pipeline_operators import OperatorCosts, Operators
from simulator.pipeline_passes import following, simulate_operators
from simulator.schedules import ActionKind, Schedule, make_schedule
from simulator.task_table import FloatArray
from tests.oracles.passes import PipelineCosts, pipeline_table, simulate_pipeline
from tests.simulator.test_pipeline import drawn
from tests.simulator.test_schedules import EVERY

WHOLE = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "dualpipe", "dualpipe_v", "multi_copy", "gradient_accumulation")


def ends_of_steps(schedule: Schedule, costs: PipelineCosts, steps: int) -> FloatArray:
    """(steps, ranks) when the ranks end each of several steps."""
    table = pipeline_table(schedule, costs)
    last = np.arange(table.size - schedule.ranks, table.size)
    found: FloatArray = fast_engine.run(following(table, last, steps))[1].reshape(steps, table.size)[:, last]
    return found


@EVERY
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_steps_follow_at_the_period_and_never_later(name: str, data: st.DataObject) -> None:
    schedule, costs = drawn(name, data)
    found, ends = simulate_pipeline(schedule, costs), ends_of_steps(schedule, costs, 4)
    apart = np.diff(ends, axis=0).max(axis=1)
    assert found.length_s >= ends[0].max()
    assert found.length_s * (1 + 1e-12) >= found.step_time_s >= apart.max() * (1 - 1e-9)
    # Each step may be a little sooner behind the one before than that one was.
    assert (np.diff(apart) <= 1e-9 * apart[0]).all()
    if ends[0, schedule.beginning_ranks].max() >= found.length_s:
        assert found.step_time_s == found.length_s


@EVERY
def test_equal_stages_follow_at_once_where_the_last_rank_begins_late(name: str) -> None:
    """The first rank of most schedules begins first and ends last; ZB-H2 and ZBV are parallelograms."""
    schedule = make_schedule(name, 1 if name == "gradient_accumulation" else 4, 12)
    costs = PipelineCosts(forward_s=1.0, backward_s=2.0, epilogue_s=0.5)
    found, apart = simulate_pipeline(schedule, costs), np.diff(ends_of_steps(schedule, costs, 4), axis=0)
    np.testing.assert_allclose(apart, found.step_time_s)
    if name in WHOLE:
        assert found.step_time_s == found.length_s
    else:
        assert (found.step_time_s, found.length_s) == (found.step_time_s, found.step_time_s + 3.0)
        np.testing.assert_allclose(found.bubble_s, 0.0)


def test_no_step_is_longer_than_the_longest_span_of_a_rank() -> None:
    """Where each rank begins as late as in the first step, the timetable repeats after the longest span."""
    schedule, random = make_schedule("zb_h2", 4, 8), np.random.default_rng(0)
    for _ in range(20):
        forward, backward, once = random.uniform(1, 2, (3, 4))
        found = simulate_pipeline(schedule, PipelineCosts(forward_s=forward, backward_s=backward, epilogue_s=once))
        ends = ends_of_steps(schedule, PipelineCosts(forward_s=forward, backward_s=backward, epilogue_s=once), 1)[0]
        spans = ends - found.starts_s[schedule.offsets[:-1]]
        assert (8 * (forward + backward) + once).max() - 1e-9 <= found.step_time_s <= spans.max() + 1e-9


@pytest.mark.parametrize(("meetings", "longer"), [((), 0.0), ([((0, 3), 0.0)], 3.0), ([((0, 1, 2, 3), 0.0)], 3.0)])
def test_ranks_that_meet_at_the_end_of_a_step_end_together(
    meetings: list[tuple[tuple[int, ...], float]], longer: float
) -> None:
    one = [Operators.chain(np.ones(1), np.zeros(1, dtype=np.int64))] * 4
    passes = {kind: one for kind in ActionKind if kind is not ActionKind.BACKWARD}
    found = simulate_operators(make_schedule("zb_h2", 4, 8), OperatorCosts(passes=passes, meetings=meetings))
    assert (found.step_time_s, found.length_s) == (3 * 8 + longer, 3 * 8 + 3.0)
    np.testing.assert_allclose(found.bubble_s, longer)
