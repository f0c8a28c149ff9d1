"""Messages among some of the processes that share a machine's cores."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.calibration import messages
from simulator.calibration.calibrate import SIZES, CrowdTimes, crowding, fit_crowding
from simulator.calibration.messages import MessageTimes
from simulator.crowding import Crowding, crowded
from simulator.errors import ProfileError
from simulator.profiles import load_profile, write_profile
from simulator.program import Collective, ProgramAxis
from simulator.timing import sharing_cores, task_times
from tests.simulator.programs import AXES, communication
from tests.simulator.test_hardware import calibrated

TABLE = (
    Crowding(group_size=2, processes=4, delay_s=2e-3, stretch=1.5),
    Crowding(group_size=2, processes=8, delay_s=4e-3, stretch=3.5),
    Crowding(group_size=4, processes=8, delay_s=1e-3, stretch=2.0),
)
SECONDS = np.array([1e-4, 1e-3, 1e-2])


def test_a_group_of_all_processes_is_crowded_by_nobody() -> None:
    for size in (1, 2, 4, 8):
        np.testing.assert_array_equal(crowded(TABLE, SECONDS, size, size), SECONDS)
    np.testing.assert_array_equal(crowded((), SECONDS, 2, 8), SECONDS)


def test_what_was_measured_counts_and_between_it_a_straight_line() -> None:
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 2, 4), 2e-3 + 1.5 * SECONDS)
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 4, 8), 1e-3 + 2.0 * SECONDS)
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 2, 6), 3e-3 + 2.5 * SECONDS)
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 2, 3), 1e-3 + 1.25 * SECONDS)
    # Groups of three were not measured: what is known of two counts, and nobody else is there among three.
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 3, 4), 2e-3 + 1.5 * SECONDS)
    np.testing.assert_array_equal(crowded(TABLE, SECONDS, 3, 3), SECONDS)


def test_beyond_what_was_measured_it_grows_as_taking_turns_does() -> None:
    np.testing.assert_allclose(crowded(TABLE, SECONDS, 2, 16), 8e-3 + 7.0 * SECONDS)


@given(
    st.integers(2, 16),
    st.integers(1, 64),
    st.lists(st.floats(0, 1e-2), min_size=3, max_size=3),
    st.lists(st.floats(1, 20), min_size=3, max_size=3),
)
def test_messages_never_gain_by_a_crowd_nor_by_more_bytes(
    size: int, processes: int, delays: list[float], stretches: list[float]
) -> None:
    table = [
        dataclasses.replace(one, delay_s=delay, stretch=stretch)
        for one, delay, stretch in zip(TABLE, delays, stretches, strict=True)
    ]
    found = crowded(table, SECONDS, size, processes)
    assert (found >= SECONDS * (1 - 1e-12)).all()
    assert (np.diff(found) > 0).all()


def test_the_fit_finds_delay_and_factor() -> None:
    alone = [3e-4, 4e-4, 1e-3, 4e-3]
    for delay, stretch in ((2e-3, 1.8), (0.0, 3.0), (1e-3, 1.0)):
        found = fit_crowding(alone, [delay + stretch * seconds for seconds in alone])
        assert found[0] == pytest.approx(delay, rel=0.1, abs=2e-5)
        assert found[1] == pytest.approx(stretch, rel=0.1)
    # Among others a message is never faster, whatever the scatter says.
    assert fit_crowding(alone, [0.5 * seconds for seconds in alone]) == (0.0, 1.0)


def test_crowds_are_held_against_groups_of_their_size_alone() -> None:
    seconds = tuple(2e-4 + size / 2e9 for size in messages.SIZES)
    times = dict.fromkeys(Collective, seconds)
    alone = MessageTimes(processes=2, seconds=times, overlap=1.0, resident_bytes=2**28)
    among = tuple(1e-3 + 2 * (2e-4 + size / 2e9) for size in SIZES)
    crowds = [CrowdTimes(group_size=size, processes=8, seconds=among) for size in (2, 4)]
    (found,) = crowding(crowds, [alone])  # groups of four were not timed alone
    assert (found.group_size, found.processes) == (2, 8)
    assert found.delay_s == pytest.approx(1e-3, rel=0.1)
    assert found.stretch == pytest.approx(2.0, rel=0.1)


def test_steps_on_shared_cores_pay_for_it(tmp_path: Path) -> None:
    data = calibrated()
    plain = write_profile(data, tmp_path / "plain.yaml")
    data["message_crowding"] = [
        {"group_size": 2, "processes": 4, "delay_s": 2e-3, "stretch": 1.5, "source": "assumed: for this test"}
    ]
    hardware = write_profile(data, tmp_path / "crowded.yaml")
    assert hardware.hash != plain.hash
    assert load_profile(str(tmp_path / "crowded.yaml")).crowding == hardware.crowding
    tasks = [communication("sum", axis, payload_bytes=1e6) for axis in ("data", "tensor")]
    free = task_times(tasks, AXES, plain, 4)
    assert task_times(tasks, AXES, sharing_cores(hardware, 4), 4) == pytest.approx(2e-3 + 1.5 * free)
    axes = (ProgramAxis(name="tensor", size=2, stride=1),)
    assert task_times(tasks[1:], axes, sharing_cores(hardware, 2), 2) == pytest.approx(free[1:])


def test_a_group_needs_others_beside_it(tmp_path: Path) -> None:
    data = calibrated()
    data["message_crowding"] = [
        {"group_size": 4, "processes": 4, "delay_s": 0.0, "stretch": 1.0, "source": "assumed: for this test"}
    ]
    with pytest.raises(ProfileError, match="4 processes leave none beside a group of 4"):
        write_profile(data, tmp_path / "wrong.yaml")
