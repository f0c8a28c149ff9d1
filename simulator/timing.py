"""Seconds of tasks on a hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from simulator.corrections import kernel_factor, message_time
from simulator.errors import ProgramError
from simulator.hardware import Hardware
from simulator.kernels import has_shape_model, kernel_time, shaped_time
from simulator.launches import message_launches, paced
from simulator.program import DISK, HOST, Collective, Kernel, ProgramAxis, Task
from simulator.topology import GroupShape, group_shape

ALL_BELOW, NONE_ABOVE = 0.25, 2.0
"""Parts of the caches that a working set must not exceed to lie there, and that it must to be gone."""


def cached_share(hardware: Hardware, working_set_bytes: float, processes: int) -> float:
    """Part of the bytes that kernels move which lies in the caches of a device that has its share of the common one.

    All of them up to `ALL_BELOW` of the caches, none from `NONE_ABOVE` of them, evenly on the logarithm between:
    kernels of all classes timed on inputs taken in turn from growing memory lose what they gain by caches so, because
    caches are not filled in order and other programs are in them too.
    """
    if hardware.caches is None:
        return 0.0
    sharing = max(1, min(processes, hardware.devices_per_node))
    size = hardware.caches.own_bytes + hardware.caches.shared_bytes / sharing
    if not size:
        return 0.0
    place = log(NONE_ABOVE * size / max(working_set_bytes, 1.0)) / log(NONE_ABOVE / ALL_BELOW)
    return min(1.0, max(0.0, place))


def in_caches(hardware: Hardware, working_set_bytes: float, processes: int) -> Hardware:
    """The hardware as kernels and messages meet it in a step of this working set, on so many processes."""
    share = cached_share(hardware, working_set_bytes, processes)
    hardware = sharing_cores(hardware, processes)
    return hardware if share == hardware.cached_share else replace(hardware, cached_share=share)


def sharing_cores(hardware: Hardware, processes: float) -> Hardware:
    """The hardware as messages meet it where so many processes compute at a time, on average."""
    same = not hardware.crowding or processes == hardware.processes
    return hardware if same else replace(hardware, processes=processes)


FloatArray = npt.NDArray[np.float64]
BATCH_AXIS = "data"
"""Axis whose messages no pass of a unit waits for the launch of."""
Amount = TypeVar("Amount", float, npt.NDArray[np.float64])
HOST_PASSES = 3.0
"""How often a message among hosts reads or writes each of its bytes in memory: the sender, the receiver, the copy."""


def host_time(hardware: Hardware, size_bytes: Amount, copies: float = 1.0) -> Amount:
    """Seconds of transfers between a device and its host; 0 where the profile does not say how fast they are.

    Each of the `copies` is launched as a kernel is that copies on the device, and takes that one's overhead.
    """
    through_node = hardware.node.host_bandwidth_bytes_per_s if hardware.node else 0.0
    bandwidth = hardware.reliability.snapshot_bandwidth_bytes_per_s or through_node
    if not bandwidth:
        return 0.0 * size_bytes
    return copies * hardware.kernels[Kernel.COPY].overhead_s + size_bytes / bandwidth


def host_memory_time(hardware: Hardware, size_bytes: FloatArray) -> FloatArray:
    """Seconds (n,) in which a host moves bytes of its memory for one device; the devices of a node share it."""
    return size_bytes * hardware.devices_per_node / hardware.host_memory_bandwidth


def host_message_time(hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape) -> FloatArray:
    """Seconds (n,) of a collective on tensors in the memory of hosts.

    Between hosts it crosses the links that devices use; in each it is written out, read in and copied: `HOST_PASSES`
    of the payload, twice as many where it is summed and sent on. The slower of both counts.
    """
    passes = HOST_PASSES * (2.0 if collective is Collective.ALL_REDUCE else 1.0)
    moved = np.asarray(host_memory_time(hardware, passes * payload))
    return np.maximum(message_time(hardware, collective, payload, group), moved)


def task_times(tasks: Sequence[Task], axes: Sequence[ProgramAxis], hardware: Hardware, computing: float) -> FloatArray:
    """(tasks,) seconds of tasks, whose messages travel along `axes`, while so many devices compute.

    Tasks that share an efficiency are timed together; `simulator.corrections` says what slows them, and
    `simulator.launches` where the host is slower. `Hardware.cached_share` says how much stays in the caches. What the
    host runs takes a kernel's overhead on the device, slowed down by the software as there, and its bytes over the
    memory of the host; where the profile knows no way between them, as of a CPU, both are one.

    Raises
    ------
    ProgramError
        When a collective names an axis that is not among `axes`.
    """
    shapes = {axis.name: group_shape(hardware, axis.size, axis.stride) for axis in axes}
    seconds, calls = np.zeros(len(tasks)), np.zeros(len(tasks))
    reaches_host = host_time(hardware, 1.0) > 0
    kernels, collectives = tasks_by_work(tasks)
    for (kernel, dtype, shaped), compute in kernels.items():
        slowdown = kernel_factor(hardware, kernel, dtype, computing)
        work = np.array([(tasks[i].flops, tasks[i].bytes_moved) for i in compute])
        if shaped and has_shape_model(hardware, kernel):
            shape = np.array([tasks[i].shape for i in compute]).T
            seconds[compute] = slowdown * shaped_time(hardware, kernel, dtype, tuple(shape), work[:, 0], work[:, 1])
            continue
        seconds[compute] = slowdown * kernel_time(hardware, kernel, dtype, work[:, 0], work[:, 1])
        for i in compute if kernel is Kernel.COPY else ():
            if tasks[i].axis == HOST:
                seconds[i] = host_time(hardware, tasks[i].bytes_moved, tasks[i].copies)
            elif tasks[i].axis == DISK:
                seconds[i] = tasks[i].bytes_moved * hardware.devices_per_node / hardware.disk_bandwidth
        if reaches_host and (hosted := [i for i in compute if tasks[i].on_host]):
            moved = np.array([tasks[i].bytes_moved for i in hosted])
            seconds[hosted] = slowdown * hardware.kernels[kernel].overhead_s + host_memory_time(hardware, moved)
    for (collective, axis), messages in collectives.items():
        if axis not in shapes:
            raise ProgramError(
                f"task {tasks[messages[0]].name!r} communicates on axis {axis!r}; the mesh has axes "
                f"{sorted(shapes)}: add the axis or correct the task"
            )
        payload = np.array([tasks[i].payload_bytes for i in messages])
        sharded = np.array([tasks[i].sharded for i in messages])
        seconds[messages] = message_time(hardware, collective, payload, shapes[axis], sharded, axis)
        calls[messages] = 0.0 if axis == BATCH_AXIS else message_launches(hardware, shapes[axis], collective, axis)
        if hardware.copies_apart:
            copied = np.array([tasks[i].copied_bytes for i in messages])
            seconds[messages] += copy_time(hardware, copied, computing)
        if hosted := [i for i in messages if tasks[i].on_host]:
            payload = np.array([tasks[i].payload_bytes for i in hosted])
            seconds[hosted] = host_message_time(hardware, collective, payload, shapes[axis])
    return paced(tasks, seconds, hardware, calls)


def copy_time(hardware: Hardware, copied_bytes: FloatArray, sharing: float) -> FloatArray:
    """Seconds (n,) of copies around messages that read and write so many bytes, where so many processes compute."""
    slowdown = kernel_factor(hardware, Kernel.COPY, "", sharing)
    seconds = kernel_time(hardware, Kernel.COPY, "", np.zeros_like(copied_bytes), copied_bytes)
    return np.where(copied_bytes > 0, slowdown * seconds, 0.0)


def tasks_by_work(
    tasks: Sequence[Task],
) -> tuple[dict[tuple[Kernel, str, bool], list[int]], dict[tuple[Collective, str], list[int]]]:
    """Task indices by kernel, dtype and whether the shape is known, and by collective and axis."""
    kernels: dict[tuple[Kernel, str, bool], list[int]] = {}
    collectives: dict[tuple[Collective, str], list[int]] = {}
    for index, task in enumerate(tasks):
        if task.collective is None:
            kernels.setdefault((task.kernel, task.dtype, task.shape is not None), []).append(index)
        else:
            collectives.setdefault((task.collective, task.axis), []).append(index)
    return kernels, collectives
