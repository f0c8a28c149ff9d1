"""Seconds of tasks: each as its kernel or collective alone would give."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from simulator.collectives import collective_time
from simulator.errors import ProgramError
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.profiles import load_profile
from simulator.program import CONVOLUTIONS, Collective, Kernel, ProgramAxis, Task
from simulator.task_table import FloatArray
from simulator.timing import task_times
from simulator.topology import group_shape
from tests.simulator.programs import AXES, DEVICES, communication, task

HARDWARE = dataclasses.replace(load_profile("dgx-a100"), slowdown_table=((1, 1.0), (4, 2.5)), training={})


def many_tasks() -> list[Task]:
    generator = np.random.default_rng(0)
    tasks = []
    for number in range(60):
        amount = float(generator.integers(1, 10**9))
        if number % 5 == 0:
            collective = list(Collective)[number % 6]
            axis = ("data", "tensor")[number % 2]
            tasks.append(communication(f"c{number}", axis, collective=collective, payload_bytes=amount))
        else:
            kernel = list(Kernel)[number % len(Kernel)]
            dtype = ("float32", "bfloat16")[number % 2]
            tasks.append(task(f"k{number}", kernel=kernel, dtype=dtype, flops=amount, bytes_moved=amount / 3))
    return tasks


def times_of(
    tasks: Sequence[Task], hardware: Hardware = HARDWARE, axes: Sequence[ProgramAxis] = AXES, devices: int = DEVICES
) -> FloatArray:
    return task_times(tasks, axes, hardware, devices)


def alone(one: Task) -> float:
    if one.collective is None:
        return 2.5 * kernel_time(HARDWARE, one.kernel, one.dtype, one.flops, one.bytes_moved)
    axis = next(a for a in AXES if a.name == one.axis)
    return collective_time(HARDWARE, one.collective, one.payload_bytes, group_shape(HARDWARE, axis.size, axis.stride))


def test_tasks_take_the_time_each_takes_alone() -> None:
    tasks = many_tasks()
    times = times_of(tasks)
    np.testing.assert_allclose(times, [alone(one) for one in tasks], rtol=1e-12)
    assert (times >= 0).all()


def test_corrections_of_whole_steps_multiply_what_they_name() -> None:
    training = {"matmul": 1.25, "attention": 1.5, "memory": 0.75, "inside": 2.0, "low_precision": 4.0}
    plain = dataclasses.replace(load_profile("dgx-h100"), training={})
    corrected = dataclasses.replace(plain, training=training)
    kernels = [task(kernel.value, kernel=kernel, dtype="bfloat16", flops=1e12, bytes_moved=1e9) for kernel in Kernel]
    kernels.append(task("product", dtype="bfloat16", shape=(1.0, 4096.0, 4096.0, 4096.0)))
    kernels.append(task("eight bits", dtype="float8_e4m3fn", flops=1e12))
    tasks = [*kernels, communication("c")]
    with_them, without = times_of(tasks, corrected), times_of(tasks, plain)
    others = {"matmul": 1.25, "grouped_matmul": 1.25, "attention": 1.5, "optimizer": 1.0, "view": 1.0}
    others |= {"accumulation": 1.0, **dict.fromkeys(CONVOLUTIONS, 1.0)}
    factors = [others.get(kernel.value, 0.75) for kernel in Kernel]
    np.testing.assert_allclose(with_them, without * [*factors, 1.25, 4.0, 2.0], rtol=1e-12)
    wide = (ProgramAxis(name="data", size=2, stride=8), ProgramAxis(name="tensor", size=8, stride=1))
    outside = dataclasses.replace(corrected, training={"outside": 3.0})
    expected = 3.0 * times_of(tasks, plain, wide)[-1]
    assert times_of(tasks, outside, wide)[-1] == pytest.approx(expected)


def test_corrections_of_plans_stand_in_for_those_of_the_device() -> None:
    device = {"matmul": 1.25, "attention": 1.5, "inside": 2.0, "low_precision": 2.5}
    planned = {"planned_matmul": 1.5, "planned_optimizer": 1.2, "planned_convolution": 0.5, "planned_inside": 3.0}
    plain = dataclasses.replace(load_profile("dgx-h100"), training={})
    kernels = [task(kernel.value, kernel=kernel, dtype="bfloat16", flops=1e12, bytes_moved=1e9) for kernel in Kernel]
    tasks = [*kernels, task("eight bits", dtype="float8_e4m3fn", flops=1e12), communication("c")]
    with_them = times_of(tasks, dataclasses.replace(plain, training={**device, **planned}))
    named = {
        "matmul": 1.5,
        "grouped_matmul": 1.5,
        "attention": 1.5,
        **dict.fromkeys(CONVOLUTIONS, 0.5),
        "optimizer": 1.2,
    }
    factors = [named.get(kernel.value, 1.0) for kernel in Kernel]
    np.testing.assert_allclose(with_them, times_of(tasks, plain) * [*factors, 3.0, 3.0], rtol=1e-12)


def test_computation_slows_down_with_processes_and_messages_do_not() -> None:
    tasks = [task("k", flops=1e9), communication("c")]
    slow = times_of(tasks)
    fast = times_of(tasks, dataclasses.replace(HARDWARE, slowdown_table=((1, 1.0),)))
    assert slow[0] == pytest.approx(2.5 * fast[0])
    assert slow[1] == fast[1]


def test_packing_takes_the_time_of_copies_where_messages_were_timed_without_it() -> None:
    sent = communication("gather", "data", collective=Collective.ALL_GATHER, payload_bytes=1e8)
    packed = dataclasses.replace(sent, copied_bytes=2e8)
    assert len(set(times_of([sent, packed]))) == 1
    plain, copied = times_of([sent, packed], dataclasses.replace(HARDWARE, copies_apart=True))
    copy_s = alone(task("copy", kernel=Kernel.COPY, bytes_moved=2e8))
    assert (plain, copied) == pytest.approx((alone(sent), alone(sent) + copy_s), rel=1e-12)


def test_unknown_axis_is_an_error() -> None:
    with pytest.raises(ProgramError, match=r"task 'c' communicates on axis 'pipeline'; .*\['data', 'tensor'\]"):
        times_of([communication("c", "pipeline")])


def test_no_tasks_have_no_times() -> None:
    assert times_of([]).size == 0
