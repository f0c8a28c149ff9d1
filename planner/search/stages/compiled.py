"""The inner loop of cuts of long chains, compiled: loading it takes longer than cuts of short chains do."""

from __future__ import annotations

from numba import njit

from planner.search.stages.fragments import FloatArray, IntArray


@njit(cache=True)
def least_sums(before: FloatArray, costs: FloatArray, source: IntArray, group: IntArray, out: FloatArray) -> None:
    """Write ``out[place] = min over m of before[source[m, place]] + costs[group[m, place]]``, column by column.

    Segments that begin at no place, the last row of `before`, are passed over.

    Parameters
    ----------
    before : (places before + 1, columns)
    costs : (groups, columns)
    source, group : (most, places), as in `planner.search.stages.segments.Window`
    out : (places, columns)
    """
    nowhere, columns, infinite = before.shape[0] - 1, before.shape[1], float("inf")
    for place in range(out.shape[0]):
        least = out[place]
        least[:] = infinite
        for segment in range(source.shape[0]):
            if source[segment, place] != nowhere:
                begin, cost = before[source[segment, place]], costs[group[segment, place]]
                for column in range(columns):
                    value = begin[column] + cost[column]
                    least[column] = value if value < least[column] else least[column]
