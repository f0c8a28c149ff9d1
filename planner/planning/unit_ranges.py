"""Consecutive units of a solved configuration, named by the first and the last of them as plans do."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from planner.networks.marks import Swap
from planner.plans.plan import Chunk, OffloadRange, RecomputeRange
from planner.search.configurations.explored import Placed
from planner.search.units.labels import RECOMPUTE


def chunks(names: Sequence[str], placed: Placed) -> tuple[Chunk, ...]:
    """What each pipeline rank holds, chunk after chunk."""
    found, begin = [], 0
    for rank, end in zip(placed.task.rank_of.tolist(), placed.partition.ends, strict=True):
        found.append(Chunk(rank=int(rank), first=names[begin], last=names[end - 1]))
        begin = end
    return tuple(found)


def offload_ranges(names: Sequence[str], swaps: Sequence[Swap | None]) -> tuple[OffloadRange, ...]:
    """Rows of units that have the same on the host."""
    found, begin = [], 0
    for swap, members in groupby(swaps):
        end = begin + len(list(members))
        if swap is not None:
            found.append(OffloadRange(first=names[begin], last=names[end - 1], swap=swap))
        begin = end
    return tuple(found)


def recompute_ranges(names: Sequence[str], modes: Sequence[str], keeps: Sequence[bool]) -> tuple[RecomputeRange, ...]:
    """Rows of units that compute again in one mode and keep what messages bring, or do not."""
    found, begin = [], 0
    for (mode, kept), members in groupby(zip(modes, keeps, strict=True)):
        end = begin + len(list(members))
        if mode != RECOMPUTE[0]:
            found.append(RecomputeRange(first=names[begin], last=names[end - 1], mode=mode, messages=not kept))
        begin = end
    return tuple(found)
