"""Timing of collectives, in processes started as execution starts them.

A message follows some milliseconds of computation, as in a step, and takes another buffer than the one before. Its cost
is what it adds to that computation. That is the time from the end of one call on the last rank to the end of the next,
less the processor time of the computation times the waits for a core and for the slowest rank, which the factors on
kernels hold already. Timed from when the last rank has come, messages among ranks that share cores would count their
computation twice: eight ranks on two cores that compute 0, 0.6, 2.6 and 6.8 ms before sums of a kilobyte took 5, 8, 16
and 21 ms by that, and 4 to 8 ms by this, however long they compute. A message takes no less than from when the last
rank has come until the first goes on. Groups beside other groups, and sends, are timed from when the last of them has
come.
"""

from __future__ import annotations

import os
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from simulator.calibration.timing import kernel_clock, middle_mean, synchronize
from simulator.program import Collective

SILENCE = {"KINETO_LOG_LEVEL": "99"}
"""What keeps the profiler's library from telling on stderr, among what users say there, when it begins and ends."""


def recorded_growth(work: Callable[[], object]) -> int:
    """Do some work and return the most bytes that its tensors, message buffers and workspaces take together."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    return peak_growth(_allocations(recorded.profiler))


def peak_growth(events: Iterable[tuple[int, int]]) -> int:
    """Most bytes that allocations and releases, in order, add to what was held before them.

    Releases by threads of a message library are not recorded. A block that begins where another still stands says
    that this one has gone.

    Parameters
    ----------
    events : pairs
        Address and bytes of each; bytes are below 0 where memory is released.
    """
    begins: list[int] = []
    sizes: dict[int, int] = {}
    held = most = 0
    for address, size in events:
        if size < 0:
            if address in sizes:
                held -= sizes.pop(address)
                del begins[bisect_left(begins, address)]
            else:  # held before
                held += size
            continue
        place = bisect_left(begins, address)
        if place and begins[place - 1] + sizes[begins[place - 1]] > address:
            place -= 1
        while place < len(begins) and begins[place] < address + size:
            held -= sizes.pop(begins.pop(place))
        begins.insert(place, address)
        sizes[address] = size
        held += size
        most = max(most, held)
    return most


def _allocations(profiler: Any) -> list[tuple[int, int]]:
    """Address and bytes of every recorded allocation and release, in order."""
    waiting = list(profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda entry: entry[0])]


FloatArray = NDArray[np.float64]
SIZES = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 24)
"""Payloads in bytes, as `simulator.program.Collective` counts them."""
TIMEOUT = timedelta(seconds=60)
COLLECTIVE_S = 0.2
CALL_ROUNDS = 5
SHORTEST_S = 1e-7
MOST_CALLS = 5
"""Calls of a kind and size in a round, at most; those that take long have one."""
COLD_BYTES = 48 << 20
MOST_COPIES = 8
PARTS = 3
"""Equal parts of the computation before a message: in the first the message before has left caches and clocks cold."""
PART_ROWS = 264
PART_ELEMENTS = 700_000
FEWEST_RANKS = 2
WORKSPACE_BYTES = 1 << 22
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
class Calls:
    """Equal messages behind computation, by every rank (ranks, calls).

    ``since`` is when the rank's call before ended, ``begin`` and ``end`` when it came and had done, in seconds of one
    clock; ``computing`` the seconds of computation before the call, by the clock that kernels are timed by.
    """

    since: FloatArray
    begin: FloatArray
    end: FloatArray
    computing: FloatArray

    def of(self, ranks: Sequence[int]) -> Calls:
        """The calls of some ranks."""
        return Calls(**{name: getattr(self, name)[list(ranks)] for name in NAMES})

    def seconds(self, waits: float) -> float:
        """What a message adds to computation, which takes `waits` times as long between messages as it is timed.

        From when the last rank has done one call until it has done the next, less the computation. Timed from when the
        last rank comes, messages among ranks that share cores would have what the first ranks compute already, while
        the last wait for a core to end theirs: that is in the computation, which takes turns. A message takes no less
        than from when the last rank has come until the first goes on.

        The middle half of the calls counts, which moves little where threads wake sometimes soon, sometimes late.
        """
        period, computing = self.end.max(axis=0) - self.since.max(axis=0), self.computing.mean(axis=0)
        latency = middle_mean((self.end.min(axis=0) - self.begin.max(axis=0)).tolist())
        return max(middle_mean(period.tolist()) - waits * middle_mean(computing.tolist()), latency, SHORTEST_S)

    def direct_seconds(self) -> float:
        """From when the last of these ranks has come until all have done."""
        return max(middle_mean((self.end.max(axis=0) - self.begin.max(axis=0)).tolist()), SHORTEST_S)


SENDERS = (0, 1)
NAMES = ("since", "begin", "end", "computing")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageCalls:
    """What a group of processes ran; all but ``calls`` as in `MessageTimes`."""

    calls: dict[Collective, tuple[Calls, ...]]
    overlap: float
    resident_bytes: int
    workspace: Mapping[Collective, float]

    def times(self, waits: float) -> MessageTimes:
        """Seconds of every collective at every size where computation takes `waits` times as long as it is timed.

        The ranks that a send is not between compute on, so that it is timed from when both have come.
        """
        found = {kind: tuple(one.seconds(waits) for one in sizes) for kind, sizes in self.calls.items()}
        sends = self.calls[Collective.SEND]
        found[Collective.SEND] = tuple(one.of(SENDERS).direct_seconds() for one in sends)
        return MessageTimes(
            processes=len(self.calls[Collective.ALL_REDUCE][0].end),
            seconds=found,
            overlap=self.overlap,
            resident_bytes=self.resident_bytes,
            workspace=self.workspace,
        )


def measure_messages(device: torch.device) -> MessageCalls:
    """Run every collective at every size, as one rank of a group of all processes."""
    return MessageCalls(
        calls=_run_collectives(device),
        overlap=_measure_overlap(device),
        resident_bytes=_resident_bytes(),
        workspace=_workspace(device),
    )


def _run_collectives(device: torch.device) -> dict[Collective, tuple[Calls, ...]]:
    """Calls of every collective at every size, of tensors that need no packing.

    What execution copies to pack tensors and to cut them out of what came depends on how many they are and along which
    dims they are cut: tasks count it (`simulator.program.Task.copied_bytes`).

    In a step the ranks compute between messages, meet late, find the communication threads asleep, and send what has
    left the caches: each call follows kernels that fill the caches of a core, and sends another buffer than the last.
    Every kind and size has its turn in every round, so that what disturbs the machine for a while hits a few calls of
    each and not all of one.
    """
    calls = {(kind, size): call for size in SIZES for kind, call in calls_of(size, device).items()}
    behind = BehindComputation(device)
    counts = {}
    for place, call in calls.items():  # the first calls make connections and buffers
        call(0)
        once = _slowest(_loop(partial(call, 1), 1, device), device)
        counts[place] = max(1, min(MOST_CALLS, int(COLLECTIVE_S / max(once, 1e-6) / CALL_ROUNDS)))
    found: dict[tuple[Collective, int], list[Moments]] = {place: [] for place in calls}
    behind.begin()
    for _ in range(CALL_ROUNDS):
        for place, call in calls.items():
            for _ in range(counts[place]):
                found[place].append(behind.call(partial(call, len(found[place]))))
    return {kind: tuple(gathered_calls(found[kind, size], device) for size in SIZES) for kind in Collective}


def calls_of(
    size: int, device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[Collective, Callable[[int], object]]:
    """Every collective of a payload of `size` bytes, called with a number that picks the buffer.

    Sums run in a group of some ranks too; all else among all.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    elements = _elements(size, world)
    copies = max(1, min(MOST_COPIES, COLD_BYTES // size))
    wholes = [torch.rand(2, elements // 2, device=device) for _ in range(copies)]
    parts = [torch.rand(2, elements // world // 2, device=device) for _ in range(copies)]

    def of(call: Callable[[Tensor], object], tensors: Sequence[Tensor] = wholes) -> Callable[[int], object]:
        return lambda number: call(tensors[number % copies])

    return {
        Collective.ALL_REDUCE: of(lambda whole: dist.all_reduce(whole.clone(), group=group)),
        Collective.ALL_GATHER: of(_gathered, parts),
        Collective.REDUCE_SCATTER: of(_scattered),
        Collective.ALL_TO_ALL: of(_exchanged),
        Collective.BROADCAST: of(lambda whole: dist.broadcast(whole, 0)),
        Collective.SEND: of(lambda whole: _pass_on(whole, rank, world)),
    }


def _elements(size: int, world: int) -> int:
    """Numbers of four bytes in a payload of two tensors that every rank has an equal part of."""
    return max(2 * world, size // 4 // (2 * world) * (2 * world))


def _gathered(part: Tensor) -> Tensor:
    """What execution brings of a tensor of which every rank has a part."""
    came = part.new_empty(dist.get_world_size() * part.numel())
    dist.all_gather_into_tensor(came, part.reshape(-1))
    return came


def _scattered(whole: Tensor) -> Tensor:
    """What execution brings of a sum of which every rank gets a part."""
    came = whole.new_empty(whole.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(came, whole.reshape(-1))
    return came


def _exchanged(whole: Tensor) -> Tensor:
    """What execution brings of the parts that all ranks have for each other."""
    came = whole.new_empty(whole.numel())
    dist.all_to_all_single(came, whole.reshape(-1))
    return came


def _gather(parts: Tensor) -> object:
    """Gather two tensors (2, n) as execution does: packed into one, and cut out of what came."""
    came = _gathered(torch.cat(list(parts)))
    return [piece.reshape(-1) for piece in came.view(dist.get_world_size(), -1).chunk(2, 1)]


def _packed(wholes: Tensor) -> Tensor:
    """All of two tensors (2, n) that goes to the first rank, then all that goes to the second, and so on."""
    world = dist.get_world_size()
    halves = wholes.view(2, world, -1)
    return torch.cat([half[rank] for rank in range(world) for half in halves])


def _scatter(wholes: Tensor) -> object:
    """Reduce and scatter two tensors (2, n) as execution does."""
    return _scattered(_packed(wholes))


def _exchange(wholes: Tensor) -> object:
    """Exchange two tensors (2, n) as execution does."""
    came = _exchanged(_packed(wholes))
    return [piece.reshape(-1) for piece in came.view(dist.get_world_size(), -1).chunk(2, 1)]


Moments = tuple[float, float, float, float]
"""A call of one rank, in the order of `NAMES`."""


class BehindComputation:
    """Makes calls behind computation, as one rank of all that do the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clock = kernel_clock(device)
        self._factor = torch.rand(PART_ROWS, PART_ROWS, device=device)
        self._streamed = torch.rand(PART_ELEMENTS, device=device)
        self._since = 0.0

    def begin(self) -> None:
        """Begin together with all other ranks."""
        self._part()
        dist.barrier()
        self._since = time.perf_counter()

    def call(self, call: Callable[[], object]) -> Moments:
        """Compute, and make a call."""
        since = self._since
        self._part()
        start = self._clock()
        for _ in range(PARTS - 1):
            self._part()
        computing = (self._clock() - start) * PARTS / (PARTS - 1)
        begin = time.perf_counter()
        call()
        synchronize(self._device)
        self._since = time.perf_counter()
        return since, begin, self._since, computing

    def _part(self) -> None:
        torch.mm(self._factor, self._factor)
        self._streamed.clone()
        synchronize(self._device)


def gathered_calls(own: Sequence[Moments], device: torch.device) -> Calls:
    """The same calls of all ranks."""
    return Calls(**{name: gathered([call[place] for call in own], device) for place, name in enumerate(NAMES)})


def gathered(own: Sequence[float], device: torch.device) -> FloatArray:
    """Numbers (n,) of every rank: (ranks, n)."""
    mine = torch.tensor(own, dtype=torch.float64, device=device)
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.stack(found).cpu().numpy()


def _workspace(device: torch.device) -> dict[Collective, float]:
    """Bytes that messages of several tensors take beside what they send and bring, for each byte of payload.

    As execution sends them: packed into one, and cut out of what came. Two ranks have the largest parts to pack; among
    more it takes no more.
    """
    world = dist.get_world_size()
    if device.type != "cpu" or world > FEWEST_RANKS:
        return {}
    elements = _elements(WORKSPACE_BYTES, world)
    whole, part = (torch.rand(2, size // 2, device=device) for size in (elements, elements // world))
    brought: dict[Collective, tuple[Callable[[], object], float]] = {
        Collective.ALL_GATHER: (partial(_gather, part), 1.0),
        Collective.REDUCE_SCATTER: (partial(_scatter, whole), 1.0 / world),
        Collective.ALL_TO_ALL: (partial(_exchange, whole), 1.0),
    }
    return {
        collective: max(0.0, recorded_growth(work) / (4.0 * elements) - result)
        for collective, (work, result) in brought.items()
    }


def _pass_on(message: Tensor, rank: int, world: int) -> None:
    """Send between the first two ranks; the others only wait, as they would in a pipeline."""
    first, second = SENDERS
    if rank == first and world > 1:
        dist.send(message, second)
    elif rank == second:
        dist.recv(message, first)


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


def own_device(device_type: str) -> torch.device:
    """The device of this rank."""
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
