"""Every cut of a short chain, listed: what several chunks of one rank take together is then known for each of them."""

from __future__ import annotations

from functools import lru_cache
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
    begins = [np.zeros(1, dtype=np.int64)]
    for chunk in range(1, pieces):
        # Each chunk behind this one has a unit at least.
        more = units - pieces + chunk - begins[-1]
        cut = np.repeat(np.arange(len(more)), more)
        nth = np.arange(len(cut)) - (np.cumsum(more) - more).take(cut)
        begins = [*(begun.take(cut) for begun in begins), begins[-1].take(cut) + 1 + nth]
    first = np.array(begins)
    last = np.full_like(first, units - 1)
    np.subtract(first[1:], 1, out=last[:-1])
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
    places, of_ranks = _places(len(busy), len(rank_of)), rank_of.tolist()
    ranks, count = max(of_ranks) + 1, places.shape[1]
    busy, fill = busy.ravel(), fill.ravel()
    spent: FloatArray = np.zeros(count)
    rows = np.zeros((len(of_ranks) // ranks if in_turns else ranks, count))
    for chunk, (place, rank) in enumerate(zip(places, of_ranks, strict=True)):
        spent += fill.take(place)
        if in_turns:
            row = rows[chunk // ranks]
            np.maximum(row, busy.take(place), out=row)
        else:
            rows[rank] += busy.take(place)
    seconds: FloatArray = (rows.sum(axis=0) if in_turns else rows.max(axis=0)) + spent
    return seconds


def least_listed(busy: FloatArray, fill: FloatArray, rank_of: IntArray, in_turns: bool) -> float:
    """Least seconds of all cuts (`listed_s`)."""
    return float(listed_s(busy, fill, rank_of, in_turns).min())
