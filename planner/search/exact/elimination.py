"""Min-plus algebra of repeated blocks, and what is said when a graph is too wide for exact elimination."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.errors import MeshwrightError

Table = NDArray[np.float64]


class TooWideError(MeshwrightError):
    """A table would outgrow memory or time: the graph is too densely connected for exact elimination."""


@dataclass(frozen=True, slots=True)
class Power:
    """A min-plus matrix power by squaring, the product of `left` and `right` but for the base."""

    table: Table
    count: int
    left: Power | None = None
    right: Power | None = None

    def path(self, group: int, start: int, end: int) -> list[int]:
        """States visited on the best way from `start` to `end`, both included; ties go to the lowest."""
        if self.left is None or self.right is None:
            return [start, end]
        middle = int((self.left.table[group, start] + self.right.table[group, :, end]).argmin())
        return self.left.path(group, start, middle)[:-1] + self.right.path(group, middle, end)


def min_plus_power(table: Table, count: int) -> Power:
    """Compute ``F ⊗ … ⊗ F`` (`count` times) where ``(A ⊗ B)[i, j] = min_k A[i, k] + B[k, j]``.

    Parameters
    ----------
    table : array, shape (groups, states, states)
    count : int
        At least 1; costs ``O(log count)`` products.
    """
    base = Power(table, 1)
    result: Power | None = None
    square = base
    while count:
        if count & 1:
            result = square if result is None else _multiply(result, square)
        count >>= 1
        if count:
            square = _multiply(square, square)
    return base if result is None else result


def _multiply(left: Power, right: Power) -> Power:
    return Power(min_plus(left.table, right.table), left.count + right.count, left, right)


def min_plus(left: Table, right: Table) -> Table:
    """Min-plus products of matrices, ``(groups, n, k)`` with ``(groups, k, m)``."""
    table = np.empty((left.shape[0], left.shape[1], right.shape[2]))
    for group in range(len(table)):
        transposed = np.ascontiguousarray(right[group].T)
        for row in range(left.shape[1]):
            np.minimum.reduce(transposed + left[group, row], axis=1, out=table[group, row])
    return table
