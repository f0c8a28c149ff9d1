"""What messages of a group cost more while other groups compute on the same cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
import torch.distributed as dist

from simulator.calibration.messages import TIMEOUT, calls_of, filler, gathered, span
from simulator.calibration.timing import middle_mean
from simulator.crowding import Crowding
from simulator.program import Collective

SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Payloads in bytes: from what takes a turn to what takes many."""
CALLS = 16
LARGEST_STRETCH = 50.0
STRETCHES = 200


def measure_crowds(device: torch.device, sizes: Sequence[int]) -> list[Crowding]:
    """Measure, as one rank of all, messages in groups of some sizes while all groups compute and send, each for itself.

    Each group is timed alone first, while all other ranks wait, so that what the machine does besides is in both.
    """
    return [_crowding(device, size) for size in sizes if size < dist.get_world_size()]


def _crowding(device: torch.device, size: int) -> Crowding:
    world, rank = dist.get_world_size(), dist.get_rank()
    members = [range(first, first + size) for first in range(0, world, size)]
    groups = [dist.new_group(list(ranks), timeout=TIMEOUT) for ranks in members]
    mine = groups[rank // size]
    before = filler(device)
    alone, among = list[float](), list[float]()
    for payload in SIZES:
        call = calls_of(payload, device, mine)[Collective.ALL_REDUCE]
        call(0)
        before()
        dist.barrier()
        first = [span(before, partial(call, number), device) for number in range(CALLS if rank < size else 0)]
        dist.barrier()
        together = [span(before, partial(call, number), device) for number in range(CALLS)]
        dist.barrier()
        alone.append(_seconds(first or [(0.0, 0.0)] * CALLS, device, [members[0]]))
        among.append(_seconds(together, device, members))
    delay, stretch = fit_crowding(alone, among)
    return Crowding(group_size=size, processes=world, delay_s=delay, stretch=stretch)


def _seconds(spans: Sequence[tuple[float, float]], device: torch.device, groups: Sequence[range]) -> float:
    """Mean of the middle half of what calls take from when the last member comes until the last has done."""
    begins, ends = (gathered([each[side] for each in spans], device) for side in (0, 1))
    found = [ends[list(ranks)].max(axis=0) - begins[list(ranks)].max(axis=0) for ranks in groups]
    return max(middle_mean(np.concatenate(found).tolist()), 1e-7)


def fit_crowding(alone: Sequence[float], among: Sequence[float]) -> tuple[float, float]:
    """Delay and factor that bring times of messages alone nearest to those among others, by the mean of logarithms.

    Neither makes a message shorter.
    """
    times, seen = np.array(alone), np.array(among)
    stretches = np.geomspace(1.0, LARGEST_STRETCH, STRETCHES)
    delays = [0.0, *np.geomspace(1e-6, max(float(seen.max()), 2e-6), STRETCHES)]
    error = {
        (delay, stretch): float(np.abs(np.log((delay + stretch * times) / seen)).mean())
        for delay, stretch in product(delays, stretches)
    }
    delay, stretch = min(error, key=lambda pair: error[pair])
    return float(delay), float(stretch)
