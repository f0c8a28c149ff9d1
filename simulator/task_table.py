"""Tasks of many ranks as arrays: what both engines run.

A *stream* is a queue of one rank: its tasks run one after the other, in the order of their numbers. A task starts
when the one before it on its stream and all its dependencies have ended. Tasks with the same non-negative
``meeting`` number start together, when the last of them can, and end together: a collective, or a send and its
receive.

A task with ``rate_bytes_per_s`` above zero is a transfer: it first takes ``latency_s``, then moves ``work`` bytes at
its rate or at what the links it crosses leave it, shared max-min fairly among the transfers that cross them. Any other
task takes ``work`` seconds after its latency. While a rank computes and transfers at the same time, its computation
runs at ``compute_speed`` and its transfers at most at ``transfer_speed`` of what they would reach alone.

To be exact:

- A meeting, or a task without one, runs as a whole: it takes the longest latency of its members, then works. While it
  works all members have done the same part of their work at any time: the whole moves at the pace of its slowest
  member, and a link carries ``link_weights`` x the bytes/s of each member that crosses it. It is one flow of the
  fair sharing, of as many bytes as its largest transfer.
- A member *computes* if it is no transfer and on a `COMPUTE` stream; it *transfers* if it is on a `COMMUNICATION`
  stream (seconds or bytes) or a transfer on a `COMPUTE` stream. A `COPY` stream does neither. A rank computes and
  transfers at the same time while one of its tasks of each sort runs, from start to end, latency included: what sends
  holds its part of the device also while nothing moves. Waiting does not count.
  A computing member works then at ``compute_speed`` s/s, a transferring one at most at ``transfer_speed`` x its rate;
  latencies take their time.
- All that ends or begins at one time does so before shares are found anew. Nothing depends on the order of
  simultaneous events: streams fix every order, and shares of no duration move nothing.

Ranks that behave alike stand once in a table; a link use then counts all their copies
(``link_weights`` = copies that cross the link x bytes on the link per byte of work).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.errors import ProgramError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class StreamKind(IntEnum):
    """What a stream holds; computation and communication of one rank slow each other down."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskTable:
    """Tasks (T), streams (S), links (L), dependencies and link uses in compressed rows.

    Attributes
    ----------
    stream : (T,) stream of each task
    stream_rank, stream_kind : (S,) rank that a stream belongs to, and its `StreamKind`
    work : (T,) seconds, or bytes of a transfer
    latency_s : (T,) fixed time before the work
    rate_bytes_per_s : (T,) speed of a transfer that is alone; 0 for other tasks
    meeting : (T,) number of the meeting, below 4 T (or M); -1 for none
    dependency_offsets, dependencies : (T + 1,), (D,) task t waits for ``dependencies[offsets[t]:offsets[t + 1]]``
    link_offsets, links, link_weights : (T + 1,), (U,), (U,) links a transfer crosses, bytes on each per byte of work
    link_capacity : (L,) bytes/s
    compute_speed, transfer_speed : factors in (0, 1] while both run on a rank
    label : (T,) index into ``labels``, for messages, traces and totals
    meeting_size : (M,) tasks that each meeting must have, 0 where any number will do; empty: all of them
    name : what messages call the table
    """

    stream: IntArray
    stream_rank: IntArray
    stream_kind: IntArray
    work: FloatArray
    latency_s: FloatArray
    rate_bytes_per_s: FloatArray
    meeting: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    link_offsets: IntArray
    links: IntArray
    link_weights: FloatArray
    link_capacity: FloatArray
    compute_speed: float = 1.0
    transfer_speed: float = 1.0
    label: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    labels: Sequence[str] = ()
    meeting_size: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    name: str = "the task table"

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.stream)


def plain_table(**fields: Any) -> TaskTable:
    """A table without meetings, links and latencies, the work in seconds."""
    size = len(fields["stream"])
    nothing = np.zeros(size)
    return TaskTable(
        latency_s=nothing,
        rate_bytes_per_s=nothing,
        meeting=np.full(size, -1, dtype=np.int64),
        link_offsets=np.zeros(size + 1, dtype=np.int64),
        links=np.zeros(0, dtype=np.int64),
        link_weights=np.zeros(0),
        link_capacity=np.zeros(0),
        **fields,
    )


Engine = Callable[[TaskTable], tuple[FloatArray, FloatArray]]
"""Runs a table: when its tasks start and end, arrays (tasks,) of seconds."""


