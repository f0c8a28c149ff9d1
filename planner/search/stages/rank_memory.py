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
from planner.search.stages.task import PartitionTask

PRICES = np.concatenate([[0.0], np.geomspace(0.03, 100.0, 12)])
"""Prices of all bytes that the greediest way of a block keeps, in least times of a block."""
_ROUNDING = 1e-9
_EVEN = 1e-15
"""Part of a sum by which its steps differ where each is the same, by rounding."""


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
    order = np.argsort(entry * width + leave, kind="stable")
    keys, begins = np.unique((entry * width + leave)[order], return_index=True)
    pairs = np.full((width * width, len(values)), np.inf)
    pairs[keys] = np.minimum.reduceat(values.take(order, axis=1), begins, axis=1).T
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
    steps = np.diff(table, axis=0) if np.isfinite(table[-1]).all() else None
    if steps is not None and (steps[1:] >= steps[:-1] - _EVEN * table[-1]).all():
        # What grows ever faster is least in halves.
        half = np.arange(size) // 2
        halves: FloatArray = table[half] + table[np.arange(size) - half]
        return halves
    shared: FloatArray = table + table[:1]
    # Either row may be the one that holds at most half.
    for few in range(1, (size + 1) // 2):
        some = shared[2 * few :]
        np.minimum(some, table[few] + table[few : size - few], out=some)
    return shared
