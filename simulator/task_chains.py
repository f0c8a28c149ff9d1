"""Tables with fewer tasks: tasks that run one right after the other become one, and their times are told apart behind.

Where overlap slows nothing, those that share no link run at one pace. Where it slows computation, kernels are joined,
and the pace at which a rank computed follows from when it transferred.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simulator.task_table import (
    COMPUTES,
    TRANSFERS,
    FloatArray,
    IntArray,
    TaskGroups,
    TaskTable,
    stable_order,
    tasks_by_stream,
)

Times = tuple[FloatArray, FloatArray]


@dataclass(frozen=True, kw_only=True, eq=False)
class Chains:
    """A table of chains of the tasks (T,) of another.

    Attributes
    ----------
    order : (T,) the tasks, chain by chain
    first : (C,) place in ``order`` of each chain's first task
    seconds : (T,) of the tasks in that order
    role : (C,) what chains do while they run, as far as that slows something
    """

    table: TaskTable
    order: IntArray
    first: IntArray
    seconds: FloatArray
    role: IntArray

    def apart(self, times: Times) -> Times:
        """Times of the tasks from those of the chains; a chain ends when its last task does, to the bit."""
        lengths = np.diff(self.first, append=len(self.order))
        end = np.repeat(times[1], lengths)
        passed = np.cumsum(self.seconds)
        passed -= np.repeat((passed - self.seconds)[self.first], lengths)
        last = self.first + lengths - 1
        done = np.minimum(self._when(times, passed, lengths), end)
        done[last] = times[1]
        starts, ends = np.empty(len(self.order)), np.empty(len(self.order))
        ends[self.order] = done
        started = np.concatenate(([0.0], done[:-1]))
        started[self.first] = times[0]
        starts[self.order] = started
        return starts, ends

    def _when(self, times: Times, passed: FloatArray, lengths: IntArray) -> FloatArray:
        """(T,) when each chain has done the seconds ``passed`` of its work.

        A rank's computation advances by C(t) seconds up to a time t: by 1 a second, by ``compute_speed`` while it
        transfers. A chain that begins at b has done w seconds at ``C^-1(C(b) + w)``.
        """
        begin = np.repeat(times[0], lengths)
        found = begin + passed
        ranks = self.table.stream_rank[self.table.stream]
        transfers = (self.role == TRANSFERS) & (times[1] > times[0])
        for rank in np.unique(ranks[transfers]):
            own = transfers & (ranks == rank)
            moments, done = _computed(times[0][own], times[1][own], self.table.compute_speed)
            advanced = _advanced(times[0], moments, done)
            slowed = np.flatnonzero(np.repeat((ranks == rank) & (self.role == COMPUTES), lengths))
            target = (np.repeat(advanced, lengths) + passed)[slowed]
            found[slowed] = np.maximum(_advanced(target, done, moments), begin[slowed])
        return found


def _advanced(values: FloatArray, places: FloatArray, results: FloatArray) -> FloatArray:
    """Linear between the ascending ``places``, by 1 for each behind the last, and ascending to the bit."""
    above = np.append(results[1:], np.inf)[np.searchsorted(places, values, side="right") - 1]
    behind = np.maximum(values - places[-1], 0.0)
    found: FloatArray = np.minimum(np.interp(values, places, results) + behind, above)
    return found


def _computed(starts: FloatArray, ends: FloatArray, speed: float) -> Times:
    """Moments at which transfers start or end, and the seconds of work that a rank can have computed by then."""
    order = np.argsort(np.concatenate([starts, ends]), kind="stable")
    moments = np.concatenate([[0.0], np.concatenate([starts, ends])[order]])
    change = np.repeat([1, -1], [len(starts), len(ends)])[order]
    pace = np.where(np.concatenate([[0], np.cumsum(change)[:-1]]) > 0, speed, 1.0)
    return moments, np.concatenate([[0.0], np.cumsum(np.diff(moments) * pace)])


def chains(groups: TaskGroups) -> Chains | None:
    """Join tasks without links and meetings that wait for nothing but the task before, for which nothing else waits.

    Where overlap slows, those that compute alone, without latency. What a task waits for anyway counts for nothing.
    None where no two tasks can be joined.
    """
    table = _without_spare_waits(groups.table)
    size = table.size
    offsets, order = tasks_by_stream(table.stream, len(table.stream_rank))
    plain = (table.meeting < 0) & (np.diff(table.link_offsets) == 0)
    if groups.overlap_slows:
        plain &= (groups.role == COMPUTES) & (table.latency_s == 0)
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
    return Chains(table=joined, order=order, first=first, seconds=seconds, role=groups.role[head])


def _without_spare_waits(table: TaskTable) -> TaskTable:
    """Leave out what follows from the order of streams.

    A task that waits for one of a stream waits for all before it there, and so do those behind it on its own.
    """
    if not table.dependencies.size:
        return table
    task, needed = np.repeat(np.arange(table.size), np.diff(table.dependency_offsets)), table.dependencies
    streams = len(table.stream_rank)
    own, other = table.stream[task], table.stream[needed]
    pair = own * streams + other
    order = stable_order(pair, streams**2)
    # Tasks of a stream run in the order of their numbers: of each stream the last that a task waits for says it all.
    begin = np.flatnonzero(np.diff(pair[order] * table.size + task[order], prepend=-1))
    last = np.maximum.reduceat(needed[order], begin)
    task, pair = task[order[begin]], pair[order[begin]]
    reached = np.maximum.accumulate(pair * table.size + last)
    new = np.diff(reached, prepend=-1) > 0
    new &= (table.stream[last] != table.stream[task]) | (last >= task)
    task, last = task[new], last[new]
    by_task = stable_order(task, table.size)
    return replace(
        table, dependencies=last[by_task], dependency_offsets=_offsets(np.bincount(task, minlength=table.size))
    )


def _offsets(counts: IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(counts)))


def _rows(begin: IntArray, counts: IntArray) -> IntArray:
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    rows: IntArray = np.arange(total) + np.repeat(begin - (ends - counts), counts)
    return rows
