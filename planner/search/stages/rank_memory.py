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
    seconds = np.stack([values[:, STEADY], values[:, [STEADY, BACKLOG]].sum(axis=1)])
    tables, kept = _tables(block, highest, prices, seconds)
    for _ in range((task.chunks - 1).bit_length()):
        tables, kept = _shared(tables), _shared(kept)
    fits = flight[:, None] * kept <= free * (1 + _ROUNDING)
    times = np.zeros((task.ranks, highest + 1))
    for table, columns in zip(tables, ((STEADY,), (STEADY, BACKLOG)), strict=True):
        least = _rank_times(table, prices, flight, free, fits)
        times = np.maximum(times, least + _ends_s(task, most, *columns)[:, None])
    return _least(times, count, highest)


def _held(fits: NDArray[np.bool_], count: int, highest: int) -> int:
    """Blocks that all ranks together hold at most; `fits` (ranks, blocks + 1) says how many one rank may hold."""
    each = fits.shape[1] - 1 - np.argmax(fits[:, ::-1], axis=1)
    each = np.where(fits.any(axis=1), each, 0)
    # Nothing is known of ranks that hold more than was tabled.
    return int(np.where(each >= highest, count, each).sum())


def _least(times: FloatArray, count: int, highest: int) -> float:
    """Least time in which all ranks together hold `count` blocks; `times` (ranks, blocks + 1) ascend."""
    limits = np.unique(times[np.isfinite(times)])

    def held(limit: float) -> int:
        return _held(times <= limit * (1 + _ROUNDING), count, highest)

    if not len(limits) or held(float(limits[-1])) < count:
        return np.inf
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if held(float(limits[middle])) >= count else (middle + 1, high)
    return float(limits[low])


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


def _tables(block: Fragments, highest: int, prices: FloatArray, seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least sums of up to `highest` blocks in a row: seconds and priced bytes, and bytes alone.

    Parameters
    ----------
    seconds : (columns, ways)

    Returns
    -------
    (columns, prices, highest + 1) and (highest + 1,)
    """
    states, inverse = np.unique(np.concatenate([block.entry, block.exit]), return_inverse=True)
    entry, leave = inverse.reshape(2, -1)
    held = block.values[:, ACTIVATION]
    values = np.concatenate([(seconds[:, None, :] + prices[:, None] * held).reshape(-1, len(held)), held[None]])
    width = len(states)
    order = np.argsort(entry * width + leave, kind="stable")
    keys, begins = np.unique((entry * width + leave)[order], return_index=True)
    pairs = np.full((len(values), width * width), np.inf)
    pairs[:, keys] = np.minimum.reduceat(values[:, order], begins, axis=1)
    power = pairs.reshape(len(values), width, width)
    rows: FloatArray = np.zeros((len(values), 1, width))
    while rows.shape[1] <= highest:
        # All rows with so many blocks more, as many as there are.
        more = (rows[:, : highest + 1 - rows.shape[1], :, None] + power[:, None]).min(axis=2)
        rows = np.concatenate([rows, more], axis=1)
        power = (power[:, :, :, None] + power[:, None]).min(axis=2)
    sums = rows.min(axis=2)
    return sums[:-1].reshape(len(seconds), len(prices), -1), sums[-1]


def _shared(table: FloatArray) -> FloatArray:
    """(…, blocks + 1) least sums of two rows of blocks that hold so many together."""
    size = table.shape[-1]
    if np.isfinite(table).all() and (table[..., 2:] - table[..., 1:-1] >= table[..., 1:-1] - table[..., :-2]).all():
        # What grows ever faster is least in halves.
        half = np.arange(size) // 2
        return table[..., half] + table[..., np.arange(size) - half]
    shared: FloatArray = table + table[..., :1]
    # Either row may be the one that holds at most half.
    for few in range(1, (size + 1) // 2):
        some = shared[..., 2 * few :]
        np.minimum(some, table[..., few : few + 1] + table[..., few : size - few], out=some)
    return shared
