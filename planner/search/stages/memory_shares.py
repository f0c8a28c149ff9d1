"""How chunks share the memory of their rank: some of its equal units run in a fast way, others in one that keeps less.

As few of them keep less as let the others be fast: first those with the most micro-batches in flight, of these the
first ones, so that turns in which ranks compute again come together. Which two ways are mixed, and whether the other
units are fast or keep least, is told by the turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from planner.search.stages.fragments import ACTIVATION, FILL, RESIDENT, STEADY, TRANSIENT, FloatArray, IntArray
from planner.search.stages.task import PartitionTask

_WAYS = 6
"""Most ways of the most frequent unit that are mixed."""
_LESS = 0.95
"""How much less than the one before each of them keeps."""


class Share(NamedTuple):
    """Bytes (chunks,) that may stand in each chunk, and those that may stand besides while a unit goes backward."""

    standing: FloatArray
    transient: float


def shares(task: PartitionTask, ends: Sequence[int]) -> Iterator[Share]:
    """What chunks may take where they have these ``ends``, mixtures whose turns take least first.

    Where units fit in no mixture, chunks share what there is in proportion to what they keep at least.
    """
    units = _Units(task, ends)
    ways = _usual(task.kinds[units.most].values)
    pairs = np.array(list(combinations(ways, 2)) or [(ways[0], ways[0])])
    mixtures = [_Mixtures(units, pairs, fastest) for fastest in (True, False)]
    turns_s, fits = (np.concatenate([getattr(m, name) for m in mixtures]) for name in ("turns_s", "fits"))
    for number in np.argsort(np.where(fits, turns_s, np.inf), kind="stable")[: int(fits.sum())].tolist():
        yield mixtures[number // len(pairs)].share(number % len(pairs))
    if not fits.any():
        least = [float(kind.values[:, TRANSIENT].min()) for kind in task.kinds]
        yield units.filled(units.of_chunks(units.values_of(fastest=False)[0]), max(least))


def _usual(block: FloatArray) -> list[FloatArray]:
    """Ways (values) of the most frequent unit: the fastest, some that keep less, and the one that keeps least."""
    order = np.lexsort((block[:, ACTIVATION], block[:, STEADY]))
    lowest = np.minimum.accumulate(block[order, ACTIVATION])
    front = order[np.concatenate(([True], lowest[1:] < _LESS * lowest[:-1]))][: _WAYS - 1].tolist()
    return [block[way] for way in dict.fromkeys([*front, int(order[block[order, ACTIVATION].argmin()])])]


class _Units:
    """All units in given chunks, of which those of the most frequent kind are mixed."""

    def __init__(self, task: PartitionTask, ends: Sequence[int]) -> None:
        self.task, self.most = task, int(np.argmax(task.counts))
        self.chunk: IntArray = np.repeat(np.arange(task.pieces), np.diff([0, *ends]))
        self.rank, self.flight = task.rank_of[self.chunk], task.in_flight[self.chunk]
        self.kind: IntArray = np.repeat(np.arange(len(task.kinds)), task.counts)
        self.mixed: IntArray = np.flatnonzero(self.kind == self.most)

    def values_of(self, *, fastest: bool) -> tuple[FloatArray, FloatArray, float]:
        """Bytes and seconds (units,) of each in its fastest way or in that which keeps least; transient bytes.

        The latter are those of the units that are not mixed.
        """
        kept, seconds, once = np.zeros(self.task.units), np.zeros(self.task.units), 0.0
        for number, ways in enumerate(self.task.kinds):
            inside, v = self.kind == number, ways.values
            needed = self.flight[inside, None] * v[:, ACTIVATION] + v[:, RESIDENT]
            busy = v[:, [FILL, STEADY]].sum(axis=1)
            picks = np.full(len(needed), busy.argmin()) if fastest else needed.argmin(axis=1)
            kept[inside], seconds[inside] = needed[np.arange(len(needed)), picks], busy[picks]
            if number != self.most:
                once = max(once, float(v[picks, TRANSIENT].max()))
        return kept, seconds, once

    def of_chunks(self, kept: FloatArray) -> FloatArray:
        """(chunks,) sums of bytes (units,)."""
        sums: FloatArray = np.bincount(self.chunk, kept, self.task.pieces).astype(np.float64)
        return sums

    def filled(self, standing: FloatArray, transient: float) -> Share:
        """Shares in proportion to bytes (chunks,) that fill every rank."""
        task = self.task
        whole = np.bincount(task.rank_of, standing, task.ranks)
        room = max(task.limit_bytes - transient, 0.0)
        shared: FloatArray = standing * (room / np.maximum(whole, 1e-30))[task.rank_of]
        return Share(shared, transient)


class _Mixtures:
    """Mixtures of pairs of ways (pairs, 2, 7) with the others in their fastest ways, or in those that keep least.

    Attributes
    ----------
    kept : (pairs, units) bytes
    turns_s : (pairs,) sum over turns of the longest chunk's time
    fits : (pairs,) whether all ranks have room
    """

    def __init__(self, units: _Units, pairs: FloatArray, fastest: bool) -> None:
        self.units, task, mixed = units, units.task, units.mixed
        kept, seconds, once = units.values_of(fastest=fastest)
        fast, slow = pairs.transpose(1, 0, 2)
        self.transient = np.maximum(pairs[:, :, TRANSIENT].max(axis=1), once)
        room = task.limit_bytes - self.transient[:, None]
        flight, rank = units.flight[mixed], units.rank[mixed]
        self.fast = units.values_of(fastest=True)[0]
        self.kept = np.tile(kept, (len(pairs), 1))
        self.kept[:, mixed] = flight * fast[:, [ACTIVATION]] + fast[:, [RESIDENT]]
        saved = self.kept[:, mixed] - flight * slow[:, [ACTIVATION]] - slow[:, [RESIDENT]]
        of_ranks = units.rank[:, None] == np.arange(task.ranks)
        order = np.lexsort((-flight, rank))
        before = np.cumsum(saved[:, order], axis=1) - saved[:, order]
        first = np.searchsorted(rank[order], rank[order])
        late = np.zeros_like(saved)
        late[:, order] = before - before[:, first] < (self.kept @ of_ranks - room)[:, rank[order]]
        self.kept[:, mixed] -= late * saved
        self.fits = np.all(self.kept @ of_ranks <= room, axis=1)
        busy = np.tile(seconds, (len(pairs), 1))
        fast_s, slow_s = (way[:, [FILL, STEADY]].sum(axis=1)[:, None] for way in (fast, slow))
        busy[:, mixed] = fast_s + late * (slow_s - fast_s)
        chunks = busy @ (units.chunk[:, None] == np.arange(task.pieces))
        self.turns_s = chunks.reshape(len(pairs), task.chunks, task.ranks).max(axis=2).sum(axis=1)

    def share(self, pair: int) -> Share:
        """What chunks may take, so that ranks are full: units of which least are in flight are fast first."""
        units, task = self.units, self.units.task
        standing, most = units.of_chunks(self.kept[pair]), units.of_chunks(self.fast)
        spare = task.limit_bytes - self.transient[pair] - np.bincount(task.rank_of, standing, task.ranks)
        for chunk in np.lexsort((-np.arange(task.pieces), task.in_flight)).tolist():
            rank = task.rank_of[chunk]
            given = min(float(spare[rank]), max(float(most[chunk] - standing[chunk]), 0.0))
            standing[chunk] += given
            spare[rank] -= given
        return units.filled(standing, float(self.transient[pair]))
