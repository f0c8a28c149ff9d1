"""What both engines promise about task tables, and that they agree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.engine import max_min_rates
from simulator.errors import ProgramError
from simulator.task_table import StreamKind, TaskTable
from tests.oracles.table_builder import TableBuilder
from tests.simulator.table_copies import expand
from tests.simulator.task_tables import tables

Run = Callable[[TaskTable], tuple[np.ndarray, np.ndarray]]
ENGINES = pytest.mark.parametrize("run", [engine.run, fast_engine.run], ids=["reference", "fast"])


def assert_agree(table: TaskTable, run: Run = fast_engine.run) -> None:
    for reference, fast in zip(engine.run(table), run(table), strict=True):
        np.testing.assert_allclose(fast, reference, rtol=1e-9, atol=1e-12)


@given(table=tables())
@settings(deadline=None, max_examples=200)
def test_engines_agree(table: TaskTable) -> None:
    assert_agree(table)


@pytest.mark.slow
def test_compiled_code_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tables run as Python; here all run as machine code."""

    @given(table=tables())
    @settings(deadline=None, max_examples=50)
    def agree(table: TaskTable) -> None:
        monkeypatch.setattr(fast_engine, "SMALLEST_COMPILED", 10**9)
        as_python = fast_engine.run(table)
        monkeypatch.setattr(fast_engine, "SMALLEST_COMPILED", 0)
        monkeypatch.setattr(fast_engine, "WORTH_COMPILING", dict.fromkeys(fast_engine.WORTH_COMPILING, 0))
        for one, other in zip(as_python, fast_engine.run(table), strict=True):
            np.testing.assert_array_equal(one, other)

    agree()


@given(table=tables())
@settings(deadline=None, max_examples=60)
def test_events_give_the_times_of_the_recurrence(table: TaskTable) -> None:
    ample = dataclasses.replace(
        table, link_capacity=np.full(len(table.link_capacity), 1e6), compute_speed=1.0, transfer_speed=1.0
    )
    recurrence = fast_engine.run(ample)
    # A factor this close to 1 changes nothing but the way the table is run.
    events = fast_engine.run(dataclasses.replace(ample, compute_speed=1 - 1e-15))
    np.testing.assert_allclose(recurrence, events, rtol=1e-9, atol=1e-12)


@given(table=tables(), speeds=st.sampled_from([(0.8, 0.5), (0.8, 1.0), (1.0, 0.5)]), ample=st.booleans())
@settings(deadline=None, max_examples=100)
def test_engines_agree_on_a_rank_alone(table: TaskTable, speeds: tuple[float, float], ample: bool) -> None:
    table = dataclasses.replace(
        table,
        stream_rank=np.zeros_like(table.stream_rank),
        meeting=np.full_like(table.meeting, -1),
        meeting_size=np.zeros(0, dtype=np.int64),
        link_capacity=table.link_capacity * (100 if ample else 1),
        compute_speed=speeds[0],
        transfer_speed=speeds[1],
    )
    assert_agree(table)


@ENGINES
def test_transfers_share_a_link_fairly(run: Run) -> None:
    """Two flows at half the link each; the one that is capped lower leaves the rest, and at its end all of it."""
    builder = TableBuilder()
    link = builder.link(10.0)
    for rank, (rate, start) in enumerate([(100.0, 0.0), (2.0, 1.0), (100.0, 1.0)]):
        stream = builder.stream(rank, StreamKind.COMMUNICATION)
        builder.task(stream, latency_s=start, work=20.0 if rank else 34.0, rate=rate, links=[link])
    starts, ends = run(builder.build())
    assert starts.tolist() == [0.0, 0.0, 0.0]
    # 10 bytes alone for 1 s, then 4 bytes/s each beside the 2 of the slow one: 5 s for the 20 of the last,
    # in which the first moves 20 of its 24; the rest takes 0.5 s at 8 bytes/s.
    np.testing.assert_allclose(ends, [6.5, 11.0, 6.0], rtol=1e-12)


