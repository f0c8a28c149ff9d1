"""How much kernels slow while several processes compute on the same cores and memory.

Each rank computes alone right before all do, in rounds of some milliseconds, and the median ratio counts, so that the
pace of the moment is in both and drops out. Half of the rounds of a class lie before the collectives are timed and half
after; where the halves disagree there are more. Processes meet again and again in between, and the slowest counts, as
in a step. What that adds is a number of its own in the profile (`compute_slowdown.waiting`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from simulator.calibration.cases import all_cases
from simulator.calibration.machine import beyond_caches
from simulator.calibration.messages import gathered
from simulator.calibration.process import available_cores
from simulator.calibration.timing import (
    Pace,
    Paces,
    Repeated,
    kernel_clock,
    paces_of,
    repeated_case,
    synchronize,
    timed_paces,
)
from simulator.program import Kernel

FEWEST_ROUNDS, MOST_ROUNDS = 16, 24
ROUND_S = 0.006
PACE_EVERY = 2
"""Kinds of kernels between two rounds of the machine's pace."""
AGREEMENT = 0.04
"""Part by which the two halves of the rounds may differ before more are run."""
MIX_SIZE = 256
TURN_CACHES = 0.625
"""Part of what lies beyond the caches that inputs are taken in turn from: more than the caches hold all the same."""
SLOWED: Mapping[Kernel, tuple[str, ...]] = {
    Kernel.MATMUL: ("mm 256x256x256", "mm 64x1024x4096", "mm 256x768x3072"),
    Kernel.CONVOLUTION: ("conv 8x64x16x16 to 64, 3x3", "backward of conv 16x512x1x1 to 1024, 1x1"),
    Kernel.ELEMENTWISE: ("add 524288",),
    Kernel.ACCUMULATION: ("add in place 524288",),
    Kernel.ACTIVATION: ("relu 524288",),
    Kernel.TRANSCENDENTAL: ("gelu 524288",),
    Kernel.NORMALIZATION: ("layer norm 524288",),
    Kernel.OPTIMIZER: ("adam 524288", "adam 4194304"),
}
"""Typical kernels of classes that processes on shared cores and memory slow by unlike factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slowdown:
    """Time while some processes compute over time alone: of a mix of kernels, and of single classes.

    ``waits`` is the part of these factors that processor time does not show: kernels between two messages wait for
    their turn on a core and, ``skew`` times as long, for the slowest rank. ``paces`` is what typical kernels took
    while all ran them.
    """

    mix: float
    classes: Mapping[Kernel, float] = field(default_factory=dict)
    waits: float = 1.0
    skew: float = 1.0
    paces: Paces | None = None


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


class SlowdownTimer:
    """Times kernels alone and together, as one rank of all.

    Every rank takes turns at computing alone, each time right before all do: what the machine does besides, or the
    pace of the hour, is in both and not in their ratio. All kinds of kernels have their turn in every round, so that
    what disturbs the machine for a while hits a few rounds of each and not all of one. Processor time tells how they
    disturb each other's caches and memory, and leaves other programs out; where there are more processes than cores,
    each also waits for its turn, in proportion. Ranks of a step wait for the slowest between two messages: a mix of
    kernels is run in short parts, and the slowest rank's of each counts; single classes are slowed by as much.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turns = core_turns(device)
        cases = [c for c in all_cases(accelerator=device.type != "cpu") if c.dtype == "float32"]
        self._kinds = [_Timed(None, lambda: _mix(device))]
        turn = TURN_CACHES * beyond_caches() if device.type == "cpu" else None
        self._kinds += [
            _Timed(kernel, partial(repeated_case, case, device, turn_bytes=None if turn is None else int(turn)))
            for kernel, names in SLOWED.items()
            for case in cases
            if case.name in names
        ]
        self._paces: list[float] = []

    def time(self) -> None:
        """Time some rounds of every kind, and of the machine's pace; to be called twice and more, some time apart."""
        ranks = dist.get_world_size()
        rounds = -(-FEWEST_ROUNDS // (2 * ranks)) * ranks
        pace = Pace(self._device)
        for number, kind in enumerate(self._kinds):
            kind.time(rounds, self._device)
            self._paces += timed_paces(pace, dist.barrier, 1 if number % PACE_EVERY == 0 else 0)

    def finish(self) -> Slowdown:
        """Time again what earlier and later rounds tell differently, and say what was found."""
        for kind in self._kinds:
            while not kind.found(self._device).agree and kind.count < MOST_ROUNDS:
                kind.time(dist.get_world_size() * -(-8 // dist.get_world_size()), self._device)
        found = [kind.found(self._device) for kind in self._kinds]
        waits = self._turns * found[0].skew
        factors: dict[Kernel, list[float]] = {}
        for kind, rounds in zip(self._kinds, found, strict=True):
            if kind.kernel is not None:
                factors.setdefault(kind.kernel, []).append(rounds.factor)
        return Slowdown(
            mix=waits * found[0].factor,
            classes={kernel: waits * float(np.mean(of_kernel)) for kernel, of_kernel in factors.items()},
            waits=waits,
            skew=found[0].skew,
            paces=paces_of(gathered(self._paces, self._device)),
        )


class _Timed:
    """A kind of kernels with its rounds so far, of this rank; its memory is there while it is timed."""

    def __init__(self, kernel: Kernel | None, make: Callable[[], Repeated]) -> None:
        self.kernel, self._make = kernel, make
        self._alone, self._together = list[float](), list[float]()

    @property
    def count(self) -> int:
        """Rounds so far."""
        return len(self._alone)

    def time(self, rounds: int, device: torch.device) -> None:
        """Run some rounds alone, where it is this rank's turn, and together with all others."""
        run, ranks, rank = self._make(), dist.get_world_size(), dist.get_rank()
        count = _count(run, device)
        for _ in range(rounds):
            dist.barrier()
            mine = len(self._alone) % ranks == rank
            self._alone.append(_seconds(run, count, device) / count if mine else 0.0)
            dist.barrier()
            self._together.append(_seconds(run, count, device) / count)

    def found(self, device: torch.device) -> Rounds:
        """The rounds of all ranks, the same on each."""
        alone, together = gathered(self._alone, device).max(axis=0), gathered(self._together, device)
        return Rounds(alone=alone, together=together)


def core_turns(device: torch.device) -> float:
    """How many ranks take turns on a core."""
    if device.type != "cpu":
        return 1.0
    return max(1.0, dist.get_world_size() * torch.get_num_threads() / available_cores())


def _mix(device: torch.device) -> Repeated:
    left, right = torch.rand(MIX_SIZE, MIX_SIZE, device=device), torch.rand(1 << 20, device=device)

    def run(count: int) -> None:
        for _ in range(8 * count):
            torch.mm(left, left)
            torch.add(right, right)

    return run


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
        pairs = ((count, factor) for (count, _), factor in zip(found, rising, strict=True))
        result[kind] = ((1, 1.0), *pairs)
    return result
