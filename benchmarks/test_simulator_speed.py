"""Speed of both engines on one rank and on tables of many ranks, and of the times of tasks.

Run with ``pytest benchmarks/test_simulator_speed.py``; ``extra_info`` holds tasks per second. Each task has two
events, its start and its end.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.large_tables import pipeline_table
from simulator import contention, engine, fast_engine
from simulator.contention import message_transfers, shared_work
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import COMPUTE_STREAM, Collective, Kernel, Phase, ProgramAxis, Task
from simulator.task_table import StreamKind, TaskTable
from simulator.timing import task_times
from tests.oracles.table_builder import TableBuilder

TASKS = 10_000
PER_BLOCK = 20


def training_like_tasks() -> list[Task]:
    """Blocks of operators; in each, a waited-for and a free-running collective."""
    half = TASKS // 2
    tasks: list[Task] = []
    for index in range(TASKS):
        backward = index >= half
        fields: dict[str, Any] = {
            "name": f"blocks.{index % half // PER_BLOCK}.operator{index % PER_BLOCK}",
            "phase": Phase.BACKWARD if backward else Phase.FORWARD,
        }
        if index % PER_BLOCK == 7:
            fields |= {"collective": Collective.ALL_REDUCE, "axis": "tensor", "payload_bytes": 5e7}
            fields |= {"stream": "communication:tensor"}
        elif backward and index % PER_BLOCK == 13:
            fields |= {"collective": Collective.REDUCE_SCATTER, "axis": "data", "payload_bytes": 2e8}
            fields |= {"stream": "communication:data"}
        else:
            kernel = (Kernel.MATMUL, Kernel.ELEMENTWISE, Kernel.VIEW, Kernel.NORMALIZATION)[index % 4]
            fields |= {"kernel": kernel, "dtype": "bfloat16", "flops": 1e10, "bytes_moved": 1e7}
        tasks.append(Task(**fields))
    return tasks


def mesh_axes(devices: int, tensor: int = 8) -> tuple[ProgramAxis, ...]:
    """A data and a tensor axis: with `tensor` beyond a node both leave it."""
    data = ProgramAxis(name="data", size=devices // tensor, stride=tensor)
    return data, ProgramAxis(name="tensor", size=tensor, stride=1)


def table_of(tasks: Sequence[Task], hardware: Hardware, devices: int, tensor: int = 8) -> TaskTable:
    """The tasks on one rank, each behind the two before it, timed and on the links that their messages share."""
    axes = mesh_axes(devices, tensor)
    seconds = task_times(tasks, axes, hardware, devices)
    builder = TableBuilder()
    streams = {
        name: builder.stream(0, StreamKind.COMPUTE if name == COMPUTE_STREAM else StreamKind.COMMUNICATION)
        for name in dict.fromkeys(task.stream for task in tasks)
    }
    for number, task in enumerate(tasks):
        builder.task(streams[task.stream], after=range(max(0, number - 2), number))
    transfers = message_transfers(tasks, seconds, hardware, devices, axes)
    return builder.build(**shared_work(seconds, transfers), compute_speed=hardware.overlap_compute_speed)


@pytest.mark.parametrize("module", [engine, fast_engine], ids=["reference", "fast"])
def test_one_rank(benchmark: Any, module: Any) -> None:
    table = table_of(training_like_tasks(), load_profile("dgx-a100"), 64)
    _, ends = benchmark(module.run, table)
    assert ends.max() > 0
    if benchmark.stats:
        benchmark.extra_info["tasks_per_second"] = TASKS / benchmark.stats.stats.median


def cluster(devices: int) -> Hardware:
    """DGX-A100 nodes, as many as it takes."""
    hardware = load_profile("dgx-a100")
    levels = (*hardware.levels[:-1], replace(hardware.levels[-1], size=devices))
    return replace(hardware, levels=levels, max_devices=devices)


@pytest.mark.parametrize("tensor", [8, 16], ids=["own-links", "shared-cards"])
def test_cost_grows_with_behaviour_not_with_devices(benchmark: Any, tensor: int) -> None:
    """The same tasks on 1,024 and on 65,536 devices, in turn; nothing about links is remembered between them."""
    hardware, tasks = cluster(65_536), training_like_tasks()
    seconds: dict[int, list[float]] = {devices: [] for devices in (1_024, 65_536)}

    def both() -> None:
        for devices, found in seconds.items():
            contention._shared.cache_clear()
            begin = time.perf_counter()
            fast_engine.run(table_of(tasks, hardware, devices, tensor))
            found.append(time.perf_counter() - begin)

    benchmark.pedantic(both, rounds=7, warmup_rounds=1)
    if benchmark.stats:
        few, many = (min(found) for found in seconds.values())
        benchmark.extra_info["65,536 / 1,024 devices"] = round(many / few, 3)
        assert many <= 1.5 * few


def test_task_times(benchmark: Any) -> None:
    tasks, hardware = training_like_tasks(), load_profile("dgx-a100")
    assert benchmark(task_times, tasks, mesh_axes(64), hardware, 64).shape == (TASKS,)


TABLES = {
    # A pipeline alone on its links: times are a recurrence.
    "pipeline": {},
    # Four stages share a network card that carries one and a half of their sends.
    "contended": {"stages_on_a_link": 4},
    # Computation and transfers of a rank slow each other down as well.
    "contended-overlap": {"stages_on_a_link": 4, "overlap": True},
}


@pytest.mark.parametrize("kind", TABLES)
@pytest.mark.parametrize(
    ("module", "micro_batches"), [(engine, 64), (fast_engine, 1024)], ids=["reference-41k", "fast-655k"]
)
def test_run_table(benchmark: Any, module: Any, micro_batches: int, kind: str) -> None:
    table = pipeline_table(16, micro_batches, 18, **TABLES[kind])
    _run(benchmark, module, table)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLES)
def test_run_large_table(benchmark: Any, kind: str) -> None:
    """Twice a million tasks of 64 stages."""
    _run(benchmark, fast_engine, pipeline_table(64, 400, 38, **TABLES[kind]))


def _run(benchmark: Any, module: Any, table: TaskTable) -> None:
    # The first run loads compiled code.
    _, ends = benchmark.pedantic(module.run, args=(table,), rounds=5, warmup_rounds=1)
    assert ends.max() > 0
    if benchmark.stats:
        benchmark.extra_info["tasks"] = table.size
        benchmark.extra_info["million_tasks_per_second"] = table.size / benchmark.stats.stats.median / 1e6
