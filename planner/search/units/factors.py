"""The cost parts of one unit as tables over its variables: seconds, bytes and elements by kind and recompute mode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from planner.search.units.records import Weights

FloatArray = NDArray[np.float64]
Scope = tuple[int, ...]


class Part(IntEnum):
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


PARTS = 26


def rows_of(weights: Weights, modes: Sequence[int]) -> FloatArray:
    """Weights of all parts, a row for each recompute mode of `modes`: shape (modes, PARTS)."""
    rows = np.zeros((len(modes), PARTS))
    for row, mode in zip(rows, modes, strict=True):
        row[Part.FORWARD] = weights.forward
        row[[Part.BACKWARD, Part.AGAIN + mode]] = weights.backward
        row[[Part.STEP, Part.CUT, Part.CUT_LAST]] = weights.step
        row[Part.ELEMENTS] = weights.parameter_element
        row[Part.EXPERT_ELEMENTS] = weights.expert_element
        row[Part.FROZEN] = weights.frozen_element
        row[Part.KEPT + mode] = weights.activation_byte
    return rows


@dataclass(frozen=True, eq=False)
class UnitFactors:
    """Tables of one unit, one behind the other.

    ``parts`` has shape (PARTS, entries of all tables) and ``forbidden`` (entries of all tables,). Table s has a dim
    for each variable of ``scopes[s]`` and begins at ``starts[s]``.
    """

    sizes: Mapping[int, int]
    scopes: tuple[Scope, ...]
    starts: tuple[int, ...]
    parts: FloatArray
    forbidden: NDArray[np.bool_]

    def weighted(self, weights: FloatArray) -> list[FloatArray]:
        """Each table's weighted sums, shapes (entries, weightings); `weights` has shape (weightings, PARTS)."""
        total = np.ascontiguousarray((weights @ self.parts).T)
        total[self.forbidden] = np.inf
        ends = (*self.starts[1:], len(total))
        return [total[start:end] for start, end in zip(self.starts, ends, strict=True)]

    def evaluate(self, states: Mapping[int, NDArray[np.int64]]) -> FloatArray:
        """Add up the parts of many assignments; each variable has an array of states of shape (n,).

        Returns an array of shape (PARTS, n).
        """
        row = {v: place for place, v in enumerate(states)}
        chosen = np.array([*states.values()])
        firsts, lasts = ([row[scope[end]] for scope in self.scopes] for end in (0, -1))
        # A scope has one variable or two.
        strides = np.array([self.sizes[scope[-1]] if len(scope) == 2 else 0 for scope in self.scopes])
        places = chosen[firsts] * strides[:, None] + chosen[lasts] + np.array(self.starts)[:, None]
        return np.asarray(np.take(self.parts, places, axis=1).sum(axis=1))
