"""The memory timeline: against a direct count, by hand, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from simulator.columns import columns
from simulator.errors import ProgramError
from simulator.fast_engine import replay, simulate
from simulator.profiles import load_profile
from simulator.program import Buffer, BufferKind, Collective, Program
from simulator.task_order import execution_order, stream_numbers
from simulator.timeline import SegmentTimeline
from tests.simulator.programs import buffer, communication, program, segment, task, timed_programs


def standing(given_program: Program, index: int, starts: np.ndarray, ends: np.ndarray, moment: float) -> int:
    """Bytes of a segment's own buffers inside a repetition at `moment`, which is no task's start or end."""
    tasks = given_program.segments[index].tasks
    released = {name: ends[i] for i, t in enumerate(tasks) for name in t.releases}
    return sum(
        b.size_bytes
        for i, t in enumerate(tasks)
        for b in t.allocates
        if starts[i] < moment < released.get(b.name, np.inf)
    )


def in_turn(given_program: Program, index: int, found: SegmentTimeline) -> tuple[list[float], list[int]]:
    """Times and bytes of the changes in a segment: what ends before what begins, each in the order of dependencies."""
    segment, tasks = columns(given_program).segments[index], given_program.segments[index].tasks
    _, stream = stream_numbers(segment, overlaps_communication=True)
    begun, ended = found.starts_s.tolist(), found.ends_s.tolist()
    sizes = {b.name: b.size_bytes for t in tasks for b in t.allocates}
    turns: list[tuple[float, bool, int, int, int]] = []
    for place, i in enumerate(execution_order(segment, stream).tolist()):
        # A task of no length begins and ends in its turn.
        turns += [(begun[i], True, place, 0, b.size_bytes) for b in tasks[i].allocates]
        turns += [(ended[i], begun[i] == ended[i], place, 1, -sizes[name]) for name in tasks[i].releases]
    turns.sort(key=lambda turn: turn[:4])
    return [turn[0] for turn in turns], [turn[4] for turn in turns]


@given(timed=timed_programs())
def test_curve_equals_a_direct_count(timed: tuple[Program, list[np.ndarray]]) -> None:
    given_program, times = timed
    timeline = replay(given_program, times)
    memory = timeline.memory
    resident = sum(b.size_bytes for b in given_program.resident)
    seen = [resident]
    for index, found in enumerate(timeline.segments):
        moments = np.unique(np.concatenate([found.starts_s, found.ends_s]))
        for moment in ((moments[1:] + moments[:-1]) / 2)[
            np.diff(moments) > 1e-9
        ]:  # sums of decimals differ by rounding
            expected = resident + standing(given_program, index, found.starts_s, found.ends_s, moment)
            for curve in (memory.first[index], memory.later[index]):
                place = np.searchsorted(curve.times_s, moment) - 1
                assert (curve.total_bytes[place] if place >= 0 else resident) == expected
            seen.append(expected)
        moments_s, changes = in_turn(given_program, index, found)
        assert memory.first[index].times_s.tolist() == moments_s
        assert memory.first[index].total_bytes.tolist() == [
            resident + sum(changes[: i + 1]) for i in range(len(changes))
        ]
        seen += memory.first[index].total_bytes.tolist()
    assert memory.peak_bytes == timeline.peak_memory_bytes == max(seen)
    assert min(seen) >= 0
    assert sum(memory.at_peak.values()) == memory.peak_bytes
    assert memory.final_bytes == memory.resident_bytes == resident
    assert memory.unreleased == ()
    assert 0.0 <= memory.peak_time_s <= timeline.step_time_s


def test_peak_by_hand() -> None:
    first = segment(
        task("a", allocates=(buffer("x", 10), buffer("y", 5, BufferKind.COMMUNICATION))),
        task("b", allocates=(buffer("z", 20, BufferKind.GRADIENT),), releases=("y",)),
        task("c", releases=("x",)),
        name="first",
    )
    second = segment(task("d", allocates=(buffer("w", 8),), releases=("w", "z")), name="second")
    resident = (buffer("p", 100, BufferKind.PARAMETER),)
    timeline = replay(program(first, second, resident=resident), [np.array([1.0, 2.0, 3.0]), np.ones(1)])
    assert timeline.peak_memory_bytes == 135
    assert timeline.memory.peak_time_s == 1.0
    assert timeline.memory_at_peak == {
        BufferKind.PARAMETER: 100,
        BufferKind.GRADIENT: 20,
        BufferKind.ACTIVATION: 10,
        BufferKind.COMMUNICATION: 5,
    }
    assert timeline.memory.first[0].times_s.tolist() == [0.0, 0.0, 1.0, 3.0, 6.0]
    assert timeline.memory.first[0].total_bytes.tolist() == [110, 115, 135, 130, 120]
    assert timeline.memory.first[1].total_bytes.tolist() == [128, 120, 100]


def test_what_ends_makes_room_for_what_starts() -> None:
    """A task that takes over when another ends never stands beside it, zero-length tasks included."""
    tasks = (
        task("a", allocates=(buffer("x"),), releases=("x",)),
        task("view", allocates=(buffer("v"),), releases=("v",)),
        task("b", allocates=(buffer("y"),), releases=("y",)),
    )
    assert replay(program(segment(*tasks)), [np.array([1.0, 0.0, 1.0])]).peak_memory_bytes == 10
    beside = (*tasks[:1], communication("c", allocates=(buffer("z"),), releases=("z",)))
    assert replay(program(segment(*beside)), [np.ones(2)]).peak_memory_bytes == 20


def test_repetitions_find_what_the_segment_leaves() -> None:
    """A name that comes back larger weighs from the second repetition on."""
    start = segment(task("start", allocates=(buffer("x", 1),)), name="start")
    swap = segment(task("drop", releases=("x",)), task("make", allocates=(buffer("x", 50),)), name="swap", count=9)
    hold = segment(task("hold", allocates=(buffer("h", 7),), releases=("h",)), name="hold")
    stop = segment(task("stop", releases=("x",)), name="stop")
    timeline = replay(program(start, swap, hold, stop), [np.ones(1), np.ones(2), np.ones(1), np.ones(1)])
    assert timeline.memory.first[1].total_bytes.tolist() == [0, 50]
    assert timeline.memory.later[1].total_bytes.tolist() == [0, 50]
    assert timeline.peak_memory_bytes == 57
    assert timeline.memory.peak_time_s == 19.0
    grown = segment(
        task("use", allocates=(buffer("h", 7),), releases=("h", "x")),
        task("make", allocates=(buffer("x", 50),)),
        name="grown",
        count=3,
    )
    timeline = replay(program(start, grown, stop), [np.ones(1), np.ones(2), np.ones(1)])
    assert timeline.memory.first[1].total_bytes.tolist() == [8, 1, 0, 50]
    assert timeline.memory.later[1].total_bytes.tolist() == [57, 50, 0, 50]
    assert timeline.peak_memory_bytes == 57
    assert timeline.memory.peak_time_s == 3.0


def test_resident_memory_may_be_given_back_in_between() -> None:
    tasks = (task("away", releases=("p",)), task("back", allocates=(buffer("p", 30),)))
    timeline = replay(program(segment(*tasks, count=2), resident=(buffer("p", 30),)), [np.ones(2)])
    assert timeline.memory.final_bytes == 30


def test_unreleased_buffers_are_named() -> None:
    timeline = replay(program(segment(task("a", allocates=(buffer("left"), buffer("over"))))), [np.ones(1)])
    assert timeline.memory.unreleased == ("left", "over")
    assert timeline.memory.final_bytes == 20


@pytest.mark.parametrize(
    ("tasks", "count", "resident", "message"),
    [
        ((task("a", allocates=(buffer("x"), buffer("x"))),), 1, (), "'x' is allocated twice: task 0 'a' of segment"),
        ((task("a", allocates=(buffer("x"),)),), 2, (), r"allocated twice: .*\(second repetition\)"),
        ((task("a", allocates=(buffer("p"),)),), 1, (buffer("p"),), "'p' is allocated twice"),
        ((task("a", releases=("x",)),), 1, (), "task 0 'a' of segment 'segment' releases buffer 'x', which is not"),
        ((task("a", allocates=(buffer("x"),)), task("b", releases=("x", "x"))), 1, (), "task 1 'b' .* not allocated"),
        ((task("a", releases=("p",)),), 1, (buffer("p"),), "resident buffer 'p' is released and not there after"),
        ((task("a"),), 1, (buffer("p"), buffer("p")), "resident buffer 'p' is listed twice"),
        ((task("a", allocates=(buffer("x", -1),)),), 1, (), "buffer 'x' has -1 bytes"),
    ],
)
def test_wrong_buffers(tasks: tuple, count: int, resident: tuple[Buffer, ...], message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        replay(program(segment(*tasks, count=count), resident=resident), [np.ones(len(tasks))])


def test_a_release_that_comes_too_early_is_found() -> None:
    """The order of time counts, not the order of indices."""
    tasks = (task("slow"), task("make", allocates=(buffer("x"),)), communication("free", releases=("x",)))
    with pytest.raises(ProgramError, match="task 2 'free'"):
        replay(program(segment(*tasks)), [np.ones(3)])
    assert replay(program(segment(*tasks)), [np.array([1.0, 1.0, 3.0])]).memory.final_bytes == 0


def test_messages_take_what_the_hardware_says_while_they_are_on_their_way() -> None:
    reads = {"allocates": (buffer("x", 10),)}
    tasks = (
        task("a", **reads),
        communication("m", collective=Collective.ALL_GATHER, payload_bytes=40.0, after=(0,), releases=("x",)),
        communication("n", payload_bytes=1000.0, after=(1,)),
        task("b", after=(2,), allocates=(buffer("y", 30),), releases=("y",)),
    )
    hardware = replace(load_profile("dgx-a100"), message_workspace={Collective.ALL_GATHER: 1.5})
    memory = simulate(program(segment(*tasks, count=3)), hardware).memory
    assert memory.peak_bytes == 70
    assert memory.at_peak == {BufferKind.ACTIVATION: 10, BufferKind.WORKSPACE: 60}
    assert memory.final_bytes == 0
    assert memory.unreleased == ()
