"""Copies between a device and its host."""

from __future__ import annotations

from simulator.program import HOST, Kernel, Phase, Task


def host_copy(size_bytes: float, name: str = "optimizer states in host memory", phase: Phase = Phase.UPDATE) -> Task:
    """A task that moves bytes between a device and its host."""
    return Task(name=name, phase=phase, kernel=Kernel.COPY, axis=HOST, bytes_moved=size_bytes)
