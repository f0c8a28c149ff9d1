"""Passes of units: what their messages expose, and the pace of the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.search.configurations.passes import Row, paced_passes, passes_beside_messages
from simulator.launches import LAUNCH
from simulator.profiles import load_profile
from tests.planner.search.made_tables import MadeUnit, labels

SECONDS = st.floats(0.0, 1.0)


def one(value: float) -> NDArray[np.float64]:
    return np.array([value])


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0.0, 0.9))
def test_among_equal_units_a_pass_is_the_longer_of_slowed_work_and_messages(
    forward: float, backward: float, gather: float, scatter: float, lost: float
) -> None:
    found = passes_beside_messages(
        (one(forward), one(backward), one(backward / 2)),
        (one(gather), one(scatter)),
        (np.array([False]), np.array([False])),
        (forward, backward, backward / 2, gather),
        split=False,
        lost=lost,
    )
    assert found[0][0] == pytest.approx(max(forward + lost * gather, gather))
    assert found[1][0] == pytest.approx(max(backward + lost * (gather + scatter), gather + scatter))


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.booleans())
def test_a_large_head_hides_behind_the_unit_before_it(
    forward: float, backward: float, gather: float, scatter: float, split: bool
) -> None:
    ends = (np.array([True, False]), np.array([False, True]))
    pair = (
        (np.full(2, forward), np.full(2, backward), np.full(2, backward / 3)),
        (np.full(2, gather), np.full(2, scatter)),
    )
    found = passes_beside_messages(*pair, ends, (0.1, 0.2, 0.08, 0.05), split=split)
    # The first unit is gathered before its pass, and its gradients leave behind it: neither makes the pass longer.
    assert (found[0][0], found[1][0]) == (forward, backward)
    assert found[0][1] == pytest.approx(forward + max(gather - 0.1, 0.0))
    assert found[1][1] >= backward + max(gather - forward, 0.0) - 1e-12


@given(SECONDS, SECONDS, SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_where_weight_gradients_are_put_off_scatters_travel_beside_them(
    forward: float, backward: float, gather: float, scatter: float, share: float
) -> None:
    late = share * backward
    found = passes_beside_messages(
        (one(forward), one(backward), one(late)),
        (one(gather), one(scatter)),
        (np.array([False]), np.array([False])),
        (forward, backward, late, gather),
        split=True,
    )
    assert found[2][0] == pytest.approx(max(late, scatter))
    assert found[1][0] - found[2][0] == pytest.approx(max(backward - late, gather))


def test_no_pass_is_shorter_than_its_launches_where_the_profile_states_them() -> None:
    hardware = load_profile("dgx-a100")
    unit = MadeUnit(count=1, forward_s=1e-4, activation_bytes=1.0, elements=1.0)
    many = replace(
        labels(unit, 1.0, 0.0, False, False), forward_launches=np.full(3, 5.0), backward_launches=np.full(3, 9.0)
    )
    free = paced_passes(replace(hardware, training={}), many)
    np.testing.assert_array_equal(free[0], many.forward_s)
    slow = paced_passes(replace(hardware, training={LAUNCH: 40e-6}), many)
    np.testing.assert_allclose(slow[0], 2e-4)
    np.testing.assert_allclose(slow[1], np.maximum(many.backward_s, 3.6e-4))
    np.testing.assert_allclose(slow[2] / slow[1], many.late_s / many.backward_s)
    halved = paced_passes(
        replace(hardware, training={LAUNCH: 40e-6}), replace(many, halved=np.full(3, 2.0)), split=True
    )
    np.testing.assert_allclose(halved[1], np.maximum(many.backward_s, 4.4e-4))


@given(SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans())
def test_messages_beside_passes_take_turns_with_those_inside(
    forward: float, backward: float, inside: float, gather: float, scatter: float, again: bool
) -> None:
    passes, inside_s = (one(forward + inside), one(backward + inside), one(0.0)), (one(inside), one(inside))
    ends = (np.array([False]), np.array([False]))
    found = passes_beside_messages(
        passes, (one(gather), one(scatter)), ends, (forward, backward, 0.0, gather), split=False, inside_s=inside_s
    )
    assert found[0][0] == pytest.approx(inside + max(forward, gather))
    assert found[1][0] == pytest.approx(inside + max(backward, gather + scatter))
    row = Row(
        forward_s=passes[0], backward_s=passes[1], gather=one(gather), again=one(gather if again else 0.0),
        scatter=one(scatter), inside_s=inside_s, recomputes=np.zeros(1, dtype=np.bool_), lost=0.0,
    )  # fmt: skip
    behind = scatter + (gather if again else 0.0)
    for seconds in (row.alone(ends[0], 0.0), row.of_chunks(np.arange(1), [(0, 1)])):
        assert seconds[0][0] == pytest.approx(inside + max(forward, gather))
        assert seconds[1][0] == pytest.approx(inside + max(backward, behind))


def test_messages_of_chunks_in_a_row_are_beside_the_next_unit_and_none_is_behind_the_last_scatter() -> None:
    gather, again, scatter = np.array([5.0, 2.0, 6.0]), np.array([0.0, 2.0, 6.0]), np.array([5.0, 3.0, 6.0])
    row = Row(
        forward_s=np.array([1.0, 4.0, 4.0]), backward_s=np.array([2.0, 8.0, 8.0]), gather=gather, again=again,
        scatter=scatter, inside_s=(np.zeros(3), np.zeros(3)), recomputes=np.zeros(3, dtype=np.bool_), lost=0.0,
    )  # fmt: skip
    forward, backward = row.of_chunks(np.arange(3), [(0, 2), (2, 3)])
    # The table is gathered beside the second unit of the pass before, which leaves 1 s, the second beside the first.
    np.testing.assert_allclose(forward, [1 + 4 + 1 + 1, 6])
    # The second unit's gather waits for the table's scatter; its own scatter hides but for 1 s behind the first unit.
    np.testing.assert_allclose(backward, [2 + 8 + 5 + 2 + 1, 12])
    # What is computed again reads what is gathered behind the scatter of the pass before.
    anew = replace(row, recomputes=np.ones(3, dtype=np.bool_)).of_chunks(np.arange(3), [(0, 2), (2, 3)])
    np.testing.assert_allclose(anew, [forward, [backward[0], 8 + 6 + 6]])
    free = replace(row, gather=0 * gather, again=0 * again, scatter=0 * scatter)
    np.testing.assert_allclose(free.of_chunks(np.arange(3), [(0, 2), (2, 3)]), [[5, 4], [10, 8]])