@ENGINES
@given(seed=st.integers(0, 2**32 - 1), flows=st.integers(1, 30), links=st.integers(1, 6))
@settings(max_examples=40)
def test_rates_are_max_min_fair(run: Run, seed: int, flows: int, links: int) -> None:
    """Flows that begin together, each with the bytes that its fair rate moves in a second, all end after a second."""
    random = np.random.default_rng(seed)
    caps, capacities = random.choice([1.0, 2.0, 10.0], flows), random.choice([2.0, 5.0, 9.0], links)
    crossed = [random.choice(links, size=random.integers(1, links + 1), replace=False) for _ in range(flows)]
    weights = [random.choice([0.5, 1.0, 2.0], len(row)) for row in crossed]
    offsets = np.concatenate(([0], np.cumsum([len(row) for row in crossed])))
    rates = max_min_rates(caps, offsets, np.concatenate(crossed), np.concatenate(weights), capacities)
    builder = TableBuilder()
    for capacity in capacities:
        builder.link(float(capacity))
    for flow in range(flows):
        stream = builder.stream(flow, StreamKind.COMMUNICATION)
        builder.task(
            stream, work=rates[flow], rate=caps[flow], links=crossed[flow].tolist(), weights=weights[flow].tolist()
        )
    np.testing.assert_allclose(run(builder.build())[1], 1.0, rtol=1e-9)


@ENGINES
def test_weights_load_a_link(run: Run) -> None:
    builder = TableBuilder()
    link = builder.link(12.0)
    for rank, weight in enumerate([1.0, 3.0]):
        stream = builder.stream(rank, StreamKind.COMMUNICATION)
        builder.task(stream, work=6.0, rate=100.0, links=[link], weights=[weight])
    np.testing.assert_allclose(run(builder.build())[1], [2.0, 2.0], rtol=1e-12)


@ENGINES
def test_overlap_slows_both(run: Run) -> None:
    """A computation of 4 s, and from 1 s on a transfer of 4 bytes at 2 bytes/s, each at half speed beside the other."""
    builder = TableBuilder()
    compute, communicate = (builder.stream(0, kind) for kind in (StreamKind.COMPUTE, StreamKind.COMMUNICATION))
    copy, elsewhere = builder.stream(0, StreamKind.COPY), builder.stream(1, StreamKind.COMPUTE)
    builder.task(compute, work=4.0)
    builder.task(communicate, latency_s=1.0, work=4.0, rate=2.0)
    builder.task(copy, work=5.0)
    builder.task(elsewhere, work=5.0)
    _, ends = run(builder.build(compute_speed=0.5, transfer_speed=0.5))
    # Beside each other from 0 s, latency included: the transfer moves from 1 to 5 s, then 1.5 s of work are left.
    np.testing.assert_allclose(ends, [6.5, 5.0, 5.0, 5.0], rtol=1e-12)


@ENGINES
def test_meeting_moves_at_the_pace_of_its_slowest_member(run: Run) -> None:
    builder = TableBuilder()
    slow_link = builder.link(2.0)
    meeting = builder.meeting(3)
    streams = [builder.stream(rank, StreamKind.COMMUNICATION) for rank in range(3)]
    builder.task(streams[0], work=1.5)
    builder.task(streams[0], work=8.0, rate=8.0, latency_s=0.25, meeting=meeting)
    builder.task(streams[1], work=4.0, rate=8.0, latency_s=0.5, meeting=meeting, links=[slow_link])
    builder.task(streams[2], meeting=meeting)
    starts, ends = run(builder.build())
    # The second moves 4 bytes at 2 bytes/s while the first moves 8, both after the longest latency.
    assert starts.tolist() == [0.0, 1.5, 1.5, 1.5]
    np.testing.assert_allclose(ends, [1.5, 4.0, 4.0, 4.0], rtol=1e-12)


