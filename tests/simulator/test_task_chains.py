"""Tables whose tasks are joined run as they do task by task."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from simulator import fast_engine
from simulator.errors import ProgramError
from simulator.task_chains import chains
from simulator.task_table import StreamKind, TaskTable, group_tasks
from tests.oracles.table_builder import TableBuilder
from tests.simulator.task_tables import tables


@settings(deadline=None)
@given(table=tables())
def test_joined_tables_run_as_the_tables_they_were(table: TaskTable) -> None:
    joined = chains(group_tasks(table))
    if joined is None:
        return
    assert joined.table.size < table.size
    try:
        expected = fast_engine.run(table)
    except ProgramError:
        with pytest.raises(ProgramError):
            fast_engine.run(joined.table)
        return
    found = joined.apart(fast_engine.run(joined.table))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert (found[0] <= found[1]).all()


def test_what_something_waits_for_or_shares_a_link_stays_a_task() -> None:
    builder = TableBuilder()
    kernels, messages = builder.stream(0, StreamKind.COMPUTE), builder.stream(0, StreamKind.COMMUNICATION)
    card = builder.link(1.0)
    tasks = [builder.task(kernels, work=float(work)) for work in (1, 2, 3, 4)]
    builder.task(messages, work=2.0, rate=1.0, links=[card], after=[tasks[1]])
    builder.task(messages, work=1.0)
    table = builder.build()
    joined = chains(group_tasks(table))
    assert joined is not None
    assert joined.table.work.tolist() == [3.0, 7.0, 2.0, 1.0]
    starts, ends = joined.apart(fast_engine.run(joined.table))
    assert starts.tolist() == [0.0, 1.0, 3.0, 6.0, 3.0, 5.0]
    assert ends.tolist() == [1.0, 3.0, 6.0, 10.0, 5.0, 6.0]
    assert chains(group_tasks(joined.table)) is None


def test_kernels_that_messages_slow_are_joined_and_told_apart() -> None:
    """Kernels of 1, 2, 3 and 4 s, and messages of 2 s behind the first and of 3 s behind that, at half the speed."""
    builder = TableBuilder()
    kernels, messages = builder.stream(0, StreamKind.COMPUTE), builder.stream(0, StreamKind.COMMUNICATION)
    tasks = [builder.task(kernels, work=float(work)) for work in (1, 2, 3, 4)]
    builder.task(messages, work=2.0, after=[tasks[0]])
    builder.task(messages, work=2.0, latency_s=1.0)
    joined = chains(group_tasks(builder.build(compute_speed=0.5)))
    assert joined is not None
    assert joined.table.work.tolist() == [1.0, 9.0, 2.0, 2.0]
    starts, ends = joined.apart(fast_engine.run(joined.table))
    assert ends.tolist() == [1.0, 5.0, 8.5, 12.5, 3.0, 6.0]
    assert starts.tolist() == [0.0, 1.0, 5.0, 8.5, 1.0, 3.0]
    plain = fast_engine.run(builder.build(compute_speed=0.5))
    np.testing.assert_allclose(ends, plain[1], rtol=1e-12)


def test_what_a_task_waits_for_anyway_does_not_keep_it_apart() -> None:
    """Three kernels read what one message brought, and the next message what two kernels made."""
    builder = TableBuilder()
    kernels, messages = builder.stream(0, StreamKind.COMPUTE), builder.stream(0, StreamKind.COMMUNICATION)
    brought = builder.task(messages, work=1.0)
    later = builder.task(messages, work=1.0)
    reading = [builder.task(kernels, work=2.0, after=[brought]) for _ in range(3)]
    builder.task(kernels, work=1.0, after=[reading[0], brought, later])
    builder.task(messages, work=1.0, after=reading[:2])
    joined = chains(group_tasks(builder.build()))
    assert joined is not None
    assert joined.table.work.tolist() == [4.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    starts, ends = joined.apart(fast_engine.run(joined.table))
    assert starts.tolist() == [0.0, 1.0, 1.0, 3.0, 5.0, 7.0, 5.0]
    assert ends.tolist() == [1.0, 2.0, 3.0, 5.0, 7.0, 8.0, 6.0]
