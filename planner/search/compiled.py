"""The inner loop of cuts of long chains, compiled: loading it takes longer than cuts of short chains do."""

from __future__ import annotations

from numba import njit

from planner.search.exact.blocks import Table
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


COLUMNS = 512
"""Columns that are worked on at a time, so that their rows stay in the first cache."""


@njit(cache=True)
def min_plus_into(left: Table, right: Table, out: Table) -> None:
    """Write ``out[i, j] = min_k left[i, k] + right[k, j]``, four k at a time so that sums stay in registers."""
    count = left.shape[1]
    infinite = float("inf")
    for start in range(0, out.shape[1], COLUMNS):
        end = min(start + COLUMNS, out.shape[1])
        for i in range(left.shape[0]):
            row = out[i, start:end]
            row[:] = infinite
            for k in range(0, count - 3, 4):
                a, b, c, d = left[i, k], left[i, k + 1], left[i, k + 2], left[i, k + 3]
                if min(a, b, c, d) < infinite:
                    one, two = right[k, start:end], right[k + 1, start:end]
                    three, four = right[k + 2, start:end], right[k + 3, start:end]
                    for j in range(end - start):
                        x = a + one[j]
                        y = b + two[j]
                        z = c + three[j]
                        w = d + four[j]
                        x = x if x < y else y
                        z = z if z < w else w
                        x = x if x < z else z
                        row[j] = x if x < row[j] else row[j]
            for k in range(count // 4 * 4, count):
                one = right[k, start:end]
                for j in range(end - start):
                    x = left[i, k] + one[j]
                    row[j] = x if x < row[j] else row[j]