NEITHER, COMPUTES, TRANSFERS = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGroups:
    """Meetings, and tasks without one, as wholes: arrays (T,), those of wholes at the number of their first task.

    Attributes
    ----------
    owner : first task of the whole that each task belongs to
    size : tasks of a whole
    latency_s, amount : longest latency of a whole; bytes of its largest transfer, seconds if it has none
    pace : amount of the whole that a member lets pass in a second, alone; infinite for a member without work
    """

    table: TaskTable
    owner: IntArray
    size: IntArray
    latency_s: FloatArray
    amount: FloatArray
    pace: FloatArray

    @cached_property
    def next_member(self) -> IntArray:
        """(T,) the next task of the same whole, -1 behind the last."""
        following = np.full(self.table.size, -1, dtype=np.int64)
        met = np.flatnonzero(self.size[self.owner] > 1)
        order = met[np.argsort(self.owner[met], kind="stable")]
        same = self.owner[order[:-1]] == self.owner[order[1:]]
        following[order[:-1][same]] = order[1:][same]
        return following

    @cached_property
    def role(self) -> IntArray:
        """(T,) whether a member computes, transfers or does neither while its whole works, as far as that slows."""
        if not self.overlap_slows:
            return np.full(self.table.size, NEITHER)
        kind = self.table.stream_kind
        alone = np.where(kind == StreamKind.COMMUNICATION, TRANSFERS, NEITHER)
        alone[kind == StreamKind.COMPUTE] = COMPUTES
        role = alone[self.table.stream]
        role[(role == COMPUTES) & (self.table.rate_bytes_per_s > 0)] = TRANSFERS
        return role

    @cached_property
    def use_weights(self) -> FloatArray:
        """(U,) bytes on a link for each of the amount of the whole that crosses it."""
        table = self.table
        counts = np.diff(table.link_offsets)
        amount = self.amount[self.owner]
        share = np.divide(table.work, amount, out=np.zeros(table.size), where=amount > 0)
        weights: FloatArray = table.link_weights * np.repeat(share, counts)
        return weights

    @property
    def overlap_slows(self) -> bool:
        """Whether computation and communication of one rank slow each other down."""
        return self.table.compute_speed != 1.0 or self.table.transfer_speed != 1.0


def group_tasks(table: TaskTable) -> TaskGroups:
    """The wholes of a checked table."""
    moves = table.rate_bytes_per_s > 0
    speed = np.where(moves, table.rate_bytes_per_s, 1.0)
    owner = np.arange(table.size)
    size = np.ones(table.size, dtype=np.int64)
    met = np.flatnonzero(table.meeting >= 0)
    if not met.size:
        return TaskGroups(table=table, owner=owner, size=size, latency_s=table.latency_s, amount=table.work, pace=speed)
    first = np.zeros(int(table.meeting.max()) + 1, dtype=np.int64)
    first[table.meeting[met[::-1]]] = met[::-1]
    owner[met] = first[table.meeting[met]]
    size = np.bincount(owner, minlength=table.size)
    latency, seconds, moved = table.latency_s.copy(), table.work.copy(), np.where(moves, table.work, 0.0)
    for values in (latency, seconds, moved):
        np.maximum.at(values, owner[met], values[met])
    amount = np.where(moved > 0, moved, seconds)
    ratio = np.divide(amount[owner], table.work, out=np.full(table.size, np.inf), where=table.work > 0)
    return TaskGroups(table=table, owner=owner, size=size, latency_s=latency, amount=amount, pace=speed * ratio)


def tasks_by_stream(stream: IntArray, streams: int) -> tuple[IntArray, IntArray]:
    """Offsets (S + 1,) and tasks (T,) of every stream in the order they run there."""
    offsets = np.concatenate(([0], np.cumsum(np.bincount(stream, minlength=streams))))
    return offsets, stable_order(stream, streams)


def stable_order(numbers: IntArray, limit: int) -> IntArray:
    """Places (n,) of whole `numbers` from 0 to below `limit`, ascending, equal ones as they stand.

    numpy sorts integers of 16 bits by radix, several times as fast as wider ones.
    """
    narrow = numbers.astype(np.uint16) if limit <= 2**16 else numbers
    return np.argsort(narrow, kind="stable")


_TASKS_SHOWN = 6
_PER_TASK = ("stream", "work", "latency_s", "rate_bytes_per_s", "meeting")


