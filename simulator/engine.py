"""The reference engine: one SimPy process for each stream, transfers as flows.

SimPy runs events in the order (time, priority, serial number), so the same table gives the same event order always.
Shares are found anew behind all other events of a time.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import pairwise
from math import nan
from typing import Any

import numpy as np
import simpy

from simulator.reference_flows import Flows
from simulator.table_check import check_table, deadlock
from simulator.task_groups import TaskGroups, group_tasks, tasks_by_stream
from simulator.task_table import FloatArray, TaskTable


def run(table: TaskTable) -> tuple[FloatArray, FloatArray]:
    """Seconds (T,) at which the tasks of a table start and end, from the start of the table.

    Raises
    ------
    ProgramError
        When the table is malformed or cannot run to its end: the message names the ranks and the tasks.
    """
    check_table(table)
    return _run_checked(table)


def _run_checked(table: TaskTable) -> tuple[FloatArray, FloatArray]:
    groups = group_tasks(table)
    state = _TableRun(groups)
    offsets, tasks = tasks_by_stream(table.stream, len(table.stream_rank))
    order, bounds = tasks.tolist(), offsets.tolist()
    for first, last in pairwise(bounds):
        if first < last:
            state.environment.process(state.stream(order[first:last]))
    state.environment.run()
    ends = np.array(state.ends)
    if state.unfinished:
        raise deadlock(groups, ends)
    return np.array(state.starts), ends


class _TableRun:
    """A table in a SimPy environment; an end that is not a number has not come yet."""

    def __init__(self, groups: TaskGroups) -> None:
        table = groups.table
        self.environment = simpy.Environment()
        self.starts = [nan] * table.size
        self.ends = [nan] * table.size
        self.unfinished = table.size
        self._flows = Flows(self.environment, groups)
        self._owner, self._size = groups.owner.tolist(), groups.size.tolist()
        self._latency, self._amount = groups.latency_s.tolist(), groups.amount.tolist()
        offsets, dependencies = table.dependency_offsets.tolist(), table.dependencies.tolist()
        self._dependencies = [dependencies[a:b] for a, b in pairwise(offsets)]
        self._awaited: dict[int, simpy.Event] = {}
        self._meetings: dict[int, _Meeting] = {}

    def stream(self, tasks: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """Run tasks one after the other, each when what it waits for has ended.

        Most dependencies have ended when they are asked for: only those that have not get an event.
        """
        environment, starts, ends, awaited = self.environment, self.starts, self.ends, self._awaited
        dependencies, size, latency, amount = self._dependencies, self._size, self._latency, self._amount
        flows, is_flow = self._flows, self._flows.is_flow
        for task in tasks:
            for before in dependencies[task]:
                if ends[before] != ends[before]:
                    event = awaited.get(before)
                    if event is None:
                        event = awaited[before] = environment.event()
                    yield event
            if size[task] != 1:
                yield from self._meet(task)
            else:
                starts[task] = environment.now
                flows.start(task)
                if latency[task] > 0.0:
                    yield environment.timeout(latency[task])
                if is_flow[task]:
                    yield flows.begin(task)
                elif amount[task] > 0.0:
                    yield environment.timeout(amount[task])
                flows.stop(task)
                ends[task] = environment.now
            self.unfinished -= 1
            if task in awaited:
                awaited.pop(task).succeed()

    def _meet(self, task: int) -> Generator[simpy.Event, Any, None]:
        """Wait for the other members; the last to come runs the whole."""
        owner = self._owner[task]
        meeting = self._meetings.get(owner)
        if meeting is None:
            meeting = self._meetings[owner] = _Meeting(self.environment.event())
        meeting.members.append(task)
        if len(meeting.members) < self._size[owner]:
            yield meeting.ended
            return
        for member in meeting.members:
            self.starts[member] = self.environment.now
        self._flows.start(owner)
        if self._latency[owner] > 0.0:
            yield self.environment.timeout(self._latency[owner])
        if self._flows.is_flow[owner]:
            yield self._flows.begin(owner)
        elif self._amount[owner] > 0.0:
            yield self.environment.timeout(self._amount[owner])
        self._flows.stop(owner)
        for member in meeting.members:
            self.ends[member] = self.environment.now
        meeting.ended.succeed()


class _Meeting:
    """Members that have come, and the end of all."""

    def __init__(self, ended: simpy.Event) -> None:
        self.members: list[int] = []
        self.ended = ended
