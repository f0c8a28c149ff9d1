"""How many equal blocks a pipeline rank can hold in given time and memory, all their ways to run them considered.

For a price of a byte that a block keeps from forward to backward, min-plus powers of the block's cheapest ways between
boundary states give the exact least sum of time and priced bytes of k blocks in a row. Every price then bounds the time
of a rank's blocks from below, because its memory is limited (Lagrange); the largest of these bounds counts.
"""

from __future__ import annotations

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
)
from planner.search.stages.segments import PartitionTask

PRICES = np.concatenate([[0.0], np.geomspace(0.03, 100.0, 12)])
"""Prices of all bytes that the greediest way of a block keeps, in least times of a block."""
_ROUNDING = 1e-9


def least_busiest(task: PartitionTask) -> float:
    """Bound on the time of the busiest rank, the sum of its chunks, that ranks need to hold all of the equal blocks.

    Infinite where the memory of all ranks does not suffice. Blocks of the most frequent kind may lie anywhere; the
    first and the last unit take their least time and memory of their ranks. What is left of the synchronisation is at
    least what messages take longer than the passes that hide them.
    """
    most = int(np.argmax(task.counts))
    block, count = task.kinds[most], task.counts[most]
    highest = min(count, 2 * -(-count // task.ranks) + 2)
    columns = [(STEADY,), (STEADY, BACKLOG)]
    ends = [_ends(task, most, *which) for which in columns]
    ends_bytes = ends[0][1]
    room = task.limit_bytes - block.values[:, TRANSIENT].min() - ends_bytes
    scale = float(block.values[:, ACTIVATION].max()) or 1.0
    prices = PRICES * float(block.values[:, STEADY].min()) / scale
    flights = _by_rank(task)
    different, place = np.unique(np.column_stack([flights, room]), axis=0, return_inverse=True)
    times = np.zeros((task.ranks, highest + 1))
    for (ends_s, _), which in zip(ends, columns, strict=True):
        table = _table(block, highest, prices, block.values[:, which].sum(axis=1))
        rows = np.array([_rank_times(block, table, prices, row[:-1], row[-1]) for row in different])
        times = np.maximum(times, rows[place.reshape(-1)] + ends_s[:, None])
    return _least(times, count, highest)


def _least(times: FloatArray, count: int, highest: int) -> float:
    """Least time in which all ranks together hold `count` blocks; `times` (ranks, blocks + 1) ascend."""
    limits = np.unique(times[np.isfinite(times)])

    def held(limit: float) -> int:
        each = (times <= limit * (1 + _ROUNDING)).sum(axis=1) - 1
        # Nothing is known of ranks that hold more than was tabled.
        return int(np.where(each >= highest, count, np.maximum(each, 0)).sum())

    if not len(limits) or held(float(limits[-1])) < count:
        return np.inf
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if held(float(limits[middle])) >= count else (middle + 1, high)
    return float(limits[low])


def _by_rank(task: PartitionTask) -> FloatArray:
    """(ranks, chunks) micro-batches in flight of each rank's chunks, most first."""
    order = np.lexsort((-task.in_flight, task.rank_of))
    return task.in_flight[order].reshape(task.ranks, task.chunks)


def _ends(task: PartitionTask, most: int, *columns: int) -> tuple[FloatArray, FloatArray]:
    """(ranks,) least seconds and bytes of the network's first and last unit where they are not of the kind `most`."""
    seconds, held = np.zeros(task.ranks), np.zeros(task.ranks)
    for kind, chunk in {0: 0, len(task.kinds) - 1: -1}.items():
        if kind != most:
            values, rank = task.kinds[kind].values, task.rank_of[chunk]
            seconds[rank] += values[:, columns].sum(axis=1).min()
            held[rank] += (task.in_flight[chunk] * values[:, ACTIVATION] + values[:, RESIDENT]).min()
    return seconds, held


def _rank_times(
    block: Fragments, table: FloatArray, prices: FloatArray, flights: FloatArray, room: float
) -> FloatArray:
    """(blocks + 1,) least time of so many blocks on a rank whose chunks have `flights` micro-batches in flight."""
    resident = block.values[:, RESIDENT].min()
    free = room - np.arange(table.shape[1]) * resident
    kept = _shared([flight * table[-1:] for flight in flights.tolist()])[0]
    per_byte = prices[1:] / max(float(flights.mean()), _ROUNDING)
    parts = [_priced(table[:-1], prices, per_byte * flight) for flight in flights.tolist()]
    bounds = _shared(parts) - per_byte[:, None] * free
    least = np.maximum(table[0], bounds.max(axis=0))
    least = np.where(kept <= free * (1 + _ROUNDING), least, np.inf)
    if np.any(table[0, 1:] < table[0, :-1]):
        # Blocks that hide messages of others may leave their rank less to do than fewer of them.
        times: FloatArray = np.minimum.accumulate(least[::-1])[::-1]
    else:
        times = np.maximum.accumulate(least)
    return times


def _table(block: Fragments, highest: int, prices: FloatArray, seconds: FloatArray) -> FloatArray:
    """(prices + 1, highest + 1) least `seconds` and priced bytes of so many blocks in a row; last, bytes alone."""
    states, inverse = np.unique(np.concatenate([block.entry, block.exit]), return_inverse=True)
    entry, leave = inverse.reshape(2, -1)
    values = seconds + prices[:, None] * block.values[:, ACTIVATION]
    values = np.vstack([values, block.values[:, ACTIVATION]])
    width = len(states)
    pairs = np.full((len(values), width * width), np.inf)
    for way, key in enumerate((entry * width + leave).tolist()):
        np.minimum(pairs[:, key], values[:, way], out=pairs[:, key])
    step = pairs.reshape(len(values), width, width)
    row: FloatArray = np.zeros((len(values), width))
    found = [row.min(axis=1)]
    for _ in range(highest):
        row = (row[:, :, None] + step).min(axis=1)
        found.append(row.min(axis=1))
    return np.stack(found, axis=1)


def _priced(table: FloatArray, prices: FloatArray, wanted: FloatArray) -> FloatArray:
    """(wanted, highest + 1) at prices in between: the least sum is concave in the price, so that chords bound it."""
    place = np.clip(np.searchsorted(prices, wanted), 1, len(prices) - 1)
    share = np.clip((wanted - prices[place - 1]) / (prices[place] - prices[place - 1]), 0.0, 1.0)[:, None]
    known = np.where(np.isfinite(table), table, 0.0)
    between = (1 - share) * known[place - 1] + share * known[place]
    # Blocks that cannot follow one another cannot at any price.
    return np.where(np.isfinite(table[:1]), between, np.inf)


def _shared(parts: list[FloatArray]) -> FloatArray:
    """(prices, highest + 1) least sums over all ways to share so many blocks out over the parts."""
    total = parts[0]
    highest = total.shape[1] - 1
    apart = np.arange(highest + 1)[:, None] - np.arange(highest + 1)[None, :]
    outside: NDArray[np.bool_] = apart < 0
    for part in parts[1:]:
        moved = np.where(outside, np.inf, part[:, np.maximum(apart, 0)])
        total = (total[:, None, :] + moved).min(axis=2)
    return total
