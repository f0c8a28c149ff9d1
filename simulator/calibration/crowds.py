"""What messages of a group cost more while other groups compute on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
import torch
import torch.distributed as dist

from simulator.calibration import messages
from simulator.calibration.messages import (
    TIMEOUT,
    BehindComputation,
    MessageTimes,
    calls_of,
    gathered_calls,
)
from simulator.crowding import Crowding
from simulator.program import Collective

SIZES = (1 << 10, 1 << 17, 1 << 22)
"""Payloads in bytes, of those that groups alone are timed with: from what takes a turn to what takes many."""
CALLS = 24
LARGEST_STRETCH = 50.0
TRIED = 200
"""Delays and factors that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdTimes:
    """Seconds of sums of `SIZES` in groups of a size while all groups of so many processes compute and send."""

    group_size: int
    processes: int
    seconds: tuple[float, ...]


def measure_crowds(device: torch.device, sizes: Sequence[int]) -> tuple[CrowdTimes, ...]:
    """Time sums in groups of some sizes, as one rank of all; every group goes on for itself."""
    return tuple(_crowd(device, size) for size in sizes if size < dist.get_world_size())


def _crowd(device: torch.device, size: int) -> CrowdTimes:
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [range(first, first + size) for first in range(0, world, size)]
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in members]
    mine = groups[rank // size]
    assert isinstance(mine, dist.ProcessGroup)
    behind, found = BehindComputation(device), list[float]()
    for payload in SIZES:
        call = calls_of(payload, device, mine)[Collective.ALL_REDUCE]
        call(0)
        behind.begin()
        calls = gathered_calls([behind.call(partial(call, number)) for number in range(CALLS)], device)
        found.append(fmean(calls.of(ranks).direct_seconds() for ranks in members))
    return CrowdTimes(group_size=size, processes=world, seconds=tuple(found))


def crowding(crowds: Sequence[CrowdTimes], alone: Sequence[MessageTimes]) -> tuple[Crowding, ...]:
    """What messages cost more in crowds than among as many processes alone, where these were timed."""
    known = {group.processes: group.seconds[Collective.ALL_REDUCE] for group in alone}
    places = [messages.SIZES.index(size) for size in SIZES]
    found = []
    for crowd in crowds:
        if crowd.group_size in known:
            delay, stretch = fit_crowding([known[crowd.group_size][place] for place in places], crowd.seconds)
            found.append(
                Crowding(group_size=crowd.group_size, processes=crowd.processes, delay_s=delay, stretch=stretch)
            )
    return tuple(found)


def fit_crowding(alone: Sequence[float], among: Sequence[float]) -> tuple[float, float]:
    """Delay and factor that bring times of messages alone nearest to those among others, by the mean of logarithms.

    Neither makes a message shorter.
    """
    times, seen = np.array(alone), np.array(among)
    stretches = np.geomspace(1.0, LARGEST_STRETCH, TRIED)
    delays = np.concatenate([[0.0], np.geomspace(1e-6, max(float(seen.max()), 2e-6), TRIED)])
    found = delays[:, None, None] + stretches[:, None] * times
    error = np.abs(np.log(found / seen)).mean(axis=2)
    delay, stretch = np.unravel_index(int(error.argmin()), error.shape)
    return float(delays[delay]), float(stretches[stretch])
