"""Messages of several mesh axes on the links that they share.

A collective alone takes the time of `simulator.collectives`. Where groups of several axes cross the same links, its
messages are a transfer on these links: for all but the latency of its time it sends bytes over its own narrowest link,
and over every shared link in proportion; together they load a link as the messages of all devices do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simulator.corrections import message_time
from simulator.hardware import Hardware
from simulator.program import Collective, ProgramAxis, Task
from simulator.task_table import FloatArray, IntArray, StreamKind, TaskTable
from simulator.timing import tasks_by_work
from simulator.topology import group_shape, shared_links
from simulator.topology.sharing import Pattern, direct_send, pairwise_all_to_all, ring_gather

PATTERNS: Mapping[Collective, Pattern] = {Collective.ALL_TO_ALL: pairwise_all_to_all, Collective.SEND: direct_send}
"""Where messages go, other than around a ring."""
LARGE_BYTES = 1e30
MOST_DEVICES = 256
"""Larger meshes that no smaller one stands for would take seconds to route."""
OVERLOADED = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Transfers:
    """Messages (M,) among tasks.

    Attributes
    ----------
    tasks, latency_s : (M,) their tasks, and the part of their time that moves nothing
    rate_bytes_per_s : (M,) bytes over the narrowest link, alone; 0 where no shared link is crossed
    link_counts, links, link_weights : (M,), (U,), (U,) shared links crossed, bytes on each per byte of the transfer
    link_capacity : (L,) bytes/s
    """

    tasks: IntArray
    latency_s: FloatArray
    rate_bytes_per_s: FloatArray
    link_counts: IntArray
    links: IntArray
    link_weights: FloatArray
    link_capacity: FloatArray


class _Shared(NamedTuple):
    """Links that several axes cross: capacities, and by axis and collective weights (L,) and the narrowest link's."""

    capacity: FloatArray
    weights: Mapping[tuple[str, Collective], FloatArray]
    widths: Mapping[tuple[str, Collective], float]


def message_transfers(
    tasks: Sequence[Task],
    seconds: FloatArray,
    hardware: Hardware,
    devices: int,
    axes: tuple[ProgramAxis, ...],
) -> Transfers | None:
    """Transfers of tasks that take `seconds` (tasks,) alone, on axes of so many devices.

    None where it is enough to know how long messages take: where nothing overlaps, and where axes have links of their
    own and overlap slows no message.
    """
    if not hardware.overlaps_communication:
        return None
    _, messages = tasks_by_work(tasks)
    streams = {tasks[i].stream for those in messages.values() for i in those}
    flows = tuple(sorted((axis, collective) for collective, axis in messages)) if len(streams) > 1 else ()
    shared = _shared(hardware, devices, axes, flows)
    if not messages or not (shared.capacity.size or hardware.overlap_transfer_speed != 1):
        return None
    latency, rate = np.zeros(len(tasks)), np.zeros(len(tasks))
    weights = np.zeros((len(tasks), len(shared.capacity)))
    shapes = {axis.name: group_shape(hardware, axis.size, axis.stride) for axis in axes}
    for (collective, axis), those in messages.items():
        payload = np.array([tasks[i].payload_bytes for i in those])
        fixed, large = message_time(hardware, collective, np.array([0.0, LARGE_BYTES]), shapes[axis])
        latency[those] = np.minimum(fixed, seconds[those])
        weight = shared.weights.get((axis, collective))
        if weight is not None and weight.any():
            moving = seconds[those] - latency[those]
            # Short messages leave links idle between their pieces.
            full = np.divide(payload * (large / LARGE_BYTES), moving, out=np.zeros(len(those)), where=moving > 0)
            rate[those] = np.minimum(full, 1.0) * shared.widths[axis, collective]
            weights[those] = weight
    found = np.array(sorted(i for those in messages.values() for i in those), dtype=np.int64)
    crossed = (weights[found] > 0) & (rate[found] > 0)[:, None]
    return Transfers(
        tasks=found,
        latency_s=latency[found],
        rate_bytes_per_s=rate[found],
        link_counts=np.count_nonzero(crossed, axis=1),
        links=np.nonzero(crossed)[1],
        link_weights=weights[found][crossed],
        link_capacity=shared.capacity,
    )


def shared_work(seconds: FloatArray, transfers: Transfers | None) -> dict[str, Any]:
    """Work of the tasks and links that they share, as fields of a `TaskTable`."""
    size = len(seconds)
    work, latency, rate = seconds, np.zeros(size), np.zeros(size)
    offsets = np.zeros(size + 1, dtype=np.int64)
    links, weights, capacity = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    if transfers is not None:
        tasks, links, weights = transfers.tasks, transfers.links, transfers.link_weights
        capacity = transfers.link_capacity
        latency[tasks], rate[tasks] = transfers.latency_s, transfers.rate_bytes_per_s
        work = (seconds - latency) * np.where(rate > 0, rate, 1.0)
        offsets[tasks + 1] = transfers.link_counts
        np.cumsum(offsets, out=offsets)
    return {
        "work": work,
        "latency_s": latency,
        "rate_bytes_per_s": rate,
        "link_offsets": offsets,
        "links": links,
        "link_weights": weights,
        "link_capacity": capacity,
    }


