"""The trace file: what Perfetto and Chrome need of it."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from simulator import trace
from simulator.errors import InputError
from simulator.fast_engine import replay
from simulator.profiles import load_profile
from simulator.program import BufferKind, Program
from simulator.timeline import Timeline
from simulator.trace import write_trace
from tests.simulator.programs import buffer, communication, program, segment, task, timed_programs

Events = list[dict[str, Any]]


def example(count: int = 2, *, overlaps: bool = True) -> tuple[Program, Timeline]:
    tasks = (
        task("a", flops=5.0, bytes_moved=3.0, allocates=(buffer("x", 1000),)),
        task("view", after=(0,)),
        communication("a.reduce", after=(1,), payload_bytes=7.0),
        task("b"),
        task("c", after=(2,), releases=("x",)),
        communication("a.gather", "tensor", after=(4,)),
    )
    found = program(segment(*tasks, count=count, name="backward"), resident=(buffer("p", 500, BufferKind.PARAMETER),))
    times = [np.array([1.0, 0.0, 3.0, 2.0, 1.0, 0.5])]
    return found, replay(found, times, overlaps_communication=overlaps)


def read(path: Path) -> tuple[dict[str, Any], Events]:
    document = json.loads(path.read_text())
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    return document["otherData"], document["traceEvents"]


def select(events: Events, phase: str, **fields: Any) -> Events:
    return [e for e in events if e["ph"] == phase and all(e.get(k) == v for k, v in fields.items())]


def check_events(events: Events) -> None:
    """What every trace promises: complete fields, no overlap on a thread, paired arrows that bind to events."""
    spans: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        assert {"ph", "pid", "tid", "name"} <= set(event)
        assert event["ph"] in "XMCsf"
        assert event["ph"] == "M" or event["ts"] >= 0
    for event in select(events, "X"):
        assert event["dur"] > 0
        spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for found in spans.values():
        for (_, end), (start, _) in itertools.pairwise(found):
            assert end <= start + 1e-6
    starts = {e["id"]: e for e in select(events, "s")}
    ends = {e["id"]: e for e in select(events, "f")}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(select(events, "s")) == len(select(events, "f"))
    for number, start in starts.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]
        for event in (start, end):
            assert any(a - 1e-6 <= event["ts"] <= b + 1e-6 for a, b in spans[event["pid"], event["tid"]])
    counters: dict[int, float] = defaultdict(float)
    for event in select(events, "C"):
        assert event["ts"] >= counters[event["pid"]]
        assert event["args"]["bytes"] >= 0
        counters[event["pid"]] = event["ts"]


def test_trace_of_a_step(tmp_path: Path) -> None:
    found, timeline = example()
    path = tmp_path / "timeline.json"
    write_trace(timeline, found, path)
    about, events = read(path)
    check_events(events)
    assert list(tmp_path.iterdir()) == [path]
    assert about["step_time_s"] == timeline.step_time_s
    assert about["ranks_drawn"] == 4
    assert about["segments"][0] == {
        "name": "backward",
        "repetitions": 2,
        "repetitions_drawn": 2,
        "tasks": 6,
        "tasks_drawn": 5,
    }
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in select(events, "M", name="thread_name")}
    assert [names[3, i] for i in range(4)] == ["step", "compute", "communication:data", "communication:tensor"]
    assert [e["args"]["name"] for e in select(events, "M", name="process_name")] == [f"rank {i}" for i in range(4)]
    (first, second) = select(events, "X", pid=2, name="a")
    assert (first["ts"], first["dur"], first["tid"]) == (0.0, 1e6, 1)
    assert second["ts"] == timeline.segments[0].duration_s * 1e6
    assert first["args"] == {"kernel": "matmul", "phase": "forward", "dtype": "float32", "flops": 5.0, "bytes": 3.0}
    reduce = select(events, "X", pid=0, name="a.reduce")[0]
    assert reduce["args"]["group_size"] == 2
    assert reduce["args"]["payload_bytes"] == 7.0
    assert max(e["args"]["bytes"] for e in select(events, "C")) == timeline.peak_memory_bytes == 1500


def test_arrows_join_producer_collective_consumer_and_ranks(tmp_path: Path) -> None:
    found, timeline = example(count=1)
    write_trace(timeline, found, tmp_path / "t.json")
    _, events = read(tmp_path / "t.json")
    threads = {e["tid"]: e["args"]["name"] for e in select(events, "M", name="thread_name")}

    def at(event: dict[str, Any]) -> tuple[int, str]:
        inside = [
            e["name"]
            for e in select(events, "X", pid=event["pid"], tid=event["tid"])
            if e["ts"] <= event["ts"] <= e["ts"] + e["dur"]
        ]
        assert threads[event["tid"]] != "step"
        assert len(inside) == 1
        return event["pid"], inside[0]

    ends = {e["id"]: at(e) for e in select(events, "f")}
    arrows = {(at(e), ends[e["id"]]) for e in select(events, "s")}
    own = {((r, a), (r, b)) for r in range(4) for a, b in [("a", "a.reduce"), ("a.reduce", "c"), ("c", "a.gather")]}
    data = {((0, "a.reduce"), (2, "a.reduce")), ((1, "a.reduce"), (3, "a.reduce"))}
    tensor = {((0, "a.gather"), (1, "a.gather")), ((2, "a.gather"), (3, "a.gather"))}
    assert arrows == own | data | tensor


def test_without_overlap_everything_is_on_one_thread(tmp_path: Path) -> None:
    found, timeline = example(overlaps=False)
    write_trace(timeline, found, tmp_path / "t.json")
    _, events = read(tmp_path / "t.json")
    check_events(events)
    assert {e["args"]["name"] for e in select(events, "M", name="thread_name")} == {"step", "compute"}
    assert {e["tid"] for e in select(events, "X", cat="communication")} == {1}


def test_repetitions_and_ranks_beyond_the_limit_are_told(tmp_path: Path) -> None:
    found, timeline = example(count=100)
    write_trace(timeline, found, tmp_path / "t.json", max_ranks=2)
    about, events = read(tmp_path / "t.json")
    check_events(events)
    assert about["ranks_drawn"] == 2
    assert about["segments"][0]["repetitions_drawn"] == 4
    assert len(select(events, "X", name="a")) == 8
    (rest,) = select(events, "X", pid=0, name="backward: 96 more repetitions, not drawn")
    assert (rest["ts"] + rest["dur"]) / 1e6 == pytest.approx(timeline.step_time_s)


def test_long_traces_give_up_repetitions_then_ranks_then_arrows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MAX_EVENTS", 20)
    monkeypatch.setattr(trace, "MAX_ARROWS", 3)
    found, timeline = example(count=3)
    write_trace(timeline, found, tmp_path / "t.json")
    about, events = read(tmp_path / "t.json")
    check_events(events)
    assert about["segments"][0]["repetitions_drawn"] == 1
    assert about["ranks_drawn"] == 2
    assert len(select(events, "s")) == 3


def test_collectives_name_their_algorithm(tmp_path: Path) -> None:
    found, timeline = example()
    write_trace(timeline, found, tmp_path / "t.json", hardware=load_profile("dgx-a100"))
    _, events = read(tmp_path / "t.json")
    assert all(e["args"]["algorithm"] for e in select(events, "X", cat="communication"))


def test_same_timeline_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_trace(*reversed(example()), tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_empty_program(tmp_path: Path) -> None:
    write_trace(replay(program(), []), program(), tmp_path / "t.json")
    about, events = read(tmp_path / "t.json")
    check_events(events)
    assert about["segments"] == []


def test_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, timeline = example()
    path = tmp_path / "t.json"
    path.write_text("old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace, "_arrows", broken)
    with pytest.raises(InputError, match="No space left"):
        write_trace(timeline, found, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bad_requests(tmp_path: Path) -> None:
    found, timeline = example()
    with pytest.raises(InputError, match="0 ranks"):
        write_trace(timeline, found, tmp_path / "t.json", max_ranks=0)
    with pytest.raises(InputError, match="cannot write '.*t.json': the folder '.*absent' does not exist"):
        write_trace(timeline, found, tmp_path / "absent" / "t.json")


def test_a_link_to_a_device_stays(tmp_path: Path) -> None:
    found, timeline = example()
    link = tmp_path / "t.json"
    link.symlink_to("/dev/null")
    write_trace(timeline, found, link)
    assert link.is_symlink()
    assert link.is_char_device()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(timed=timed_programs())
def test_any_program_gives_a_valid_trace(timed: tuple[Program, list[np.ndarray]], tmp_path: Path) -> None:
    found, times = timed
    path = tmp_path / "t.json"
    write_trace(replay(found, times), found, path)
    check_events(read(path)[1])
