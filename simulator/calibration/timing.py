"""Timing of kernels as the executor runs them: closures over slots, results freshly allocated."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from simulator.calibration.cases import KernelCase, all_cases
from simulator.calibration.machine import beyond_caches
from simulator.program import Kernel

Repeated = Callable[[int], None]
"""Does something so many times."""
MOST_COPIES = 128
BEYOND_ACCELERATOR_CACHES = 1 << 28
"""Twice the second-level cache of the largest accelerators."""
REPEATS = 5
WARM_CALLS = 3
"""Calls before a kernel is timed, which say how often it is called then."""
MOST_CALLS = 2000
FILLER_ELEMENTS = 1 << 17
INTERLEAVED_S = 1.5
INTERLEAVED_ROUNDS = (20, 400)
CASE_S = 0.025
IN_PLACE = frozenset({Kernel.OPTIMIZER, Kernel.ACCUMULATION})
"""Kernels whose results lie in their inputs: what they move twice takes memory once."""
MOST_INPUT_TURNS = 4
"""Times the memory taken in turn that inputs may hold of which little is read, as tables of embeddings."""


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; a CPU is always done."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize(device)


def middle_mean(seconds: Sequence[float]) -> float:
    """Mean of the middle half of repeated timings: outliers do not count, and two modes weigh as often as they come.

    Steps are told by medians: the fastest kernels of a machine of changing speed would foretell its fastest steps.
    """
    ordered = sorted(seconds)
    cut = len(ordered) // 4
    return statistics.fmean(ordered[cut : len(ordered) - cut])


def kernel_clock(device: torch.device) -> Callable[[], float]:
    """Clock for kernels: processor time where one thread computes, which other programs do not add to."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def repeated_seconds(run: Repeated, device: torch.device, budget_s: float = CASE_S) -> float:
    """Time of one repetition: `run(n)` does n of them, n is chosen to fill the budget."""
    clock = kernel_clock(device)
    run(1)
    synchronize(device)
    start = clock()
    run(WARM_CALLS - 1)
    synchronize(device)
    count = _calls(max((clock() - start) / (WARM_CALLS - 1), 1e-7), budget_s)
    times = []
    for _ in range(REPEATS):
        start = clock()
        run(count)
        synchronize(device)
        times.append((clock() - start) / count)
    return middle_mean(times)


def measure_case(
    case: KernelCase, device: torch.device, budget_s: float = CASE_S, *, turn_bytes: int | None = None
) -> float:
    """Seconds of one call of a kernel, called as `repeated_case` does."""
    run = repeated_case(case, device, turn_bytes=turn_bytes, budget_s=budget_s)
    return repeated_seconds(run, device, budget_s)


def repeated_case(
    case: KernelCase, device: torch.device, *, turn_bytes: int | None = None, budget_s: float | None = None
) -> Repeated:
    """Prepare a kernel to be called so many times.

    Parameters
    ----------
    turn_bytes : inputs are taken in turn from this much memory, so that they come from where as much lies, and results
        stand until their inputs' next turn, so that they go there; by default beyond all caches, as weights, states
        and gradients in steps of large networks, and 0 for the same inputs and the same memory of results always
    budget_s : seconds that `repeated_seconds` is given, in which not all of these inputs may have a turn
    """
    if turn_bytes is None:
        turn_bytes = beyond_caches() if device.type == "cpu" else BEYOND_ACCELERATOR_CACHES
    sets = _input_sets(case, device, turn_bytes)
    runs = [_closure(case, inputs, keeps=len(sets) > 1) for inputs in sets]
    if len(runs) > 1:
        _give_memory(runs, device, budget_s)
    turn = cycle(runs)

    def run(count: int) -> None:
        for _ in range(count):
            next(turn)()

    return run


def _give_memory(runs: Sequence[Callable[[], None]], device: torch.device, budget_s: float | None) -> None:
    """Call once whatever will be called, so that its results have their memory when it is timed."""
    once, called = math.inf, 0
    while called < len(runs) and (budget_s is None or called < WARM_CALLS + REPEATS * _calls(once, budget_s)):
        start = time.perf_counter()
        runs[called]()
        synchronize(device)
        once, called = min(once, time.perf_counter() - start), called + 1


def _calls(once_s: float, budget_s: float) -> int:
    return max(1, min(MOST_CALLS, int(budget_s / REPEATS / once_s)))


