"""Timing of collectives and of crowded cores, in processes started as execution starts them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from simulator.calibration.allocations import recorded_growth
from simulator.calibration.cases import all_cases
from simulator.calibration.process import available_cores
from simulator.calibration.timing import kernel_clock, measure_case, synchronize
from simulator.program import Collective, Kernel

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Payloads in bytes, as `simulator.program.Collective` counts them."""
TIMEOUT = timedelta(seconds=60)
COLLECTIVE_S = 0.2
FEWEST_CALLS = 5
MOST_CALLS = 60
COLD_BYTES = 48 << 20
MOST_COPIES = 8
FILLER_ROWS = 192
FILLER_ELEMENTS = 1 << 19
PARTS = 40
MIXES_A_PART = 2
CLASS_S = 0.05
WORKSPACE_BYTES = 1 << 22
SLOWED: Mapping[Kernel, tuple[str, ...]] = {
    Kernel.MATMUL: ("mm 256x256x256", "mm 64x1024x4096", "mm 256x768x3072"),
    Kernel.CONVOLUTION: ("conv 8x64x16x16 to 64, 3x3", "backward of conv 16x512x1x1 to 1024, 1x1"),
    Kernel.ELEMENTWISE: ("add 524288",),
    Kernel.ACTIVATION: ("relu 524288",),
    Kernel.TRANSCENDENTAL: ("gelu 524288",),
    Kernel.NORMALIZATION: ("layer norm 524288",),
    Kernel.OPTIMIZER: ("adam 524288", "adam 4194304"),
}
"""Typical kernels of classes that processes on shared cores and memory slow by unlike factors."""
OVERLAP_REPEATS = 5
OVERLAP_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTimes:
    """What a group of processes measured; `seconds[collective][i]` belongs to ``SIZES[i]``.

    ``overlap`` is the time of a collective beside a matrix product over the time of the two one after the other,
    ``workspace`` bytes of a message beside its source and result for each byte of its payload.
    """

    processes: int
    seconds: dict[Collective, tuple[float, ...]]
    overlap: float
    resident_bytes: int
    workspace: Mapping[Collective, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Seconds of a mix of kernels, and of typical kernels of single classes, while some processes run them."""

    mix_s: float
    classes_s: Mapping[Kernel, float] = field(default_factory=dict)


def measure_messages(device_type: str, backend: str) -> MessageTimes:
    """Measure every collective at every size, as one rank of a group of all processes."""
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        device = _own_device(device_type)
        seconds = {kind: tuple(_time_collective(kind, size, device) for size in SIZES) for kind in Collective}
        return MessageTimes(
            processes=dist.get_world_size(),
            seconds=seconds,
            overlap=_measure_overlap(device),
            resident_bytes=_resident_bytes(),
            workspace=_workspace(device),
        )
    finally:
        dist.destroy_process_group()


def measure_slowdown(device_type: str, backend: str) -> Slowdown:
    """Seconds of kernels while all processes run them at the same time.

    Processor time tells how they disturb each other's caches and memory, and leaves other programs out; where
    there are more processes than cores, each also waits for its turn, in proportion. Ranks of a step wait for the
    slowest between two messages: a mix of kernels is run in short parts, and the slowest rank's of each counts; single
    classes are measured without that, and slowed by as much.
    """
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        device = _own_device(device_type)
        left, right = torch.rand(256, 256, device=device), torch.rand(1 << 20, device=device)

        def mix() -> None:
            for _ in range(8):
                torch.mm(left, left)
                torch.add(right, right)

        threads = dist.get_world_size() * torch.get_num_threads()
        turns = max(1.0, threads / available_cores()) if device_type == "cpu" else 1.0
        parts = _gathered(_parts(mix, device), device)
        skew = float(np.mean(parts.max(axis=0)) / np.mean(parts))
        classes = {kernel: turns * skew * _of_class(kernel, device) for kernel in SLOWED}
        return Slowdown(mix_s=turns * skew * float(np.median(parts)), classes_s=classes)
    finally:
        dist.destroy_process_group()


def _parts(mix: Callable[[], None], device: torch.device) -> list[float]:
    """Processor time of every part between two meetings of all ranks."""
    clock, seconds = kernel_clock(device), list[float]()
    mix()
    for _ in range(PARTS):
        dist.barrier()
        start = clock()
        for _ in range(MIXES_A_PART):
            mix()
        synchronize(device)
        seconds.append(clock() - start)
    return seconds


def _of_class(kernel: Kernel, device: torch.device) -> float:
    """Mean over ranks of the time of a class's typical kernels, in float32."""
    cases = [case for case in all_cases(accelerator=device.type != "cpu") if case.name in SLOWED[kernel]]
    dist.barrier()
    own = sum(measure_case(case, device, CLASS_S) for case in cases if case.dtype == "float32")
    return float(np.mean(_gathered([own], device)))


def _time_collective(collective: Collective, size: int, device: torch.device) -> float:
    """Median seconds of a collective from when the last rank has come, with the copies and buffers execution makes.

    In a step the ranks compute between messages, meet late, find the communication threads asleep, and send what has
    left the caches: each call follows kernels that take some time and memory, and sends another buffer than the last.
    Ranks on one machine share a clock, so that what each waits for the last does not count.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    elements = max(world, size // 4 // world * world)
    copies = max(1, min(MOST_COPIES, COLD_BYTES // size))
    wholes = [torch.rand(elements, device=device) for _ in range(copies)]
    parts = [torch.rand(elements // world, device=device) for _ in range(copies)]
    calls: dict[Collective, Callable[[int], object]] = {
        Collective.ALL_REDUCE: lambda n: dist.all_reduce(wholes[n].clone()),
        Collective.ALL_GATHER: lambda n: dist.all_gather_into_tensor(torch.empty_like(wholes[n]), parts[n]),
        Collective.REDUCE_SCATTER: lambda n: dist.reduce_scatter_tensor(torch.empty_like(parts[n]), wholes[n]),
        Collective.ALL_TO_ALL: lambda n: dist.all_to_all_single(torch.empty_like(wholes[n]), wholes[n]),
        Collective.BROADCAST: lambda n: dist.broadcast(wholes[n], 0),
        Collective.SEND: lambda n: _pass_on(wholes[n], rank, world),
    }
    call = calls[collective]
    factor = torch.rand(FILLER_ROWS, FILLER_ROWS, device=device)
    streamed = torch.rand(FILLER_ELEMENTS, device=device)

    def fill() -> None:
        torch.mm(factor, factor)
        streamed.clone()

    call(0)
    fill()
    once = _slowest(_loop(lambda: call(0), 2, device), device)
    count = max(FEWEST_CALLS, min(MOST_CALLS, int(COLLECTIVE_S / max(once, 1e-6))))
    spans = np.array([_span(fill, partial(call, number % copies), device) for number in range(count)])
    begins, ends = (_gathered(spans[:, side].tolist(), device).max(axis=0) for side in (0, 1))
    return max(float(np.median(ends - begins)), 1e-7)


def _span(before: Callable[[], object], call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """When a call behind something else begins and ends."""
    before()
    synchronize(device)
    begin = time.perf_counter()
    call()
    synchronize(device)
    return begin, time.perf_counter()


def _gathered(own: Sequence[float], device: torch.device) -> NDArray[np.float64]:
    """Numbers (n,) of every rank: (ranks, n)."""
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu().numpy()


def _workspace(device: torch.device) -> dict[Collective, float]:
    """Bytes that messages of several tensors take beside what they send and bring, for each byte of payload.

    As execution sends them: packed into one, and cut out of what came.
    """
    if device.type != "cpu":
        return {}
    world = dist.get_world_size()
    elements = WORKSPACE_BYTES // 4 // world * world
    half, part = (torch.rand(2, size // 2, device=device) for size in (elements, elements // world))

    def gather() -> object:
        packed = torch.cat(list(part))
        came = packed.new_empty(elements)
        dist.all_gather_into_tensor(came, packed)
        return [piece.reshape(-1) for piece in came.view(world, -1).chunk(2, 1)]

    def scatter() -> object:
        packed = torch.cat(list(half))
        came = packed.new_empty(elements // world)
        dist.reduce_scatter_tensor(came, packed)
        return came

    def exchange() -> object:
        packed = torch.cat(list(half))
        came = torch.empty_like(packed)
        dist.all_to_all_single(came, packed)
        return [piece.reshape(-1) for piece in came.view(world, -1).chunk(2, 1)]

    brought = {Collective.ALL_GATHER: (gather, 1.0), Collective.REDUCE_SCATTER: (scatter, 1.0 / world),
               Collective.ALL_TO_ALL: (exchange, 1.0)}  # fmt: skip
    return {
        collective: max(0.0, recorded_growth(work) / (4.0 * elements) - result)
        for collective, (work, result) in brought.items()
    }


def _pass_on(message: Tensor, rank: int, world: int) -> None:
    """Send between the first two ranks; the others only wait, as they would in a pipeline."""
    if rank == 0 and world > 1:
        dist.send(message, 1)
    elif rank == 1:
        dist.recv(message, 0)


def _loop(call: Callable[[], object], count: int, device: torch.device) -> float:
    dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / count


def _slowest(seconds: float, device: torch.device) -> float:
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _measure_overlap(device: torch.device) -> float:
    """Compare a collective started before a matrix product of about its time with the two in sequence."""
    message, factor = torch.rand(OVERLAP_BYTES // 4, device=device), torch.rand(384, 384, device=device)
    message_s = _slowest(_loop(lambda: dist.all_reduce(message), 3, device), device)
    product_s = _slowest(_loop(lambda: torch.mm(factor, factor), 3, device), device)
    products = max(1, round(message_s / product_s))

    def compute() -> None:
        for _ in range(products):
            torch.mm(factor, factor)

    def sequence() -> None:
        dist.all_reduce(message)
        compute()

    def together() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        if work is not None:
            work.wait()

    pairs = [(_slowest(_loop(together, 2, device), device), _slowest(_loop(sequence, 2, device), device))
             for _ in range(OVERLAP_REPEATS)]  # fmt: skip
    return statistics.median(beside / after for beside, after in pairs)


def _own_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    device = torch.device(device_type, dist.get_rank())
    getattr(torch, device_type).set_device(device)
    return device


def _resident_bytes() -> int:
    """Memory of this process that no job can have: interpreter, libraries, message buffers."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)
