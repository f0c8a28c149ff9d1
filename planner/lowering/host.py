"""Copies between a device and its host, and between a host and its disks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.cost.work import state_bytes
from planner.graph.operator_graph import DTYPE_BYTES
from planner.lowering.placed import PlacedGraph
from simulator.program import DISK, HOST, Kernel, Phase, Task

HOST_STREAM = "host"
"""Stream of copies that run beside computation."""


def host_copy(
    size_bytes: float, name: str = "optimizer states in host memory", phase: Phase = Phase.UPDATE, copies: int = 1
) -> Task:
    """A task that moves bytes between a device and its host, in so many copies."""
    return Task(name=name, phase=phase, kernel=Kernel.COPY, axis=HOST, bytes_moved=size_bytes, copies=copies)


def disk_transfer(size_bytes: float, name: str, phase: Phase = Phase.UPDATE) -> Task:
    """A task that moves bytes between a host and its disks."""
    return Task(name=name, phase=phase, kernel=Kernel.COPY, axis=DISK, bytes_moved=size_bytes)


def offloading(source: PlacedGraph, parameters: Iterable[tuple[int, int]]) -> Iterator[Task]:
    """What an update of parameters costs beside its work where their states are not on the device.

    Gradients go to the host and parameters come back, unless they live there; what is on a disk is read and written.

    Parameters
    ----------
    parameters
        Nodes, each with how many parameters like it there are.
    """
    moved = states = 0.0
    copies, stays = 0, source.options.offload_parameters
    ways = 1 if stays else 2
    for index, times in parameters:
        spec = source.graph.nodes[index].outputs[0]
        size = times * source.local_bytes(spec, source.stored[index])
        moved += ways * size
        copies += ways * times
        states += 2.0 * size * state_bytes(source.options.optimizer, spec.dtype) / DTYPE_BYTES[spec.dtype]
        states += 2.0 * size if stays else 0.0
    yield host_copy(moved, copies=copies)
    if source.options.offload_to == "disk" and states:
        yield disk_transfer(states, "parameters and states on disk" if stays else "optimizer states on disk")
