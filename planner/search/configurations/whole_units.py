"""How units that cannot be divided share out over the chunks of pipeline ranks: the least time, turn by turn.

A turn is one chunk of each rank, and every turn takes as long as its longest chunk. Of a network's units those that
take at least as long as the most frequent one count as blocks, and the first and the last unit of the network lie in
the first and the last chunk; other units count nothing. That is a relaxation, so that the least sum over turns bounds
every partition, and it is exact where a network is an embedding, equal blocks and a head without a memory limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_EQUAL = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkTimes:
    """Least seconds of chunks by the blocks in them, (blocks + 1,) each and ascending.

    ``inner`` are chunks between the ends, ``first`` hold the first unit of the network as well, ``last`` the last one,
    and ``only`` both.
    """

    inner: FloatArray
    first: FloatArray
    last: FloatArray
    only: FloatArray

    @property
    def blocks(self) -> int:
        """Blocks of the network, the first and the last unit aside."""
        return len(self.inner) - 1


def chunk_times(
    seconds: Sequence[float], counts: Sequence[int], *, tail_s: float = 0.0, sends_s: float = 0.0, hidden: float = 0.0
) -> ChunkTimes:
    """Tabulate the times of chunks of a chain of kinds of unit.

    Parameters
    ----------
    seconds, counts : least seconds of each kind and how many of it stand in a row
    tail_s : added to every chunk
    sends_s, hidden : messages before all chunks but the first, of which `hidden` times the units' own time is hidden
    """
    times = np.asarray(seconds, dtype=np.float64)
    block = float(times[int(np.argmax(counts))])
    whole = int(np.asarray(counts)[times >= block * (1 - _EQUAL)].sum())
    first, last = float(times[0]), float(times[-1]) if sum(counts) > 1 else 0.0
    left = max(0, whole - sum(end >= block * (1 - _EQUAL) for end in (first, last)))
    own: FloatArray = np.arange(left + 1, dtype=np.float64) * block

    def behind(units_s: FloatArray) -> FloatArray:
        waited: FloatArray = units_s + np.maximum(0.0, sends_s - hidden * units_s) + tail_s
        return waited

    return ChunkTimes(
        inner=behind(own), first=own + first + tail_s, last=behind(own + last), only=own + first + last + tail_s
    )


def longer(one: ChunkTimes, other: ChunkTimes) -> ChunkTimes:
    """Both bounds at once, for as many blocks as both know of."""
    size = min(one.blocks, other.blocks) + 1
    return ChunkTimes(
        inner=np.maximum(one.inner[:size], other.inner[:size]),
        first=np.maximum(one.first[:size], other.first[:size]),
        last=np.maximum(one.last[:size], other.last[:size]),
        only=np.maximum(one.only[:size], other.only[:size]),
    )


def least_turns(times: ChunkTimes, ranks: int, chunks: int) -> float:
    """Least sum over turns of the longest chunk, seconds, with `chunks` chunks on each of `ranks` ranks.

    Notes
    -----
    In a turn that lasts T, a chunk holds the most blocks with which it takes at most T. Only T at which some chunk is
    full matter. The turns between the first and the last are alike, and share their blocks out evenly because a chunk's
    time is convex in its blocks.
    """
    if ranks * chunks == 1:
        return float(times.only[-1])
    limits = [_ascending(times.inner, end) for end in (times.first, times.last)]
    starts, stops = limits[0][limits[0] >= times.first[0]], limits[1][limits[1] >= times.last[0]]
    if chunks == 1:
        both = _ascending(starts, stops)
        both = both[both >= max(times.first[0], times.last[0])]
        ends = _held(times.first, both) + _held(times.last, both)
        held = ends + (ranks - 2) * _held(times.inner, both)
        return float(both[int(np.argmax(held >= times.blocks))])
    blocks: IntArray = np.arange(times.blocks + 1)
    begun = _at_least(starts, _held(times.first, starts) + (ranks - 1) * _held(times.inner, starts), blocks)
    ended = _at_least(stops, _held(times.last, stops) + (ranks - 1) * _held(times.inner, stops), blocks)
    between = _spread_s(times.inner, -(-blocks // ranks), chunks - 2)
    behind = (ended + between[_left(times.blocks)]).min(axis=1)
    return float((begun + behind[::-1]).min())


def least_ranks(times: ChunkTimes, ranks: int, *, together: bool) -> float:
    """Least time of the busiest rank, all its chunks taken as one; `together` where one rank holds both ends."""
    if not together:
        return least_turns(times, ranks, 1)
    limits = _ascending(times.inner, times.only)
    limits = limits[limits >= times.only[0]]
    held = _held(times.only, limits) + (ranks - 1) * _held(times.inner, limits)
    return float(limits[int(np.argmax(held >= times.blocks))])


def _ascending(one: FloatArray, other: FloatArray) -> FloatArray:
    """Both in one row; what is there twice changes nothing."""
    both: FloatArray = np.concatenate([one, other])
    both.sort()
    return both


def _held(times: FloatArray, limits: FloatArray) -> IntArray:
    """(limits,) most blocks of a chunk under each limit."""
    found = np.searchsorted(times, limits * (1 + _EQUAL), side="right") - 1
    return np.asarray(np.maximum(found, 0), dtype=np.int64)


def _at_least(limits: FloatArray, held: IntArray, blocks: IntArray) -> FloatArray:
    """(blocks,) least limit under which a turn holds so many, infinite where none does; `held` ascends."""
    seconds: FloatArray = np.append(limits, np.inf)[np.searchsorted(held, blocks)]
    return seconds


@lru_cache(maxsize=64)
def _left(blocks: int) -> IntArray:
    """(all, held) blocks that are left of all when some are held."""
    count = np.arange(blocks + 1)
    left: IntArray = np.maximum(count[:, None] - count[None, :], 0)
    return left


def _spread_s(times: FloatArray, levels: IntArray, turns: int) -> FloatArray:
    """Seconds of `turns` equal turns whose chunks hold so many blocks together, shape of `levels`."""
    if turns == 0:
        return np.where(levels > 0, np.inf, 0.0)
    most = len(times) - 1
    base, more = np.minimum(levels // turns, most), levels % turns
    of = np.concatenate([[0.0], times[1:]])
    seconds: FloatArray = (turns - more) * of[base] + more * of[np.minimum(base + 1, most)]
    return seconds
