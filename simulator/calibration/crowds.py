"""What messages of a group cost more while other groups compute on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from simulator.calibration import messages
from simulator.calibration.messages import TIMEOUT, MessageTimes, calls_of, filler, gathered, span
from simulator.calibration.timing import middle_mean
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
    before, found = filler(device), list[float]()
    for payload in SIZES:
        call = calls_of(payload, device, groups[rank // size])[Collective.ALL_REDUCE]
        call(0)
        before()
        dist.barrier()
        found.append(
            _seconds([span(before, partial(call, number), device) for number in range(CALLS)], device, members)
        )
    return CrowdTimes(group_size=size, processes=world, seconds=tuple(found))


def _seconds(spans: Sequence[tuple[float, float]], device: torch.device, groups: Sequence[range]) -> float:
    """Mean of the middle half of what calls take from when the last member has come until the last has done."""
    begins, ends = (gathered([each[side] for each in spans], device) for side in (0, 1))
    found = [ends[list(ranks)].max(axis=0) - begins[list(ranks)].max(axis=0) for ranks in groups]
    return max(middle_mean(np.concatenate(found).tolist()), 1e-7)


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
