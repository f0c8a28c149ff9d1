"""Several chunks a rank on a long chain: cuts with the least sum over turns of the longest chunk.

How much turns of unequal length cost, or save, no recurrence over cuts tells. Of the cuts whose turns take about the
least the best is therefore found among few: one with long turns first and one with long turns last, in both of which
chunks are as equal as that leaves them. Chunks of a rank share its memory (`planner.search.stages.memory_shares`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planner.search.stages.cutting import cut_turns
from planner.search.stages.fragments import FloatArray
from planner.search.stages.memory_shares import Share, shares
from planner.search.stages.segments import ROUNDING, BoolArray, Picks, Segments, made, objective_s, unlimited_s
from planner.search.stages.task import Partition


class Manner(NamedTuple):
    """What a cut is to cost: so much of the longest chunk of each turn, and the rest of the mean of its chunks.

    ``equal`` is what the squares of their times count besides, and the last turn counts by ``tilt`` more.
    """

    longest: float
    equal: float
    tilt: float


MANNERS = (Manner(1.0, 0.03, 0.01), Manner(0.2, 0.1, -0.05))
LIMITS = 40
"""About the most limits on a turn that are told apart."""


def search_turns(segments: Segments) -> Partition | None:
    """The best partition found without a memory limit, with a bound on all, whatever turns of unequal length cost."""
    found = _picks(segments, Share(np.full(segments.task.pieces, np.inf), np.inf), MANNERS)
    if not found:
        return None
    best = min(found, key=lambda picks: objective_s(segments, picks))
    return made(segments, best, unlimited_s(segments))


def search_limited(segments: Segments, ends: Sequence[int]) -> Partition | None:
    """A partition within the memory limit, which chunks share as ones with these ``ends`` would; bounded likewise."""
    for share in shares(segments.task, ends):
        for picks in _picks(segments, share, MANNERS[:1]):
            return made(segments, picks, unlimited_s(segments))
    return None


def _picks(segments: Segments, share: Share, manners: Sequence[Manner]) -> list[Picks]:
    """Rows that cost least in each manner, each chunk with its share of the memory; none where there are none."""
    task, busy = segments.task, segments.busy
    allowed, which = segments.allowed_of(share.standing, share.transient)
    limits = _limits(segments, np.logical_or.reduce(allowed, axis=0))
    if not len(limits):
        return []
    longest, equal, tilt = np.array(manners).T[:, :, None]
    costs = segments.fill + ((1 - longest) + equal * busy / (segments.share_s / task.chunks)) * busy / task.ranks
    within = busy <= limits[:, None] * (1 + ROUNDING)
    tables = np.where(allowed[:, None, None] & within, costs[:, None], np.inf)
    later = 1 + tilt * np.arange(task.chunks)[:, None, None] / task.chunks
    return cut_turns(segments, tables, which, longest * later * limits) or []


def _limits(segments: Segments, usable: BoolArray) -> FloatArray:
    """Limits on the longest chunk of a turn: the least time of every group, and others between."""
    busy = np.where(usable, segments.busy, np.inf)
    least = np.minimum.reduceat(busy, segments.offsets)
    rest = np.unique(busy[np.isfinite(busy)])
    limits: FloatArray = np.unique(np.concatenate([least[np.isfinite(least)], rest[:: 1 + len(rest) // LIMITS]]))
    return limits
