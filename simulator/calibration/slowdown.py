"""How much kernels slow while several processes compute on the same cores and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from simulator.calibration.cases import all_cases
from simulator.calibration.messages import TIMEOUT, gathered, own_device
from simulator.calibration.process import available_cores
from simulator.calibration.timing import Repeated, kernel_clock, repeated_case, synchronize
from simulator.program import Kernel

FEWEST_ROUNDS, MOST_ROUNDS = 16, 48
ROUND_S = 0.008
AGREEMENT = 0.04
"""Part by which the two halves of the rounds may differ before more are run."""
MIX_SIZE = 256
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Time while some processes compute over time alone: of a mix of kernels, and of single classes."""

    mix: float
    classes: Mapping[Kernel, float] = field(default_factory=dict)


ALONE = Slowdown(mix=1.0, classes=dict.fromkeys(SLOWED, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """Seconds of every round: of the one rank whose turn it was to be alone (rounds,), and of all (ranks, rounds)."""

    alone: NDArray[np.float64]
    together: NDArray[np.float64]

    @property
    def factors(self) -> NDArray[np.float64]:
        """Time together over time alone (rounds,), both of the rank whose turn it was."""
        ranks, rounds = self.together.shape
        own = self.together[np.arange(rounds) % ranks, np.arange(rounds)]
        return np.asarray(own / self.alone)

    @property
    def factor(self) -> float:
        """The median round's."""
        return float(np.median(self.factors))

    @property
    def skew(self) -> float:
        """Time of the slowest rank over the mean rank's, the median round's."""
        return float(np.median(self.together.max(axis=0) / self.together.mean(axis=0)))

    @property
    def agree(self) -> bool:
        """Whether the earlier and the later rounds tell the same."""
        ranks = len(self.together)
        middle = max(1, len(self.factors) // (2 * ranks)) * ranks
        before, after = (float(np.median(part)) for part in (self.factors[:middle], self.factors[middle:]))
        return abs(before - after) <= AGREEMENT * min(before, after)


def measure_slowdown(device_type: str, backend: str) -> Slowdown:
    """Measure, as one rank of all, how much slower kernels are while all processes run them at the same time.

    Every rank takes turns at computing alone, each time right before all do: what the machine does besides, or the
    pace of the hour, is in both and not in their ratio. Processor time tells how they disturb each other's caches and
    memory, and leaves other programs out; where there are more processes than cores, each also waits for its turn, in
    proportion. Ranks of a step wait for the slowest between two messages: a mix of kernels is run in short parts, and
    the slowest rank's of each counts; single classes are slowed by as much.
    """
    dist.init_process_group(backend, timeout=TIMEOUT)
    try:
        device = own_device(device_type)
        threads = dist.get_world_size() * torch.get_num_threads()
        turns = max(1.0, threads / available_cores()) if device_type == "cpu" else 1.0
        mix = _rounds(_mix(device), device)
        waits = turns * mix.skew
        classes = {kernel: waits * _of_class(kernel, device) for kernel in SLOWED}
        return Slowdown(mix=waits * mix.factor, classes=classes)
    finally:
        dist.destroy_process_group()


def _mix(device: torch.device) -> Repeated:
    left, right = torch.rand(MIX_SIZE, MIX_SIZE, device=device), torch.rand(1 << 20, device=device)

    def run(count: int) -> None:
        for _ in range(8 * count):
            torch.mm(left, left)
            torch.add(right, right)

    return run


def _of_class(kernel: Kernel, device: torch.device) -> float:
    """Factor of a class: the mean of its typical kernels', in float32."""
    names = SLOWED[kernel]
    cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.name in names and c.dtype == "float32"]
    found = [_rounds(repeated_case(case, device), device) for case in cases]
    return float(np.mean([rounds.factor for rounds in found]))


def _rounds(run: Repeated, device: torch.device) -> Rounds:
    """Run something alone and together in turn, the more often the less the rounds agree."""
    count = _count(run, device)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    own_alone, own_together = list[float](), list[float]()
    while True:
        for number in range(len(own_alone), len(own_alone) + FEWEST_ROUNDS):
            dist.barrier()
            own_alone.append(_seconds(run, count, device) if number % ranks == rank else 0.0)
            dist.barrier()
            own_together.append(_seconds(run, count, device))
        alone, together = gathered(own_alone, device).max(axis=0), gathered(own_together, device)
        found = Rounds(alone=alone, together=together)
        if found.agree or len(own_alone) >= MOST_ROUNDS:
            return found


def _count(run: Repeated, device: torch.device) -> int:
    """Repetitions that fill a round, the same for every rank."""
    run(1)
    dist.barrier()
    once = max(float(gathered([_seconds(run, 2, device) / 2], device).max()), 1e-7)
    return max(1, round(ROUND_S / once))


def _seconds(run: Repeated, count: int, device: torch.device) -> float:
    clock = kernel_clock(device)
    start = clock()
    run(count)
    synchronize(device)
    return clock() - start


def factors_by_count(found: Sequence[tuple[int, Slowdown]]) -> dict[Kernel | None, tuple[tuple[int, float], ...]]:
    """Factors of every class, and of the mix (None), by the number of processes.

    More processes never slow each other less: what says so is the scatter of its measurement, and the factor of fewer
    stands instead.
    """
    kinds: tuple[Kernel | None, ...] = (None, *found[0][1].classes) if found else ()
    result = {}
    for kind in kinds:
        raw = [slowdown.mix if kind is None else slowdown.classes[kind] for _, slowdown in found]
        rising = np.maximum.accumulate(np.maximum(raw, 1.0)).tolist()
        result[kind] = tuple((count, factor) for (count, _), factor in zip(found, rising, strict=True))
    return result
