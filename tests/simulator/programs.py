"""A short way to write tasks, and tables of their streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulator.contention import message_transfers, shared_work
from simulator.hardware import Hardware
from simulator.program import COMPUTE_STREAM, Collective, Kernel, Phase, ProgramAxis, Task
from simulator.task_table import FloatArray, StreamKind, TaskTable
from tests.oracles.table_builder import TableBuilder

AXES = (ProgramAxis(name="data", size=2, stride=2), ProgramAxis(name="tensor", size=2, stride=1))
DEVICES = 4


def task(name: str, **fields: Any) -> Task:
    return Task(name=name, **{"phase": Phase.FORWARD, "kernel": Kernel.MATMUL, **fields})


def communication(name: str, axis: str = "data", **fields: Any) -> Task:
    values = {"phase": Phase.BACKWARD, "collective": Collective.ALL_REDUCE, "axis": axis, "payload_bytes": 1e6}
    return Task(name=name, stream=f"communication:{axis}", **{**values, **fields})


def table_of(
    tasks: Sequence[Task],
    seconds: FloatArray,
    after: Sequence[Sequence[int]] = (),
    hardware: Hardware | None = None,
    axes: tuple[ProgramAxis, ...] = AXES,
    devices: int = DEVICES,
) -> TaskTable:
    """Tasks of a rank on their streams, each behind those that ``after`` names; without hardware links are free."""
    builder = TableBuilder()
    streams = {}
    for name in dict.fromkeys(one.stream for one in tasks):
        kind = StreamKind.COMPUTE if name == COMPUTE_STREAM else StreamKind.COMMUNICATION
        streams[name] = builder.stream(0, kind)
    for number, one in enumerate(tasks):
        builder.task(streams[one.stream], after=after[number] if after else (), label=one.name)
    speeds = {}
    transfers = None
    if hardware is not None:
        transfers = message_transfers(tasks, seconds, hardware, devices, axes)
        speeds = {"compute_speed": hardware.overlap_compute_speed, "transfer_speed": hardware.overlap_transfer_speed}
    return builder.build(**shared_work(np.asarray(seconds, dtype=np.float64), transfers), **speeds)
