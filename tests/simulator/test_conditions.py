"""How fast and how quiet a machine was: beside calibration and beside runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from simulator.calibration.machine import MachineUse, disturbance, machine_use, used_since
from simulator.calibration.process import available_cores
from simulator.calibration.timing import Pace, paces_of, timed_paces
from simulator.crowding import Conditions
from simulator.errors import ProfileError
from simulator.profiles import write_profile
from tests.simulator.test_hardware import calibrated

QUIET = Conditions(paces=((1, 0.03), (2, 0.04), (4, 0.1)), pace_spread=0.1, others_share=0.01)


def test_pace_between_and_beyond_measured_numbers_of_processes() -> None:
    assert [QUIET.pace_s(n) for n in (1, 2, 4)] == [0.03, 0.04, 0.1]
    assert QUIET.pace_s(3) == pytest.approx(0.07)
    assert QUIET.pace_s(8) == pytest.approx(0.2)
    # Accelerators have one number alone: each computes for itself.
    assert Conditions(paces=((1, 0.03),)).pace_s(8) == 0.03


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"others_share": 0.4}, "other programs took 40% of the cores' time"),
        ({"stolen_share": 0.1}, "the host took 10% of it"),
        ({"pace_spread": 0.5}, "its speed varied by 50%"),
    ],
)
def test_one_line_says_what_disturbed(changed: dict[str, float], words: str) -> None:
    assert QUIET.warning == ""
    found = replace(QUIET, **changed).warning
    assert words in found
    assert "\n" not in found
    assert found.startswith("the machine was not quiet while it was calibrated")


def test_profiles_keep_the_conditions_and_no_plan_depends_on_them(tmp_path: Path) -> None:
    data = calibrated()
    plain = write_profile(data, tmp_path / "plain.yaml")
    part = {"processes": [1, 2, 4], "pace_s": [0.03, 0.04, 0.1], "pace_spread": 0.1, "others_share": 0.01}
    data["conditions"] = {**part, "stolen_share": 0.0, "source": "measured: for this test on 2026-01-01"}
    known = write_profile(data, tmp_path / "known.yaml")
    assert plain.conditions is None
    assert known.conditions == QUIET
    assert known.hash == plain.hash
    data["device"]["pace_s"] = {"value": 0.03, "source": "measured: by an older calibration on 2025-01-01"}
    assert write_profile(data, tmp_path / "older.yaml").hash == plain.hash
    data["conditions"]["pace_s"] = [0.03]
    with pytest.raises(ProfileError, match="3 processes but 1 times"):
        write_profile(data, tmp_path / "wrong.yaml")


def test_the_slowest_rank_of_the_median_round_sets_the_pace() -> None:
    ranks = [[1.0, 1.0, 9.0, 1.0, 1.0], [2.0, 0.5, 1.0, 2.0, 2.0]]
    found = paces_of(ranks)
    assert found.median_s == 2.0
    assert found.spread == pytest.approx((6.2 - 1.4) / 2.0)
    assert paces_of([[1.0, 1.0]]).spread == 0.0


def test_ranks_meet_before_every_round() -> None:
    met = list[int]()
    found = timed_paces(Pace(torch.device("cpu")), lambda: met.append(len(met)), rounds=2)
    assert met == [0, 1]
    assert len(found) == 2
    assert min(found) > 0


def use(*, wall: float, busy: float, own: float, stolen: float = 0.0) -> MachineUse:
    return MachineUse(wall_s=wall, busy_s=busy, stolen_s=stolen, own_s=own)


def test_what_no_rank_computed_others_did() -> None:
    cores = available_cores()
    ranks = [use(wall=10.0, busy=10.0 * cores, own=4.0 * cores, stolen=0.5 * cores)] * 2
    found = disturbance(ranks)
    assert found is not None
    assert found.others_share == pytest.approx(0.2)
    assert found.stolen_share == pytest.approx(0.05)
    # Counters of the system are rounded, those of processes are not.
    idle = disturbance([use(wall=10.0, busy=0.99, own=1.0)])
    assert idle is not None
    assert idle.others_share == 0.0
    assert disturbance([ranks[0], None]) is None
    assert disturbance([]) is None


def test_counters_of_the_cores_are_read(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
    tick = os.sysconf("SC_CLK_TCK")
    statistics = tmp_path / "stat"
    lines = [f"cpu{core} {3 * tick} {2 * tick} {tick} 900 0 5 5 {tick} 0 0" for core in cores]
    statistics.write_text("\n".join(["cpu 1 1 1 1 1 1 1 1 1 1", *lines, "cpu9999 7 7 7 7 7 7 7 7 7 7", "intr 5"]))
    found = machine_use(statistics)
    assert found is not None
    assert found.busy_s == pytest.approx(6.0 * len(cores))
    assert found.stolen_s == pytest.approx(1.0 * len(cores))
    assert machine_use(tmp_path / "none") is None
    statistics.write_text(f"cpu{cores[0]} x")
    assert machine_use(statistics) is None


def test_own_time_counts_from_a_moment_on() -> None:
    before = machine_use()
    if before is None:
        pytest.skip("this system counts no time of its cores")
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    after = used_since(before)
    assert after is not None
    assert after.own_s >= 0.05
    assert after.wall_s > 0
    assert used_since(None) is None
