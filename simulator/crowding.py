"""Processes that share a machine's cores: how much longer their messages take, and how fast and quiet the machine was.

While a group passes a message on, other groups compute on the same cores: its members wait for their turn whenever one
has done its part, and share the caches. A group of all processes does not, since nobody else computes then.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowding:
    """What a message of a group costs more where so many processes share the cores: a delay, and a factor."""

    group_size: int
    processes: int
    delay_s: float
    stretch: float


def crowded(table: Sequence[Crowding], seconds: FloatArray, group_size: int, processes: float) -> FloatArray:
    """Seconds (n,) of messages of a group among so many processes, given those of a group alone.

    Between numbers of processes delay and factor are interpolated linearly, from nothing where there is nobody else;
    beyond the last the factor grows in proportion, as taking turns does, and so does the delay. Groups of sizes that
    were not measured are as the next smaller ones.
    """
    if processes <= group_size or group_size < 2 or not table:
        return seconds
    sizes = sorted({one.group_size for one in table})
    like = max((size for size in sizes if size <= group_size), default=sizes[0])
    known = sorted((one.processes, one.delay_s, one.stretch) for one in table if one.group_size == like)
    points = [(group_size, 0.0, 1.0), *(point for point in known if point[0] > group_size)]
    if processes >= points[-1][0]:
        count, delay, stretch = points[-1]
        grown = processes / count if len(points) > 1 else 1.0
        return np.asarray(delay * grown + stretch * grown * seconds)
    low, high = next((a, b) for a, b in pairwise(points) if a[0] <= processes <= b[0])
    share = (processes - low[0]) / (high[0] - low[0])
    delay, stretch = ((1 - share) * low[i] + share * high[i] for i in (1, 2))
    return np.asarray(delay + stretch * seconds)


def at_count(table: Sequence[tuple[int, float]], processes: float, *, proportional: bool) -> float:
    """A factor on a straight line between counts of processes; beyond the last the last, or in proportion."""
    counts, factors = [count for count, _ in table], [factor for _, factor in table]
    place = bisect.bisect_left(counts, processes)
    if place == len(counts):
        return factors[-1] * processes / counts[-1] if proportional and len(counts) > 1 else factors[-1]
    if counts[place] == processes or place == 0:
        return factors[place]
    share = (processes - counts[place - 1]) / (counts[place] - counts[place - 1])
    return factors[place - 1] + share * (factors[place] - factors[place - 1])


MOST_OTHERS = 0.05
MOST_STOLEN = 0.02
MOST_SPREAD = 0.25
"""From these parts on a machine was not quiet enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a machine was like while it was calibrated; no prediction depends on it.

    ``paces`` pairs numbers of processes with the seconds that typical kernels took on all of them together.
    ``pace_spread`` is the middle 80 % of these, where each process had a core, over their median, ``others_share`` the
    part of the cores' time that other programs took, and ``stolen_share`` that which their host took.
    """

    paces: tuple[tuple[int, float], ...]
    pace_spread: float = 0.0
    others_share: float = 0.0
    stolen_share: float = 0.0

    def pace_s(self, processes: int) -> float:
        """Seconds of typical kernels on so many processes together.

        Linear between numbers that were measured; beyond the last of several in proportion, as sharing cores is, and
        the same where there is one alone: devices of their own do not slow each other.
        """
        return at_count(self.paces, processes, proportional=True)

    @property
    def warning(self) -> str:
        """One line on what made the measurements doubtful; empty where nothing did."""
        reasons = []
        if self.others_share > MOST_OTHERS:
            reasons.append(f"other programs took {self.others_share:.0%} of the cores' time")
        if self.stolen_share > MOST_STOLEN:
            reasons.append(f"the host took {self.stolen_share:.0%} of it")
        if self.pace_spread > MOST_SPREAD:
            reasons.append(f"its speed varied by {self.pace_spread:.0%}")
        if not reasons:
            return ""
        return f"the machine was not quiet while it was calibrated: {', '.join(reasons)}; calibrate again when it is"
