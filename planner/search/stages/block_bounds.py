"""Bounds by equal blocks: how they share out over the chunks of ranks, in turns and in given time and memory.

*Turns.* A turn is one chunk of each rank, and every turn takes as long as its longest chunk. Of a network's units those
that take at least as long as the most frequent one count as blocks, and the first and the last unit of the network lie
in the first and the last chunk; other units count nothing. That is a relaxation, so that the least sum over turns
bounds every partition, and it is exact where a network is an embedding, equal blocks and a head without a memory limit.

*Memory.* For a price of a byte that a block keeps from forward to backward, min-plus powers of the block's cheapest
ways between boundary states give the exact least sum of time and priced bytes of k blocks in a row. Every price then
bounds the time of a rank's blocks from below, because its memory is limited (Lagrange); the largest of these bounds
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from planner.search.stages.fragments import (
    ACTIVATION,
    BACKLOG,
    RESIDENT,
    STEADY,
    TRANSIENT,
    FloatArray,
    Fragments,
    least_of,
)
from planner.search.stages.task import PartitionTask

PRICES = np.concatenate([[0.0], np.geomspace(0.03, 100.0, 12)])
"""Prices of all bytes that the greediest way of a block keeps, in least times of a block."""
_ROUNDING = 1e-9


def least_busiest(task: PartitionTask) -> float:
    """Bound on the time of the busiest rank, the sum of its chunks, that ranks need to hold all of the equal blocks.

    Infinite where the memory of all ranks does not suffice. Blocks of the most frequent kind may lie anywhere, and as
    if in the chunk of their rank that has the fewest micro-batches in flight; the first and the last unit take their
    least time and memory of their ranks. What is left of the synchronisation is at least what messages take longer
    than the passes that hide them.
    """
    most = int(np.argmax(task.counts))
    block, count = task.kinds[most], task.counts[most]
    values = block.values
    highest = min(count, 2 * -(-count // task.ranks) + 2)
    flight = np.full(task.ranks, np.inf)
    np.minimum.at(flight, task.rank_of, task.in_flight)
    room = task.limit_bytes - values[:, TRANSIENT].min() - _ends_bytes(task, most)
    free = room[:, None] - np.arange(highest + 1) * values[:, RESIDENT].min()
    alone = free >= flight[:, None] * np.arange(highest + 1) * values[:, ACTIVATION].min() * (1 - _ROUNDING)
    if _held(alone, count, highest) < count:
        return np.inf
    scale = float(values[:, ACTIVATION].max()) or 1.0
    prices = PRICES * float(values[:, STEADY].min()) / scale
    terms = _terms(task, most)
    seconds = np.stack([values[:, columns].sum(axis=1) for columns, _ in terms])
    sums = _tables(block, highest, prices, seconds)
    for _ in range((task.chunks - 1).bit_length()):
        sums = _shared(sums)
    fits = flight[:, None] * sums[:, -1] <= free * (1 + _ROUNDING)
    times = np.zeros((task.ranks, highest + 1))
    for table, (_, ends_s) in zip(sums[:, :-1].T.reshape(len(terms), len(prices), -1), terms, strict=True):
        least = _rank_times(table, prices, flight, free, fits)
        times = np.maximum(times, least + ends_s[:, None])
    return _least(times, count)


def _terms(task: PartitionTask, most: int) -> list[tuple[tuple[int, ...], FloatArray]]:
    """Columns whose sums bound a rank's time, and the seconds (ranks,) that the network's ends add to each.

    Passes alone do not where messages take longer than all of them, and what falls behind does not where passes hide
    all messages of blocks, and those of the ends as well.
    """
    behind = task.kinds[most].values[:, BACKLOG]
    passes_s, late_s = _ends_s(task, most, STEADY), _ends_s(task, most, STEADY, BACKLOG)
    later = late_s - passes_s
    found: list[tuple[tuple[int, ...], FloatArray]] = []
    if behind.min() < 0.0 or later.min() < 0.0:
        found.append(((STEADY,), passes_s))
    if behind.max() + max(later.max(), 0.0) > 0.0 or not found:
        found.append(((STEADY, BACKLOG), late_s))
    return found


def _held(fits: NDArray[np.bool_], count: int, highest: int) -> int:
    """Blocks that all ranks together hold at most; `fits` (ranks, blocks + 1) says how many one rank may hold."""
    each = fits.shape[1] - 1 - np.argmax(fits[:, ::-1], axis=1)
    each = np.where(fits.any(axis=1), each, 0)
    # Nothing is known of ranks that hold more than was tabled.
    return int(np.where(each >= highest, count, each).sum())


def _least(times: FloatArray, count: int) -> float:
    """Least time in which all ranks together hold `count` blocks; `times` (ranks, blocks + 1) ascend.

    Each number of blocks of each rank takes one block more. Nothing is known of ranks that hold more than was tabled.
    """
    each = times[:, 1:].ravel()
    needed = float(np.partition(each, count - 1)[count - 1]) if count <= len(each) else np.inf
    needed = min(needed, float(times[:, -1].min()))
    enough = times[times * (1 + _ROUNDING) >= needed] if np.isfinite(needed) else times[:0]
    return float(enough.min(initial=np.inf))


def _ends(task: PartitionTask, most: int) -> list[tuple[FloatArray, int, float]]:
    """Values, rank and micro-batches in flight of the network's first and last unit that are not of the kind `most`."""
    ends = {0: 0, len(task.kinds) - 1: -1}
    return [
        (task.kinds[kind].values, int(task.rank_of[chunk]), float(task.in_flight[chunk]))
        for kind, chunk in ends.items()
        if kind != most
    ]