def opposite_meetings(**speeds: float) -> TaskTable:
    builder = TableBuilder()
    streams = [builder.stream(rank, StreamKind.COMMUNICATION) for rank in (3, 7)]
    meetings = [builder.meeting(2), builder.meeting(2)]
    for stream, order in zip(streams, (meetings, meetings[::-1]), strict=True):
        for meeting in order:
            builder.task(stream, work=1.0, meeting=meeting, label=f"reduce {meeting}")
    return builder.build(**speeds)


@ENGINES
@pytest.mark.parametrize("speeds", [{}, {"compute_speed": 0.9}], ids=["recurrence", "events"])
def test_meetings_in_opposite_orders_are_a_deadlock(run: Run, speeds: dict[str, float]) -> None:
    with pytest.raises(ProgramError, match="the task table never ends") as caught:
        run(opposite_meetings(**speeds))
    for text in ("of rank 3 meets task", "of rank 7 meets task", "'reduce 0'", "'reduce 1'", "comes behind"):
        assert text in str(caught.value)


@ENGINES
@pytest.mark.parametrize("speeds", [{}, {"compute_speed": 0.9}], ids=["recurrence", "events"])
def test_cycle_of_dependencies_is_a_deadlock(run: Run, speeds: dict[str, float]) -> None:
    builder = TableBuilder()
    streams = [builder.stream(rank, StreamKind.COMPUTE) for rank in (0, 1)]
    builder.task(streams[0], work=1.0, after=[1], label="x")
    builder.task(streams[1], work=1.0, after=[0], label="y")
    with pytest.raises(ProgramError, match="task 0 'x' of rank 0 waits for task 1 'y' of rank 1"):
        run(builder.build(**speeds))


@ENGINES
def test_send_without_receive(run: Run) -> None:
    builder = TableBuilder()
    stream = builder.stream(5, StreamKind.COMMUNICATION)
    builder.task(stream, work=1.0, rate=1.0, meeting=builder.meeting(2), label="send")
    with pytest.raises(ProgramError, match="meeting 0 .* has 1 of 2 tasks: task 0 'send' of rank 5"):
        run(builder.build())


@ENGINES
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"work": [1.0, np.nan]}, "task 1 'b' of rank 4 of .* has nan of work"),
        ({"work": [-1.0, 1.0]}, "task 0 'a' of rank 4 of .* has -1.0 of work"),
        ({"latency_s": [0.0, np.inf]}, "task 1 'b' .* has inf s of latency"),
        ({"rate_bytes_per_s": [1.0, -1.0]}, "task 1 'b' .* has -1.0 bytes/s"),
        ({"stream": [0, 2]}, "task 1 'b' of .* runs on stream 2; there are streams 0 to 0"),
        ({"stream": [0, -1]}, "task 1 'b' of .* runs on stream -1"),
        ({"dependencies": [2]}, "task 1 'b' .* waits for task 2; there are tasks 0 to 1"),
        ({"dependency_offsets": [0, 1, 0]}, "dependency_offsets that do not rise"),
        ({"links": [1]}, "task 0 'a' .* crosses link 1"),
        ({"link_weights": [np.nan]}, "task 0 'a' .* loads link 0 with nan"),
        ({"rate_bytes_per_s": [0.0, 0.0]}, "task 0 'a' .* crosses links and has no rate"),
        ({"link_capacity": [0.0]}, "link 0 .* has a capacity of 0.0"),
        ({"stream_kind": [9]}, "stream 0 .* is of kind 9"),
        ({"meeting": [-2, -1]}, "task 0 'a' .* is in meeting -2"),
        ({"meeting": [-1, 10**9]}, "task 1 'b' .* is in meeting 1000000000"),
        ({"label": [0, 2]}, "task 1 .* has label 2"),
        ({"work": [1.0]}, r"work of shape \(1,\)"),
        ({"compute_speed": 0.0}, "compute_speed 0.0"),
        ({"transfer_speed": 1.5}, "transfer_speed 1.5"),
    ],
)
def test_malformed_tables(run: Run, change: dict[str, Any], message: str) -> None:
    builder = TableBuilder()
    stream = builder.stream(4, StreamKind.COMMUNICATION)
    builder.task(stream, work=1.0, rate=1.0, links=[builder.link(1.0)], label="a")
    builder.task(stream, work=1.0, after=[0], label="b")
    changes = {name: np.array(value) if isinstance(value, list) else value for name, value in change.items()}
    with pytest.raises(ProgramError, match=message):
        run(dataclasses.replace(builder.build(meeting_size=np.zeros(0, dtype=np.int64)), **changes))


