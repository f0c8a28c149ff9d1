"""What both engines promise, and that they agree."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.errors import ProgramError
from simulator.profiles import load_profile
from simulator.program import Program, Segment
from simulator.timeline import Timeline
from tests.simulator.programs import STREAMS, communication, program, segment, task, timed_programs

ENGINES = pytest.mark.parametrize("replay", [engine.replay, fast_engine.replay], ids=["reference", "fast"])
Replay = Callable[..., Timeline]
Timed = tuple[Program, list[np.ndarray]]


def in_order(one: Segment) -> Segment:
    """The segment with only those dependencies that one stream in index order can meet."""
    tasks = [
        dataclasses.replace(t, after=tuple(b for b in t.after if b < i), allocates=(), releases=())
        for i, t in enumerate(one.tasks)
    ]
    return dataclasses.replace(one, tasks=tuple(tasks))


def critical_path(one: Segment, times: np.ndarray) -> float:
    graph = nx.DiGraph()
    for index, t in enumerate(one.tasks):
        graph.add_edge(index, ("end", index), weight=times[index])
        graph.add_edges_from(((("end", before), index) for before in t.after), weight=0.0)
    for stream in STREAMS:
        indices = [i for i, t in enumerate(one.tasks) if t.stream == stream]
        graph.add_edges_from(((("end", a), b) for a, b in itertools.pairwise(indices)), weight=0.0)
    return float(nx.dag_longest_path_length(graph)) if graph else 0.0


@ENGINES
@given(timed=timed_programs())
def test_schedule_is_valid_and_as_early_as_can_be(replay: Replay, timed: Timed) -> None:
    given_program, times = timed
    timeline = replay(given_program, times)
    offset = 0.0
    for one, found, seconds in zip(given_program.segments, timeline.segments, times, strict=True):
        np.testing.assert_allclose(found.ends_s - found.starts_s, seconds, atol=1e-12)
        for index, t in enumerate(one.tasks):
            assert all(found.ends_s[before] <= found.starts_s[index] for before in t.after)
        for stream in STREAMS:
            indices = [i for i, t in enumerate(one.tasks) if t.stream == stream]
            assert all(found.ends_s[a] <= found.starts_s[b] for a, b in itertools.pairwise(indices))
            assert found.duration_s >= seconds[indices].sum() - 1e-12
        assert found.duration_s == pytest.approx(critical_path(one, seconds), rel=1e-12, abs=1e-15)
        assert found.offset_s == offset
        offset += one.count * found.duration_s
    assert timeline.step_time_s == offset
    assert sum(timeline.breakdown.values()) == pytest.approx(timeline.step_time_s, rel=1e-9, abs=1e-15)


@given(timed=timed_programs())
def test_engines_agree(timed: Timed) -> None:
    given_program, times = timed
    reference, fast = engine.replay(given_program, times), fast_engine.replay(given_program, times)
    assert_equal(reference, fast)
    serial = dataclasses.replace(given_program, segments=tuple(in_order(s) for s in given_program.segments))
    reference = engine.replay(serial, times, overlaps_communication=False)
    assert_equal(reference, fast_engine.replay(serial, times, overlaps_communication=False))
    total = sum(s.count * t.sum() for s, t in zip(serial.segments, times, strict=True))
    assert reference.step_time_s == pytest.approx(total, rel=1e-12)
    assert reference.breakdown["bubble_s"] == 0.0


@given(timed=timed_programs())
def test_engines_agree_on_overlap_that_slows(timed: Timed) -> None:
    slow = {"compute_speed": 0.75, "transfer_speed": 0.5}
    alone, reference, fast = (
        engine.replay(*timed),
        engine.replay(*timed, **slow),
        fast_engine.replay(*timed, **slow),
    )
    for one, other in zip(reference.segments, fast.segments, strict=True):
        np.testing.assert_allclose(one.starts_s, other.starts_s, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(one.ends_s, other.ends_s, rtol=1e-9, atol=1e-12)
    assert alone.step_time_s <= reference.step_time_s * (1 + 1e-9) <= 2 * alone.step_time_s * (1 + 1e-8)


@ENGINES
@given(work=st.floats(1e-3, 1.0), message=st.floats(1e-3, 1.0), speed=st.floats(0.1, 1.0))
def test_work_beside_a_message_takes_what_profiles_say(
    replay: Replay, work: float, message: float, speed: float
) -> None:
    """`Hardware.lost_to_messages`: W of work and m of a message beside it take max(W + l m, m)."""
    timeline = replay(
        program(segment(communication("message"), task("work"))), [np.array([message, work])], compute_speed=speed
    )
    assert timeline.step_time_s == pytest.approx(max(work + (1 - speed) * message, message))


@ENGINES
def test_overlap_slows_computation_and_communication(replay: Replay) -> None:
    tasks = (task("a"), communication("a.reduce", after=(0,)), task("b"))
    times = [np.array([1.0, 2.0, 4.0])]
    timeline = replay(program(segment(*tasks)), times, compute_speed=0.8, transfer_speed=0.5)
    # The communication takes 4 s beside the computation, which then has 4 - 3.2 s left.
    np.testing.assert_allclose(timeline.segments[0].ends_s, [1.0, 5.0, 5.8], rtol=1e-12)
    serial = replay(program(segment(*tasks)), times, overlaps_communication=False, compute_speed=0.8)
    assert serial.step_time_s == 7.0


def assert_equal(one: Timeline, other: Timeline) -> None:
    assert one.step_time_s == other.step_time_s
    assert one.breakdown == other.breakdown
    assert one.collectives == other.collectives
    assert one.memory_at_peak == other.memory_at_peak
    assert one.memory.peak_time_s == other.memory.peak_time_s
    for a, b in zip(one.segments, other.segments, strict=True):
        np.testing.assert_array_equal(a.starts_s, b.starts_s)
        np.testing.assert_array_equal(a.ends_s, b.ends_s)


@ENGINES
def test_communication_hides_behind_later_computation(replay: Replay) -> None:
    tasks = (task("a"), communication("a.reduce", after=(0,)), task("b"), task("c", after=(1,)))
    times = [np.array([1.0, 3.0, 2.0, 1.0])]
    overlapped = replay(program(segment(*tasks)), times)
    assert overlapped.segments[0].starts_s.tolist() == [0.0, 1.0, 1.0, 4.0]
    assert overlapped.step_time_s == 5.0
    serial = replay(program(segment(*tasks)), times, overlaps_communication=False)
    assert serial.segments[0].starts_s.tolist() == [0.0, 1.0, 4.0, 6.0]


@ENGINES
def test_dependency_on_a_later_task_of_another_stream(replay: Replay) -> None:
    tasks = (task("a", after=(1,)), communication("b"))
    timeline = replay(program(segment(*tasks, count=3)), [np.array([1.0, 2.0])])
    assert timeline.segments[0].starts_s.tolist() == [2.0, 0.0]
    assert timeline.step_time_s == 9.0


@ENGINES
@pytest.mark.parametrize(
    ("tasks", "overlaps", "named"),
    [
        ((task("alone", after=(0,)),), True, ["task 0 'alone' waits for task 0 'alone'"]),
        ((task("early", after=(1,)), task("late")), True, ["'early' waits", "'late' comes behind (stream 'compute')"]),
        ((task("x", after=(1,)), communication("y", after=(0,))), True, ["'x' waits for task 1 'y'", "'y' waits for"]),
        ((task("x", after=(1,)), communication("y")), False, ["'x' waits for task 1 'y'", "'y' comes behind"]),
    ],
)
def test_deadlock_names_the_tasks(replay: Replay, tasks: tuple, overlaps: bool, named: list[str]) -> None:
    blocked = program(segment(task("free"), name="first"), segment(*tasks, name="stuck"))
    with pytest.raises(ProgramError, match="segment 'stuck' never ends") as caught:
        replay(blocked, [np.ones(1), np.ones(len(tasks))], overlaps_communication=overlaps)
    for text in named:
        assert text in str(caught.value)


@ENGINES
def test_long_deadlock_is_cut_short(replay: Replay) -> None:
    tasks = [task(f"t{i}") for i in range(50)]
    tasks[0] = task("t0", after=(49,))
    with pytest.raises(ProgramError, match="50 tasks in all") as caught:
        replay(program(segment(*tasks)), [np.ones(50)])
    assert len(str(caught.value)) < 800


@ENGINES
@pytest.mark.parametrize(
    ("one", "times", "message"),
    [
        (segment(task("a", after=(1,))), [1.0], "task 0 'a' of segment 'segment' waits for task 1"),
        (segment(task("a", after=(-1,))), [1.0], "waits for task -1"),
        (segment(task("a"), count=0), [1.0], "count 0"),
        (segment(task("a")), [1.0, 2.0], "1 tasks and times of shape"),
        (segment(task("a")), [float("nan")], "takes nan s"),
        (segment(task("a")), [-1.0], "takes -1.0 s"),
        (segment(task("a")), [float("inf")], "takes inf s"),
    ],
)
def test_bad_programs(replay: Replay, one: Segment, times: list[float], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        replay(program(one), [np.array(times)])


@ENGINES
def test_wrong_number_of_time_arrays(replay: Replay) -> None:
    with pytest.raises(ProgramError, match="0 arrays of task times for 1 segments"):
        replay(program(segment(task("a"))), [])


@ENGINES
def test_empty_programs_take_no_time(replay: Replay) -> None:
    assert replay(program(), []).step_time_s == 0.0
    timeline = replay(program(segment(count=4)), [np.zeros(0)])
    assert timeline.step_time_s == 0.0
    assert timeline.peak_memory_bytes == 0


def test_engines_agree_on_a_real_profile() -> None:
    hardware = load_profile("dgx-a100")
    tasks = (
        task("forward", dtype="bfloat16", flops=1e12, bytes_moved=1e8),
        communication("reduce", after=(0,), payload_bytes=1e8),
        task("backward", dtype="bfloat16", flops=2e12, bytes_moved=2e8),
    )
    given_program = program(segment(*tasks, count=2))
    reference = engine.simulate(given_program, hardware)
    assert_equal(reference, fast_engine.simulate(given_program, hardware))
    assert reference.overlaps_communication is hardware.overlaps_communication
    assert 0.005 < reference.step_time_s < 0.1
