"""Speed of both engines and of the trace on one segment of 10,000 tasks.

Run with ``pytest benchmarks/test_simulator_speed.py``; ``extra_info`` holds tasks per second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simulator import engine, fast_engine
from simulator.hardware import load_profile
from simulator.program import Buffer, BufferKind, Collective, Kernel, Phase, Program, ProgramAxis, Segment, Task
from simulator.timing import task_times
from simulator.trace import write_trace

TASKS = 10_000
PER_BLOCK = 20


def training_like_program() -> Program:
    """Blocks of operators that wait for the two before them; in each, a waited-for and a free-running collective.

    Forward activations stand until the mirrored backward task.
    """
    half = TASKS // 2
    tasks: list[Task] = []
    for index in range(TASKS):
        backward = index >= half
        mirror = TASKS - 1 - index
        fields: dict[str, Any] = {
            "name": f"blocks.{index % half // PER_BLOCK}.operator{index % PER_BLOCK}",
            "phase": Phase.BACKWARD if backward else Phase.FORWARD,
            "after": tuple(range(max(0, index - 2), index)),
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
        if backward:
            fields |= {"releases": (f"activation{mirror}",)}
        else:
            fields |= {"allocates": (Buffer(name=f"activation{index}", size_bytes=10**6, kind=BufferKind.ACTIVATION),)}
        tasks.append(Task(**fields))
    axes = (ProgramAxis(name="data", size=8, stride=8), ProgramAxis(name="tensor", size=8, stride=1))
    return Program(
        name="benchmark", devices=64, axes=axes, segments=(Segment(name="step", tasks=tuple(tasks), count=8),)
    )


@pytest.mark.parametrize("module", [engine, fast_engine], ids=["reference", "fast"])
def test_simulate(benchmark: Any, module: Any) -> None:
    program, hardware = training_like_program(), load_profile("dgx-a100")
    timeline = benchmark(module.simulate, program, hardware)
    assert timeline.step_time_s > 0
    if benchmark.stats:
        benchmark.extra_info["tasks_per_second"] = TASKS / benchmark.stats.stats.median


def test_task_times(benchmark: Any) -> None:
    program, hardware = training_like_program(), load_profile("dgx-a100")
    assert benchmark(task_times, program, hardware)[0].shape == (TASKS,)


def test_trace(benchmark: Any, tmp_path: Path) -> None:
    program, hardware = training_like_program(), load_profile("dgx-a100")
    timeline = engine.simulate(program, hardware)
    path = tmp_path / "timeline.json"
    benchmark.pedantic(write_trace, args=(timeline, program, path), kwargs={"hardware": hardware}, rounds=3)
    benchmark.extra_info["megabytes"] = path.stat().st_size / 1e6