def cost_among_others(cases: Sequence[KernelCase], device: torch.device) -> tuple[float, ...]:
    """Seconds that each kernel takes longer among others than in a loop of its own.

    In a step every call finds the caches full of other code and data; here each case runs after a copy
    that does the same, and after itself. Behind large kernels it would take longer than steps show. Every call is timed
    on its own, in rounds that have both of every case: the median call of either counts.
    """
    filler = torch.rand(FILLER_ELEMENTS, device=device)
    calls = [_closure(case, _input_sets(case, device, 0)[0]) for case in cases]
    alone, among = ([list[float]() for _ in calls] for _ in range(2))
    begin = time.perf_counter()
    while len(among[0]) < INTERLEAVED_ROUNDS[0] or (
        len(among[0]) < INTERLEAVED_ROUNDS[1] and time.perf_counter() - begin < INTERLEAVED_S
    ):
        for act, by_itself, behind in zip(calls, alone, among, strict=True):
            act()
            by_itself.append(_call_s(act))
            filler.clone()
            behind.append(_call_s(act))
    more = (statistics.median(behind) - statistics.median(own) for own, behind in zip(alone, among, strict=True))
    return tuple(max(0.0, seconds) for seconds in more)


def _call_s(act: Callable[[], None]) -> float:
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def _closure(case: KernelCase, inputs: list[Tensor], *, keeps: bool = False) -> Callable[[], None]:
    """One action of the executor: read slots, call, store the result, release it unless the next call is to."""
    slots: list[object] = [*inputs, None]
    numbers, target, freed = list(range(len(inputs))), len(inputs), [] if keeps else [len(inputs)]
    operator, arguments = case.operator, case.arguments

    def call(tensors: list[Any]) -> object:
        return operator(*tensors, *arguments)

    def local(tensors: list[Any]) -> Any:
        result = call(tensors)
        return (result,) if isinstance(result, Tensor) else result

    def act() -> None:
        slots[target] = local([slots[number] for number in numbers])[0]
        for slot in freed:
            slots[slot] = None

    return act


def _input_sets(case: KernelCase, device: torch.device, turn_bytes: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    first = _inputs(case, device, generator)
    held = max(1, sum(tensor.nbytes for tensor in first))
    size = held if case.kernel in IN_PLACE else max(1, int(case.bytes_moved))
    copies = max(1, min(MOST_COPIES, turn_bytes // size, MOST_INPUT_TURNS * turn_bytes // held))
    return [first, *([tensor.clone() for tensor in first] for _ in range(copies - 1))]


def _inputs(case: KernelCase, device: torch.device, generator: torch.Generator) -> list[Tensor]:
    dtype = getattr(torch, case.dtype)
    made = [torch.rand(shape, generator=generator).to(device, dtype) for shape in case.shapes]
    if case.high:
        made.append(torch.randint(case.high, case.index_shape, generator=generator).to(device))
    return made


TYPICAL = (
    "mm 256x768x3072",
    "mm 64x1024x4096",
    "backward of conv 16x256x4x4 to 256, 3x3",
    "gelu 524288",
    "adam 4194304",
)
"""Products of arithmetic and of weights from memory, convolutions, activations, and updates from memory."""


class Pace:
    """Typical kernels in float32, ready to be timed again and again by one rank of some that do the same."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.name in TYPICAL and c.dtype == "float32"]
        # Inputs are the same each time: between two calls of one kernel the others have filled the caches.
        self._runs = [repeated_case(case, device, turn_bytes=0) for case in cases]
        for run in self._runs:
            run(1)
        synchronize(device)

    def seconds(self) -> float:
        """Seconds that one call of each kernel takes by the wall clock, which a step is timed by."""
        start = time.perf_counter()
        for run in self._runs:
            run(1)
        synchronize(self._device)
        return time.perf_counter() - start


def timed_paces(pace: Pace, meet: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of some rounds of one rank; `meet` waits for the others before each."""
    found = []
    for _ in range(rounds):
        meet()
        found.append(pace.seconds())
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """The median of rounds, each its slowest rank's, for which a step waits, and their middle 80 % over it."""

    median_s: float
    spread: float


def paces_of(ranks: Sequence[Sequence[float]] | NDArray[np.float64]) -> Paces:
    """Pace of a machine from the rounds of its ranks (ranks, rounds)."""
    low, median, high = np.quantile(np.max(np.asarray(ranks), axis=0), (0.1, 0.5, 0.9)).tolist()
    return Paces(median_s=median, spread=(high - low) / median)
