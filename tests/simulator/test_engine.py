"""What both engines promise of the streams of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.errors import ProgramError
from simulator.program import COMPUTE_STREAM, Task
from simulator.task_table import FloatArray, TaskTable
from tests.simulator.programs import communication, table_of, task

STREAMS = (COMPUTE_STREAM, "communication:data", "communication:tensor")
DURATIONS = st.sampled_from((0.0, 1.0, 2.0, 0.5, 0.1, 1e-6, 3.3))
Run = Callable[[TaskTable], tuple[FloatArray, FloatArray]]
ENGINES = pytest.mark.parametrize("run", [engine.run, fast_engine.run], ids=["reference", "fast"])


@st.composite
def waiting_tasks(draw: st.DrawFn) -> tuple[list[Task], FloatArray, list[tuple[int, ...]]]:
    """Tasks on several streams that run in some hidden order, so that they cannot block each other.

    They may wait for later numbers on other streams.
    """
    size = draw(st.integers(0, 12))
    streams = draw(st.lists(st.sampled_from(STREAMS), min_size=size, max_size=size))
    queues = {name: [i for i, s in enumerate(streams) if s == name] for name in STREAMS}
    hidden = []
    while any(queues.values()):
        hidden.append(queues[draw(st.sampled_from([name for name in STREAMS if queues[name]]))].pop(0))
    position = {index: place for place, index in enumerate(hidden)}
    after = [
        tuple(b for b in range(size) if position[b] < position[i] and draw(st.integers(0, 3)) == 0) for i in range(size)
    ]
    tasks = [task(f"{i}") if s == COMPUTE_STREAM else communication(f"{i}", s[14:]) for i, s in enumerate(streams)]
    return tasks, np.array([draw(DURATIONS) for _ in tasks]), after


def critical_path(tasks: list[Task], seconds: FloatArray, after: list[tuple[int, ...]]) -> float:
    graph = nx.DiGraph()
    for index, waits in enumerate(after):
        graph.add_edge(index, ("end", index), weight=seconds[index])
        graph.add_edges_from(((("end", before), index) for before in waits), weight=0.0)
    for stream in STREAMS:
        indices = [i for i, t in enumerate(tasks) if t.stream == stream]
        graph.add_edges_from(((("end", a), b) for a, b in itertools.pairwise(indices)), weight=0.0)
    return float(nx.dag_longest_path_length(graph)) if graph else 0.0


@ENGINES
@given(given_tasks=waiting_tasks())
def test_times_are_valid_and_as_early_as_can_be(
    run: Run, given_tasks: tuple[list[Task], FloatArray, list[tuple[int, ...]]]
) -> None:
    tasks, seconds, after = given_tasks
    starts, ends = run(table_of(tasks, seconds, after))
    np.testing.assert_allclose(ends - starts, seconds, atol=1e-12)
    for index, waits in enumerate(after):
        assert all(ends[before] <= starts[index] for before in waits)
    for stream in STREAMS:
        indices = [i for i, t in enumerate(tasks) if t.stream == stream]
        assert all(ends[a] <= starts[b] for a, b in itertools.pairwise(indices))
    longest = critical_path(tasks, seconds, after)
    assert ends.max(initial=0.0) == pytest.approx(longest, rel=1e-12, abs=1e-15)


@ENGINES
@given(work=st.floats(1e-3, 1.0), message=st.floats(1e-3, 1.0), speed=st.floats(0.1, 1.0))
def test_work_beside_a_message_takes_what_profiles_say(run: Run, work: float, message: float, speed: float) -> None:
    """`Hardware.lost_to_messages`: W of work and m of a message beside it take max(W + l m, m)."""
    table = table_of([communication("message"), task("work")], np.array([message, work]))
    ends = run(replace(table, compute_speed=speed))[1]
    assert ends.max() == pytest.approx(max(work + (1 - speed) * message, message))


@ENGINES
def test_communication_hides_behind_later_computation(run: Run) -> None:
    tasks = [task("a"), communication("a.reduce"), task("b"), task("c")]
    starts, ends = run(table_of(tasks, np.array([1.0, 3.0, 2.0, 1.0]), [(), (0,), (), (1,)]))
    assert starts.tolist() == [0.0, 1.0, 1.0, 4.0]
    assert ends.max() == 5.0


@ENGINES
def test_dependency_on_a_later_task_of_another_stream(run: Run) -> None:
    starts, ends = run(table_of([task("a"), communication("b")], np.array([1.0, 2.0]), [(1,), ()]))
    assert (starts.tolist(), ends.max()) == ([2.0, 0.0], 3.0)


@ENGINES
@pytest.mark.parametrize(
    ("tasks", "after", "named"),
    [
        ([task("alone")], [(0,)], ["'alone' of rank 0 waits for task 0 'alone'"]),
        ([task("early"), task("late")], [(1,), ()], ["'early' of rank 0 waits", "'late' of rank 0 comes behind"]),
        ([task("x"), communication("y")], [(1,), (0,)], ["'x' of rank 0 waits for task 1 'y'", "'y' of rank 0 waits"]),
    ],
)
def test_deadlock_names_the_tasks(run: Run, tasks: list[Task], after: list[tuple[int, ...]], named: list[str]) -> None:
    with pytest.raises(ProgramError, match="never ends") as caught:
        run(table_of(tasks, np.ones(len(tasks)), after))
    for text in named:
        assert text in str(caught.value)


@ENGINES
def test_long_deadlock_is_cut_short(run: Run) -> None:
    tasks = [task(f"t{i}") for i in range(50)]
    with pytest.raises(ProgramError, match="50 tasks in all") as caught:
        run(table_of(tasks, np.ones(50), [(49,), *[()] * 49]))
    assert len(str(caught.value)) < 1600
