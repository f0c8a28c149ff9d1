"""Where the time of a step goes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given

from simulator.fast_engine import replay
from simulator.program import Collective, Kernel, Phase, Program
from simulator.timeline import Timeline
from tests.simulator.programs import communication, program, segment, task, timed_programs


def example(*, overlaps: bool = True) -> tuple[Program, Timeline]:
    backward = segment(
        task("blocks.0.linear"),
        communication("reduce", after=(0,), payload_bytes=100.0),
        task("blocks.1.linear", phase=Phase.BACKWARD),
        communication("gather", axis="tensor", collective=Collective.ALL_GATHER, after=(1,)),
        name="backward",
        count=2,
    )
    update = segment(task("update", phase=Phase.UPDATE, kernel=Kernel.OPTIMIZER, after=(1,)), communication("last"))
    found = program(backward, update)
    return found, replay(
        found, [np.array([1.0, 3.0, 2.0, 0.5]), np.array([1.0, 0.25])], overlaps_communication=overlaps
    )


def test_breakdown_by_hand() -> None:
    _, timeline = example()
    assert timeline.breakdown == {
        "compute_s": 6.0,
        "exposed_communication_s": 2 * 1.5 + 0.25,
        "bubble_s": 0.0,
        "optimizer_s": 1.0,
    }
    assert timeline.step_time_s == 10.25
    assert [(s.name, s.offset_s, s.duration_s, s.end_s) for s in timeline.segments] == [
        ("backward", 0.0, 4.5, 9.0),
        ("segment", 9.0, 1.25, 10.25),
    ]


def test_all_communication_is_exposed_without_overlap() -> None:
    backward = segment(task("a"), communication("b", after=(0,)), task("c"))
    timeline = replay(program(backward), [np.array([1.0, 3.0, 2.0])], overlaps_communication=False)
    assert timeline.breakdown["exposed_communication_s"] == 3.0
    assert not timeline.overlaps_communication


@given(timed=timed_programs())
def test_breakdown_equals_a_count_moment_by_moment(timed: tuple[Program, list[np.ndarray]]) -> None:
    found, times = timed
    timeline = replay(found, times)
    expected = dict.fromkeys(timeline.breakdown, 0.0)
    for one, at in zip(found.segments, timeline.segments, strict=True):
        moments = np.unique(np.concatenate([[0.0], at.starts_s, at.ends_s]))
        for begin, end in itertools.pairwise(moments):
            middle = (begin + end) / 2
            running = [t for i, t in enumerate(one.tasks) if at.starts_s[i] < middle < at.ends_s[i]]
            computing = [t.phase for t in running if t.collective is None]
            if any(phase is not Phase.UPDATE for phase in computing):
                name = "compute_s"
            elif computing:
                name = "optimizer_s"
            else:
                name = "exposed_communication_s" if running else "bubble_s"
            expected[name] += one.count * (end - begin)
    assert timeline.breakdown == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_results_cannot_be_changed() -> None:
    _, timeline = example()
    with pytest.raises(ValueError, match="read-only"):
        timeline.segments[0].starts_s[0] = 1.0
