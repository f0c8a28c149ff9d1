"""The cost parts of one unit as tables over its variables: seconds, bytes and elements by kind and recompute mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.units.records import UnitWeights

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Scope = tuple[int, ...]


class TablePart(IntEnum):
    """What the tables count; of recomputation and memory there is one part for each mode of `MODES`."""

    FORWARD = 0
    BACKWARD = 1
    FORWARD_COMMUNICATION = 2
    BACKWARD_COMMUNICATION = 3
    STEP = 4
    ELEMENTS = 5
    EXPERT_ELEMENTS = 6
    AGAIN = 7
    AGAIN_COMMUNICATION = 10
    KEPT = 13
    TRANSIENT = 16
    GATHER = 19
    GATHERED = 20
    UNSUMMED = 21
    CUT = 22
    CUT_LAST = 23
    LATE = 24
    FROZEN = 25
    FORWARD_CALLS = 26
    BACKWARD_CALLS = 27
    AGAIN_CALLS = 28


PARTS = 31
AT_ONCE = 32
"""Assignments whose parts are added up at once: the numbers of many more leave the caches."""


def rows_of(weights: UnitWeights, modes: Sequence[int]) -> FloatArray:
    """Weights of all parts, a row for each recompute mode of `modes`: shape (modes, PARTS)."""
    rows = np.zeros((len(modes), PARTS))
    for row, mode in zip(rows, modes, strict=True):
        row[TablePart.FORWARD] = weights.forward
        row[[TablePart.BACKWARD, TablePart.AGAIN + mode]] = weights.backward
        row[[TablePart.STEP, TablePart.CUT, TablePart.CUT_LAST]] = weights.step
        row[TablePart.ELEMENTS] = weights.parameter_element
        row[TablePart.EXPERT_ELEMENTS] = weights.expert_element
        row[TablePart.FROZEN] = weights.frozen_element
        row[TablePart.KEPT + mode] = weights.activation_byte
    return rows


@dataclass(frozen=True, eq=False)
class TableLayout:
    """Where the tables of one unit stand, one behind the other, on meshes of one shape.

    Table s has a dim for each variable of ``scopes[s]``, one or two, and begins at ``starts[s]``; ``forbidden`` are
    entries that are not to be taken. ``entries`` are their places among those of a family.
    """

    sizes: Mapping[int, int]
    scopes: tuple[Scope, ...]
    starts: tuple[int, ...]
    entries: IntArray
    forbidden: NDArray[np.bool_]

    @cached_property
    def never(self) -> IntArray:
        """Numbers of the forbidden entries."""
        return np.flatnonzero(self.forbidden)

    @cached_property
    def _ends(self) -> tuple[IntArray, IntArray, IntArray, IntArray]:
        """By table: rows of its first and last variable among those of `sizes`, states of the last, and its start."""
        row = {v: place for place, v in enumerate(self.sizes)}
        firsts, lasts = (np.array([row[scope[end]] for scope in self.scopes]) for end in (0, -1))
        strides = np.array([self.sizes[scope[-1]] if len(scope) == 2 else 0 for scope in self.scopes])
        return firsts, lasts, strides[:, None], np.array(self.starts)[:, None]

    def places(self, states: Mapping[int, IntArray]) -> IntArray:
        """Entry of each table in many assignments, shape (tables, n); each variable has an array of states (n,)."""
        firsts, lasts, strides, starts = self._ends
        chosen = np.array([states[v] for v in self.sizes])
        return np.asarray(chosen[firsts] * strides + chosen[lasts] + starts)


@dataclass(frozen=True, slots=True, eq=False)
class UnitFactors:
    """Tables of one unit; ``parts`` has shape (entries of all tables, PARTS)."""

    layout: TableLayout
    parts: FloatArray

    def weighted(self, weights: FloatArray) -> FloatArray:
        """Weighted sums of the entries, shape (entries, weightings); `weights` has shape (weightings, PARTS)."""
        total: FloatArray = self.parts @ weights.T
        total[self.layout.never] = np.inf
        return total

    def evaluate(self, states: Mapping[int, IntArray]) -> FloatArray:
        """Add up the parts of many assignments, shape (PARTS, n); each variable has an array of states (n,)."""
        places = self.layout.places(states)
        found = np.empty((PARTS, places.shape[1]))
        for first in range(0, places.shape[1], AT_ONCE):
            some = slice(first, first + AT_ONCE)
            found[:, some] = self.parts.take(places[:, some], axis=0).sum(axis=0).T
        return found