def _ends_s(task: PartitionTask, most: int, *columns: int) -> FloatArray:
    """(ranks,) least seconds of the network's first and last unit."""
    seconds = np.zeros(task.ranks)
    for values, rank, _ in _ends(task, most):
        seconds[rank] += values[:, columns].sum(axis=1).min()
    return seconds


def _ends_bytes(task: PartitionTask, most: int) -> FloatArray:
    """(ranks,) least bytes of the network's first and last unit."""
    held = np.zeros(task.ranks)
    for values, rank, flight in _ends(task, most):
        held[rank] += (flight * values[:, ACTIVATION] + values[:, RESIDENT]).min()
    return held


def _rank_times(
    table: FloatArray, prices: FloatArray, flight: FloatArray, free: FloatArray, fits: NDArray[np.bool_]
) -> FloatArray:
    """(ranks, blocks + 1) least time of so many blocks on a rank with `free` bytes for their activations.

    Parameters
    ----------
    table : (prices, blocks + 1) least seconds and priced bytes of one micro-batch
    """
    per_byte = prices[1:, None] / np.maximum(flight, _ROUNDING)[:, None, None]
    # Blocks that cannot follow one another cannot at any price.
    least = np.maximum(table[0], (table[1:] - per_byte * free[:, None, :]).max(axis=1))
    least = np.where(fits, least, np.inf)
    if np.any(table[0, 1:] < table[0, :-1]):
        # Blocks that hide messages of others may leave their rank less to do than fewer of them.
        times: FloatArray = np.minimum.accumulate(least[:, ::-1], axis=1)[:, ::-1]
    else:
        times = np.maximum.accumulate(least, axis=1)
    return times


def _tables(block: Fragments, highest: int, prices: FloatArray, seconds: FloatArray) -> FloatArray:
    """Least sums of up to `highest` blocks in a row: seconds and priced bytes, and bytes alone.

    Parameters
    ----------
    seconds : (columns, ways)

    Returns
    -------
    (highest + 1, columns * prices + 1)
    """
    states, inverse = np.unique(np.concatenate([block.entry, block.exit]), return_inverse=True)
    entry, leave = inverse.reshape(2, -1)
    held = block.values[:, ACTIVATION]
    values = np.concatenate([(seconds[:, None, :] + prices[:, None] * held).reshape(-1, len(held)), held[None]])
    width = len(states)
    pairs = np.ascontiguousarray(least_of(entry * width + leave, width * width)(values).T)
    power = pairs.reshape(width, width, len(values))
    rows: FloatArray = np.zeros((1, width, len(values)))
    while len(rows) <= highest:
        # All rows with so many blocks more, as many as there are.
        rows = np.concatenate([rows, _followed(rows[: highest + 1 - len(rows)], power)])
        power = _followed(power, power)
    sums: FloatArray = rows.min(axis=1)
    return sums


def _followed(before: FloatArray, behind: FloatArray) -> FloatArray:
    """Least sums (n, states, …) over the states (n, states, …) and (states, states, …) between two rows of blocks."""
    found: FloatArray = before[:, :1] + behind[0]
    for state in range(1, len(behind)):
        np.minimum(found, before[:, state : state + 1] + behind[state], out=found)
    return found


def _shared(table: FloatArray) -> FloatArray:
    """(blocks + 1, …) least sums of two rows of blocks that hold so many together."""
    size = len(table)
    shared: FloatArray = table + table[:1]
    # Either row may be the one that holds at most half.
    for few in range(1, (size + 1) // 2):
        some = shared[2 * few :]
        np.minimum(some, table[few] + table[few : size - few], out=some)
    return shared


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
        ends = _most_held(times.first, both) + _most_held(times.last, both)
        held = ends + (ranks - 2) * _most_held(times.inner, both)
        return float(both[int(np.argmax(held >= times.blocks))])
    blocks: IntArray = np.arange(times.blocks + 1)
    begun = _at_least(starts, _most_held(times.first, starts) + (ranks - 1) * _most_held(times.inner, starts), blocks)
    ended = _at_least(stops, _most_held(times.last, stops) + (ranks - 1) * _most_held(times.inner, stops), blocks)
    between = _spread_s(times.inner, -(-blocks // ranks), chunks - 2)
    behind = (ended + between[_left(times.blocks)]).min(axis=1)
    return float((begun + behind[::-1]).min())


def least_ranks(times: ChunkTimes, ranks: int, *, together: bool) -> float:
    """Least time of the busiest rank, all its chunks taken as one; `together` where one rank holds both ends."""
    if not together:
        return least_turns(times, ranks, 1)
    limits = _ascending(times.inner, times.only)
    limits = limits[limits >= times.only[0]]
    held = _most_held(times.only, limits) + (ranks - 1) * _most_held(times.inner, limits)
    return float(limits[int(np.argmax(held >= times.blocks))])


def _ascending(one: FloatArray, other: FloatArray) -> FloatArray:
    """Both in one row; what is there twice changes nothing."""
    both: FloatArray = np.concatenate([one, other])
    both.sort()
    return both


def _most_held(times: FloatArray, limits: FloatArray) -> IntArray:
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
