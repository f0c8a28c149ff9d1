"""Messages among some of the processes that share a machine's cores.

While a group passes a message on, other groups compute on the same cores: its members wait for their turn whenever one
has done its part, and share the caches. A group of all processes does not, since nobody else computes then.
"""

from __future__ import annotations

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