def check_table(table: TaskTable) -> None:
    """Raise ProgramError where a table holds what no run can mean.

    Stream, task and link numbers that are not there; times, bytes and rates that are negative or no numbers;
    links of tasks that transfer nothing; meetings of another size than ``meeting_size`` says.
    """
    _check_shapes(table)
    _check_numbers(table)
    _check_references(table)
    _check_meetings(table)


def task_name(table: TaskTable, task: int) -> str:
    """What messages call a task: its number, its label and its rank."""
    label = f" {table.labels[table.label[task]]!r}" if len(table.label) and len(table.labels) else ""
    stream = int(table.stream[task])
    rank = f" of rank {table.stream_rank[stream]}" if 0 <= stream < len(table.stream_rank) else ""
    return f"task {task}{label}{rank}"


def _check_shapes(table: TaskTable) -> None:
    size = table.size
    sizes = dict.fromkeys(_PER_TASK, size)
    sizes |= {"dependency_offsets": size + 1, "link_offsets": size + 1, "link_weights": len(table.links)}
    sizes |= {"stream_kind": len(table.stream_rank)}
    if len(table.label):
        sizes["label"] = size
    for name, expected in sizes.items():
        found = getattr(table, name).shape
        if found != (expected,):
            raise ProgramError(f"{table.name} has {name} of shape {found}; {size} tasks need ({expected},)")
    for name, values in (("dependency", table.dependencies), ("link", table.links)):
        offsets = getattr(table, f"{name}_offsets")
        if offsets[0] != 0 or offsets[-1] != len(values) or (np.diff(offsets) < 0).any():
            raise ProgramError(
                f"{table.name} has {name}_offsets that do not rise from 0 to {len(values)}; count the rows anew"
            )


def _check_numbers(table: TaskTable) -> None:
    for name, unit in (("work", " of work"), ("latency_s", " s of latency"), ("rate_bytes_per_s", " bytes/s")):
        values: FloatArray = getattr(table, name)
        # A value that is no number fails both comparisons.
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            task = int(np.flatnonzero(~(np.isfinite(values) & (values >= 0)))[0])
            raise ProgramError(
                f"{task_name(table, task)} of {table.name} has {values[task]}{unit}; it must be finite and not "
                "negative: check the sizes and rates that it was made from"
            )
    for name in ("compute_speed", "transfer_speed"):
        speed = getattr(table, name)
        if not 0 < speed <= 1:
            raise ProgramError(f"{table.name} has {name} {speed}; a factor of an overlap is above 0 and at most 1")
    wrong = np.flatnonzero(~(table.link_capacity > 0))
    if wrong.size:
        raise ProgramError(
            f"link {wrong[0]} of {table.name} has a capacity of {table.link_capacity[wrong[0]]} bytes/s; "
            "what crosses it would never end: give it a capacity above 0"
        )


def _check_references(table: TaskTable) -> None:
    streams, size = len(table.stream_rank), table.size
    _check_range(table, table.stream, streams, None, "runs on stream", "streams")
    _check_range(table, table.dependencies, size, table.dependency_offsets, "waits for task", "tasks")
    _check_range(table, table.links, len(table.link_capacity), table.link_offsets, "crosses link", "links")
    if len(table.label):
        _check_range(table, table.label, len(table.labels), None, "has label", "labels")
    kinds = np.flatnonzero(~np.isin(table.stream_kind, list(StreamKind)))
    if kinds.size:
        raise ProgramError(
            f"stream {kinds[0]} of {table.name} is of kind {table.stream_kind[kinds[0]]}; "
            f"kinds are {', '.join(f'{kind.value} ({kind.name})' for kind in StreamKind)}"
        )
    if table.links.size:
        idle = np.flatnonzero((np.diff(table.link_offsets) > 0) & (table.rate_bytes_per_s <= 0))
        if idle.size:
            raise ProgramError(
                f"{task_name(table, int(idle[0]))} of {table.name} crosses links and has no rate; "
                "give a transfer the rate that it reaches alone"
            )
        bad = ~((table.link_weights >= 0) & (table.link_weights < np.inf))
        if bad.any():
            use = int(np.flatnonzero(bad)[0])
            task = int(np.searchsorted(table.link_offsets, use, side="right")) - 1
            raise ProgramError(
                f"{task_name(table, task)} of {table.name} loads link {table.links[use]} with "
                f"{table.link_weights[use]} bytes per byte; it must be finite and not negative"
            )