@lru_cache(maxsize=256)
def _shared(
    hardware: Hardware, devices: int, axes: tuple[ProgramAxis, ...], flows: tuple[tuple[str, Collective], ...]
) -> _Shared:
    """Links that `flows` of several axes cross, all groups of the axes at once."""
    places = representative_axes(hardware, devices, axes) if len({axis for axis, _ in flows}) > 1 else ()
    count = devices if places is axes else int(np.prod([axis.size for axis in places], dtype=np.int64))
    if not places or count > MOST_DEVICES:
        return _Shared(np.zeros(0), {}, {})
    names = {f"{axis} {collective}": (axis, collective) for axis, collective in flows}
    links = shared_links(
        _filled(hardware, devices),
        count,
        {name: next((a.size, a.stride) for a in places if a.name == axis) for name, (axis, _) in names.items()},
        {name: PATTERNS.get(collective, ring_gather) for name, (_, collective) in names.items()},
    )
    weights = {flow: links.weights(name) for name, flow in names.items()}
    by_axis = [
        np.any([weight > 0 for (axis, _), weight in weights.items() if axis == one], axis=0)
        for one in {axis for axis, _ in flows}
    ]
    kept = np.count_nonzero(by_axis, axis=0) > 1
    return _Shared(
        links.capacities[kept],
        {flow: weight[kept] for flow, weight in weights.items()},
        {flow: links.widths[name] for name, flow in names.items()},
    )


def representative_axes(hardware: Hardware, devices: int, axes: tuple[ProgramAxis, ...]) -> tuple[ProgramAxis, ...]:
    """The axes of a smaller mesh whose groups load links of every level as those of `axes` do.

    Rings and neighbours load each unit of a level alike, however many units there are, so two units of the outermost
    level that a group crosses stand for all. An exchange sends less inside a unit the more units there are; two make
    it the most. Where no smaller mesh does, the axes are returned as they are.
    """
    order = sorted(axes, key=lambda axis: axis.stride)
    strides = np.cumprod([1, *(axis.size for axis in order)])
    if [axis.stride for axis in order] != strides[:-1].tolist() or strides[-1] != devices:
        return axes
    shapes = {axis.name: group_shape(hardware, axis.size, axis.stride) for axis in axes}
    most = max((shape.members[shape.outermost] for shape in shapes.values()), default=1)
    for units in range(2, most):
        found: list[ProgramAxis] = []
        stride = 1
        for axis in order:
            shape = shapes[axis.name]
            level = shape.outermost
            kept = min(shape.members[level], units) if level else shape.members[level]
            found.append(ProgramAxis(name=axis.name, size=shape.within(level - 1) * kept, stride=stride))
            stride *= found[-1].size
        if hardware.holds(stride) and all(_alike(hardware, shapes[axis.name].members, axis) for axis in found):
            return tuple(found)
    return axes


def _filled(hardware: Hardware, devices: int) -> Hardware:
    """The cluster with units of as many devices as a job of `devices` takes of each, 64 of a rack of 72.

    Beyond the nodes a graph has leaves and a spine; a cluster of more levels is a tree of switches.
    """
    whole = group_shape(hardware, devices, 1)
    taken = [whole.within(place) for place in range(len(hardware.levels))]
    levels = tuple(
        replace(level, size=size) if level.size < devices and size % hardware.devices_per_node == 0 else level
        for level, size in zip(hardware.levels, taken, strict=True)
    )
    unit = max(hardware.devices_per_node, levels[0].size)
    deep = sum(level.size > unit for level in levels) > 2
    return replace(hardware, levels=levels, node=None if deep else hardware.node)


def _alike(hardware: Hardware, members: tuple[int, ...], axis: ProgramAxis) -> bool:
    """Whether the groups of an axis lie in the levels as `members` do, but for fewer units of the outermost."""
    now = group_shape(hardware, axis.size, axis.stride)
    level = now.outermost
    return now.members[:level] == members[:level] and now.members[level + 1 :] == members[level + 1 :]


def messages_meet(table: TaskTable, starts: FloatArray, ends: FloatArray) -> bool:
    """Whether messages of several streams are under way at once when tasks run from `starts` to `ends` (T,)."""
    sent = (table.stream_kind[table.stream] == StreamKind.COMMUNICATION) & (ends > starts)
    order = np.argsort(starts[sent], kind="stable")
    begin, end = starts[sent][order], np.maximum.accumulate(ends[sent][order])
    return bool((begin[1:] < end[:-1]).any())


def overloads(table: TaskTable, starts: FloatArray, ends: FloatArray) -> bool:
    """Whether transfers that run from `starts` to `ends` (T,) at full rate ask more of a link than it carries."""
    task = np.repeat(np.arange(table.size), np.diff(table.link_offsets))
    load = table.link_weights * table.rate_bytes_per_s[task] / table.link_capacity[table.links]
    begin, end = (starts + table.latency_s)[task], ends[task]
    kept = end > begin
    change = np.concatenate([-load[kept], load[kept]])
    # What ends leaves its links before another begins at the same time.
    order = np.lexsort((change > 0, np.concatenate([end[kept], begin[kept]]), np.tile(table.links[kept], 2)))
    return bool(np.max(np.cumsum(change[order]), initial=0.0) > OVERLOADED)
