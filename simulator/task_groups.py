"""What of a task table both engines work on: meetings as wholes, their amounts and paces.

A whole, a meeting or a task without one, has the number of its first task: its *owner*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simulator.task_table import FloatArray, IntArray, StreamKind, TaskTable

NEITHER, COMPUTES, TRANSFERS = range(3)


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskGroups:
    """Arrays (T,); those of wholes hold at their owner.

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
