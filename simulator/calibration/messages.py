"""Timing of collectives and of crowded cores, in processes started as execution starts them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from simulator.calibration.process import available_cores
from simulator.calibration.timing import kernel_clock, synchronize
from simulator.program import Collective

SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Payloads in bytes, as `simulator.program.Collective` counts them."""
TIMEOUT = timedelta(seconds=60)
COLLECTIVE_S = 0.12
REPEATS = 7
FILLER_ROWS = 192
LEAST_SHARE = 0.2
SLOWDOWN_S = 0.8
OVERLAP_REPEATS = 5
OVERLAP_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTimes:
    """What a group of processes measured; `seconds[collective][i]` belongs to ``SIZES[i]``.

    ``overlap`` is the time of a collective beside a matrix product over the time of the two one after the other.
    """

    processes: int
    seconds: dict[Collective, tuple[float, ...]]
    overlap: float
    resident_bytes: int


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
        )
    finally:
        dist.destroy_process_group()


def measure_slowdown(device_type: str, backend: str) -> float:
    """Seconds of a fixed mix of kernels while all processes run it at the same time: the slowest rank's.

    Processor time tells how they disturb each other's caches and memory, and leaves other programs out; where
    there are more processes than cores, each also waits for its turn, in proportion.
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
        return turns * _slowest(_spread(mix, device), device)
    finally:
        dist.destroy_process_group()


def _spread(mix: Callable[[], None], device: torch.device) -> float:
    clock = kernel_clock(device)
    mix()
    dist.barrier()
    begin, start, count = time.perf_counter(), clock(), 0
    while time.perf_counter() - begin < SLOWDOWN_S:
        mix()
        count += 1
    synchronize(device)
    return (clock() - start) / count


def _time_collective(collective: Collective, size: int, device: torch.device) -> float:
    """Median over repeats of the slowest rank's time, with the copies and buffers execution makes.

    A step waits for its messages as they come: a lower quantile would be the time of lucky ones. Each call follows a
    matrix product, whose own time is taken off: in a step the ranks compute between messages, meet late and find the
    communication threads asleep.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    elements = max(world, size // 4 // world * world)
    whole, part = torch.rand(elements, device=device), torch.rand(elements // world, device=device)
    calls: dict[Collective, Callable[[], object]] = {
        Collective.ALL_REDUCE: lambda: dist.all_reduce(whole.clone()),
        Collective.ALL_GATHER: lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part),
        Collective.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole),
        Collective.ALL_TO_ALL: lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
        Collective.BROADCAST: lambda: dist.broadcast(whole, 0),
        Collective.SEND: lambda: _pass_on(whole, rank, world),
    }
    call = calls[collective]
    call()
    once = _slowest(_loop(call, 2, device), device)
    count = max(1, min(100, int(COLLECTIVE_S / REPEATS / max(once, 1e-6))))
    factor = torch.rand(FILLER_ROWS, FILLER_ROWS, device=device)

    def fill() -> None:
        torch.mm(factor, factor)

    def mixed() -> None:
        fill()
        call()

    among, alone = (
        statistics.median([_slowest(_loop(run, count, device), device) for _ in range(REPEATS)])
        for run in (mixed, fill)
    )
    return max(among - alone, LEAST_SHARE * once)


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
