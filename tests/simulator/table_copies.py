"""A table of ranks that each stand for several becomes the table of all of them."""

from __future__ import annotations

import dataclasses

import numpy as np

from simulator.errors import ProgramError
from simulator.task_table import BoolArray, IntArray, TaskTable


def expand(table: TaskTable, copies: int, *, joint: BoolArray, shared: BoolArray) -> TaskTable:
    """The table in which every rank stands `copies` times: data-parallel replicas as what they are.

    Both tables give the same times: ranks that behave alike are simulated once, and an engine's cost grows with
    behaviours, not with devices. Copy c of rank r is rank ``c * (highest rank + 1) + r``; copy c of task t is task
    ``c * tasks + t``.

    Parameters
    ----------
    joint
        (T,) tasks that all copies run together as one meeting, such as the all-reduce of data-parallel replicas.
        The others meet, and wait for, tasks of their own copy only.
    shared
        (L,) links that the copies share; in `table` their weights count all copies. Every copy has its own of the
        others.
    """
    if copies < 1 or joint.shape != (table.size,) or shared.shape != table.link_capacity.shape:
        raise ProgramError(
            f"{table.name} has {table.size} tasks and {len(table.link_capacity)} links; it was to stand {copies} times "
            f"with {joint.shape} joint tasks and {shared.shape} shared links: give one flag for each and 1 copy or more"
        )
    copy = np.arange(copies)[:, None]
    own = np.flatnonzero(~shared)
    # The shared links come first, then those of each copy.
    place = np.zeros(len(shared), dtype=np.int64)
    place[shared] = np.arange(len(shared) - len(own))
    place[own] = len(shared) - len(own) + np.arange(len(own))
    of_copy = (~shared[table.links]).astype(np.int64) * len(own)
    weights = np.where(shared[table.links], table.link_weights / copies, table.link_weights)
    ranks = int(table.stream_rank.max(initial=-1)) + 1
    streams = len(table.stream_rank)
    sizes, meeting = _meetings(table, copies, joint)
    return dataclasses.replace(
        table,
        stream=(table.stream + copy * streams).ravel(),
        stream_rank=(table.stream_rank + copy * ranks).ravel(),
        stream_kind=np.tile(table.stream_kind, copies),
        work=np.tile(table.work, copies),
        latency_s=np.tile(table.latency_s, copies),
        rate_bytes_per_s=np.tile(table.rate_bytes_per_s, copies),
        meeting=meeting,
        meeting_size=sizes,
        dependency_offsets=_rows(table.dependency_offsets, copies),
        dependencies=(table.dependencies + copy * table.size).ravel(),
        link_offsets=_rows(table.link_offsets, copies),
        links=(place[table.links] + copy * of_copy).ravel(),
        link_weights=np.tile(weights, copies),
        link_capacity=np.concatenate([table.link_capacity[shared], np.tile(table.link_capacity[own], copies)]),
        label=np.tile(table.label, copies),
    )


def _rows(offsets: IntArray, copies: int) -> IntArray:
    return np.concatenate([offsets[:1], (offsets[1:] + np.arange(copies)[:, None] * offsets[-1]).ravel()])


def _meetings(table: TaskTable, copies: int, joint: BoolArray) -> tuple[IntArray, IntArray]:
    """Sizes of the meetings, and the meeting (copies x T,) of each task.

    Every copy has its own of each meeting, or all have one where its tasks are joint; a joint task that met none
    gets a meeting of its own.
    """
    count = int(table.meeting.max(initial=-1)) + 1
    meeting = table.meeting.copy()
    lone = np.flatnonzero(joint & (meeting < 0))
    meeting[lone] = count + np.arange(len(lone))
    count += len(lone)
    met = meeting >= 0
    of_joint = np.zeros(count, dtype=bool)
    of_joint[meeting[joint]] = True
    apart = np.flatnonzero(met & ~joint)
    apart = apart[of_joint[meeting[apart]]]
    if apart.size:
        raise ProgramError(
            f"task {apart[0]} of {table.name} meets tasks that all copies run together, and is not joint itself: "
            "mark every task of the meeting"
        )
    all_copies = meeting + np.arange(copies)[:, None] * np.where(met & ~joint, count, 0)
    known = np.zeros(count, dtype=np.int64)
    given = min(count, len(table.meeting_size))
    known[:given] = table.meeting_size[:given]
    known[meeting[lone]] = 1
    sizes = np.tile(known, copies)
    sizes[:count][of_joint] *= copies
    # A joint meeting has one number; those of the other copies have no tasks.
    sizes[count:][np.tile(of_joint, copies - 1)] = 0
    return sizes, all_copies.ravel()
