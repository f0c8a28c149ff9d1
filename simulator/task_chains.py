"""Tables with fewer tasks: tasks that run one right after the other become one, and their times are told apart behind.

That is exact where a task's pace does not change while it runs: it shares no link, and overlap slows nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.task_groups import tasks_by_stream
from simulator.task_table import FloatArray, IntArray, TaskTable

Times = tuple[FloatArray, FloatArray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """A table of chains of the tasks (T,) of another.

    Attributes
    ----------
    order : (T,) the tasks, chain by chain
    first : (C,) place in ``order`` of each chain's first task
    seconds : (T,) of the tasks in that order
    """

    table: TaskTable
    order: IntArray
    first: IntArray
    seconds: FloatArray

    def apart(self, times: Times) -> Times:
        """Times of the tasks from those of the chains; a chain ends when its last task does, to the bit."""
        lengths = np.diff(self.first, append=len(self.order))
        begin, end = (np.repeat(values, lengths) for values in times)
        passed = np.cumsum(self.seconds)
        passed -= np.repeat((passed - self.seconds)[self.first], lengths)
        last = self.first + lengths - 1
        done = np.minimum(begin + passed, end)
        done[last] = times[1]
        starts, ends = np.empty(len(self.order)), np.empty(len(self.order))
        ends[self.order] = done
        started = np.concatenate(([0.0], done[:-1]))
        started[self.first] = times[0]
        starts[self.order] = started
        return starts, ends


def chains(table: TaskTable) -> Chains | None:
    """Join tasks without links and meetings that wait for nothing but the task before, for which nothing else waits.

    None where no two tasks can be joined.
    """
    size = table.size
    offsets, order = tasks_by_stream(table.stream, len(table.stream_rank))
    plain = (table.meeting < 0) & (np.diff(table.link_offsets) == 0)
    awaited = np.zeros(size, dtype=bool)
    awaited[table.dependencies] = True
    free = plain & (np.diff(table.dependency_offsets) == 0)
    joins = np.zeros(size, dtype=bool)
    joins[1:] = free[order[1:]] & (plain & ~awaited)[order[:-1]]
    joins[offsets[:-1][np.diff(offsets) > 0]] = False
    if not joins.any():
        return None
    first = np.flatnonzero(~joins)
    chain_of = np.empty(size, dtype=np.int64)
    chain_of[order] = np.cumsum(~joins) - 1
    speed = np.where(table.rate_bytes_per_s > 0, table.rate_bytes_per_s, 1.0)
    seconds = (table.latency_s + table.work / speed)[order]
    head = order[first]
    alone = np.diff(first, append=size) == 1
    waits = np.diff(table.dependency_offsets)[head]
    used = np.diff(table.link_offsets)[head]
    joined = replace(
        table,
        stream=table.stream[head],
        work=np.where(alone, table.work[head], np.add.reduceat(seconds, first)),
        latency_s=np.where(alone, table.latency_s[head], 0.0),
        rate_bytes_per_s=np.where(alone, table.rate_bytes_per_s[head], 0.0),
        meeting=table.meeting[head],
        dependency_offsets=_offsets(waits),
        dependencies=chain_of[table.dependencies[_rows(table.dependency_offsets[head], waits)]],
        link_offsets=_offsets(used),
        links=table.links[_rows(table.link_offsets[head], used)],
        link_weights=table.link_weights[_rows(table.link_offsets[head], used)],
        label=table.label[head] if len(table.label) else table.label,
    )
    return Chains(table=joined, order=order, first=first, seconds=seconds)


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts)))


def _rows(begin: IntArray, counts: IntArray) -> IntArray:
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    rows: IntArray = np.arange(total) + np.repeat(begin - (ends - counts), counts)
    return rows