def _check_range(
    table: TaskTable, values: IntArray, count: int, offsets: IntArray | None, verb: str, what: str
) -> None:
    """Numbers of what tasks refer to, one for each task or in rows of `offsets`, are below `count`."""
    if not values.size or (values.min() >= 0 and values.max() < count):
        return
    place = int(np.flatnonzero((values < 0) | (values >= count))[0])
    task = place if offsets is None else int(np.searchsorted(offsets, place, side="right")) - 1
    known = f"{what} 0 to {count - 1}" if count else f"no {what}"
    name = f"task {task}" if verb == "has label" else task_name(table, task)
    raise ProgramError(f"{name} of {table.name} {verb} {values[place]}; there are {known}: correct the number")


def _check_meetings(table: TaskTable) -> None:
    if not table.size:
        return
    low, high = int(table.meeting.min()), int(table.meeting.max())
    limit = max(4 * table.size, 1000) if not len(table.meeting_size) else len(table.meeting_size)
    if low < -1 or high >= limit:
        task = int(np.flatnonzero((table.meeting < -1) | (table.meeting >= limit))[0])
        raise ProgramError(
            f"{task_name(table, task)} of {table.name} is in meeting {table.meeting[task]}; "
            f"meetings have numbers from 0 to {limit - 1}, -1 is none: number them from 0"
        )
    if not len(table.meeting_size):
        return
    found = np.bincount(table.meeting[table.meeting >= 0], minlength=len(table.meeting_size))
    wrong = np.flatnonzero((found != table.meeting_size) & (table.meeting_size > 0))
    if wrong.size:
        tasks = np.flatnonzero(table.meeting == wrong[0])
        shown = ", ".join(task_name(table, int(task)) for task in tasks[:_TASKS_SHOWN]) or "no task"
        meeting = int(wrong[0])
        raise ProgramError(
            f"meeting {meeting} of {table.name} has {found[meeting]} of {table.meeting_size[meeting]} tasks: {shown}. "
            "A send needs its receive, a collective every rank of its group: add the tasks that are missing"
        )


def deadlock(groups: TaskGroups, ends: FloatArray) -> ProgramError:
    """The error that names a cycle of tasks waiting for each other, given the ends of the tasks that did end."""
    table = groups.table
    stuck, previous = np.isnan(ends), _previous(table)
    task = int(np.flatnonzero(stuck)[0])
    path: dict[int, int] = {}
    reasons: list[str] = []
    while task not in path:
        path[task] = len(reasons)
        member, before, depends = _obstacle(groups, stuck, previous, task)
        if member != task:
            reasons.append(f"{task_name(table, task)} meets {task_name(table, member)}")
        stream = int(table.stream[member])
        kind = StreamKind(int(table.stream_kind[stream])).name.lower()
        link = "waits for" if depends else f"comes behind ({kind} stream {stream})"
        reasons.append(f"{task_name(table, member)} {link} {task_name(table, before)}")
        task = before
    cycle = reasons[path[task] :]
    shown = "; ".join(cycle[:_TASKS_SHOWN]) + (f"; … {len(cycle)} tasks in all" if len(cycle) > _TASKS_SHOWN else "")
    return ProgramError(
        f"{table.name} never ends: {shown}. A task may wait only for tasks that can end before it: "
        "drop one of these dependencies or move a task to another stream"
    )


def _previous(table: TaskTable) -> IntArray:
    """(T,) the task before each on its stream, -1 for the first."""
    offsets, tasks = tasks_by_stream(table.stream, len(table.stream_rank))
    previous = np.full(table.size, -1, dtype=np.int64)
    previous[tasks[1:]] = tasks[:-1]
    previous[tasks[offsets[:-1][np.diff(offsets) > 0]]] = -1
    return previous


def _obstacle(groups: TaskGroups, stuck: BoolArray, previous: IntArray, task: int) -> tuple[int, int, bool]:
    """What keeps `task` from starting: a member of its meeting, what that waits for, whether it depends on it."""
    table = groups.table
    members = [task]
    following = int(groups.owner[task])
    while following >= 0:
        members.append(following)
        following = int(groups.next_member[following])
    for member in members:
        row = table.dependencies[table.dependency_offsets[member] : table.dependency_offsets[member + 1]]
        unmet = row[stuck[row]]
        if unmet.size:
            return member, int(unmet[0]), True
        if previous[member] >= 0 and stuck[previous[member]]:
            return member, int(previous[member]), False
    raise AssertionError(f"{task_name(table, task)} could start and did not")