@ENGINES
def test_empty_table(run: Run) -> None:
    starts, ends = run(TableBuilder().build())
    assert starts.shape == ends.shape == (0,)


@ENGINES
@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize("overlap", [1.0, 0.7])
def test_replicas_of_a_pipeline_are_simulated_once(run: Run, copies: int, overlap: float) -> None:
    """Two stages, replicated: sends over links of the replica and a shared network card, gradients reduced by all."""
    builder = TableBuilder()
    card, wire = builder.link(6.0), builder.link(3.0)
    kinds = (StreamKind.COMPUTE, StreamKind.COMMUNICATION, StreamKind.COPY)
    streams = [[builder.stream(rank, kind) for kind in kinds] for rank in (0, 1)]
    joint = []
    for micro_batch in range(4):
        first = builder.task(streams[0][0], work=1.0 + 0.25 * micro_batch, label="stage 0")
        meeting = builder.meeting(2)
        builder.task(
            streams[0][1], work=5.0, rate=4.0, latency_s=0.1, meeting=meeting, after=[first],
            links=[card, wire], weights=[copies, 1.0],
        )  # fmt: skip
        received = builder.task(streams[1][2], meeting=meeting, label="receive")
        last = builder.task(streams[1][0], work=2.0, after=[received])
        joint.append(
            builder.task(streams[1][1], work=3.0, rate=9.0, after=[last], links=[card], weights=[2.0 * copies])
        )
    table = builder.build(compute_speed=overlap, transfer_speed=overlap)
    together = np.zeros(table.size, dtype=bool)
    together[joint] = True
    everyone = expand(table, copies, joint=together, shared=np.array([True, False]))
    assert everyone.size == copies * table.size
    assert len(np.unique(everyone.stream_rank)) == 2 * copies
    for once, each in zip(run(table), run(everyone), strict=True):
        np.testing.assert_allclose(each.reshape(copies, -1), np.tile(once, (copies, 1)), rtol=1e-9)


@given(table=tables(most_tasks=20), copies=st.integers(1, 4), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=60)
def test_copies_change_nothing(table: TaskTable, copies: int, seed: int) -> None:
    """Any table, any of its links shared by all copies, any of its meetings joint."""
    random = np.random.default_rng(seed)
    shared = random.random(len(table.link_capacity)) < 0.5
    joint_meeting = random.random(table.size + 1) < 0.3
    joint = joint_meeting[np.where(table.meeting >= 0, table.meeting, table.size)]
    everyone = expand(table, copies, joint=joint, shared=shared)
    for once, each in zip(fast_engine.run(table), fast_engine.run(everyone), strict=True):
        np.testing.assert_allclose(each.reshape(copies, -1), np.tile(once, (copies, 1)), rtol=1e-9, atol=1e-12)


def test_bad_copies() -> None:
    table = opposite_meetings()
    none = np.zeros(0, dtype=bool)
    with pytest.raises(ProgramError, match="0 times"):
        expand(table, 0, joint=np.zeros(table.size, dtype=bool), shared=none)
    with pytest.raises(ProgramError, match="mark every task of the meeting"):
        expand(table, 2, joint=np.array([True, False, False, False]), shared=none)
