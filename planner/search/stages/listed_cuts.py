"""Every cut of a short chain, listed: what several chunks of one rank take together is then known for each of them."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, combinations
from math import comb

import numpy as np

from planner.search.stages.fragments import FloatArray, IntArray

MANY_CUTS = 40_000
"""Most cuts that are listed."""


def few_cuts(units: int, pieces: int) -> bool:
    """Whether all cuts of so many units into so many pieces may be listed."""
    return 1 < pieces <= units and comb(units - 1, pieces - 1) <= MANY_CUTS


@lru_cache(maxsize=32)
def listed_cuts(units: int, pieces: int) -> tuple[IntArray, IntArray]:
    """First and last unit of each chunk, (chunks, cuts) each, of every cut in lexical order."""
    count = comb(units - 1, pieces - 1)
    flat = chain.from_iterable(combinations(range(1, units), pieces - 1))
    inner = np.fromiter(flat, dtype=np.int64, count=count * (pieces - 1)).reshape(count, pieces - 1).T
    first = np.vstack([np.zeros((1, count), dtype=np.int64), inner])
    last = np.vstack([inner - 1, np.full((1, count), units - 1, dtype=np.int64)])
    return first, last


@lru_cache(maxsize=32)
def _places(units: int, pieces: int) -> IntArray:
    """(chunks, cuts) places of the chunks of every cut in a flat table of first and last units."""
    first, last = listed_cuts(units, pieces)
    return first * units + last


def listed_s(busy: FloatArray, fill: FloatArray, rank_of: IntArray, in_turns: bool) -> FloatArray:
    """(cuts,) seconds of every cut.

    Parameters
    ----------
    busy, fill : (units, units) both terms of the objective for a chunk from one unit to another
    rank_of : (chunks,) rank of each chunk
    in_turns : the longest chunk of each turn counts; else the busiest rank with all of its chunks
    """
    place = _places(len(busy), len(rank_of))
    chunks = busy.ravel()[place]
    ranks = int(rank_of.max()) + 1
    if in_turns:
        busiest = chunks.reshape(-1, ranks, chunks.shape[1]).max(axis=1).sum(axis=0)
    else:
        sums = np.zeros((ranks, chunks.shape[1]))
        for chunk, rank in enumerate(rank_of.tolist()):
            sums[rank] += chunks[chunk]
        busiest = sums.max(axis=0)
    seconds: FloatArray = busiest + fill.ravel()[place].sum(axis=0)
    return seconds


def least_listed(busy: FloatArray, fill: FloatArray, rank_of: IntArray, in_turns: bool) -> float:
    """Least seconds of all cuts (`listed_s`)."""
    return float(listed_s(busy, fill, rank_of, in_turns).min())
