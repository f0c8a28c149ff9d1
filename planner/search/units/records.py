"""Records of what is known about the units of a stage: labels, boundary states, and the tables that they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.sharding.placement import Placements

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

RECOMPUTE = ("none", "selective", "full")
"""Modes of recomputation in the order of their codes."""


@dataclass(frozen=True, eq=False, kw_only=True)
class UnitLabels:
    """The labels of one unit, arrays of shape (labels,): per device and micro-batch unless said otherwise.

    ``forward_s`` and ``backward_s`` are computation and the collectives inside the stage mesh, of which
    ``forward_communication_s`` and ``backward_communication_s`` are communication. Of the backward pass ``again_s``
    computes again and ``late_s`` may wait until the gradient of the input is sent back. ``activation_bytes`` are kept
    from forward to backward, ``transient_bytes`` stand only while the unit goes backward; what is put off
    reads ``waiting_bytes``, kept or made until the gradient of the input is sent back. ``forward_launches`` and
    ``backward_launches`` count the kernels that the host launches in both passes, ``halved`` those of them that are two
    where the gradients of parameters are put off.

    ``forward_sums_s`` and ``backward_sums_s`` of the communication are sums over the batch, on the data axis, of which
    there are ``forward_sums`` and ``backward_sums``.

    ``step_s`` are messages once a step, beside data parallelism: ``gather_s`` of them gather parameters, the others sum
    gradients. In ``cut_s`` gradients that are whole on an axis which shards their parameter are cut, before they are
    scattered over the data axis, and in ``cut_last_s`` those of one dim, afterwards. ``parameter_elements`` are local
    trained elements as stored, without those that the expert axis shards, ``expert_elements``; ``frozen_elements`` are
    those of parameters without a gradient. ``gathered_elements``
    are those of gathered parameters as they are read; by ``unsummed_elements`` gradients are larger before they are
    summed than stored parameters. ``recompute`` are codes of `RECOMPUTE`. ``entry`` and ``exit`` are numbers of
    boundary states, −1 at the ends of the network. ``assignments`` give the state of each of the unit's variables in
    ``problem``.
    """

    forward_s: FloatArray
    backward_s: FloatArray
    forward_communication_s: FloatArray
    backward_communication_s: FloatArray
    activation_bytes: FloatArray
    transient_bytes: FloatArray
    waiting_bytes: FloatArray
    again_s: FloatArray
    late_s: FloatArray
    forward_launches: FloatArray
    backward_launches: FloatArray
    halved: FloatArray
    forward_sums_s: FloatArray
    backward_sums_s: FloatArray
    forward_sums: FloatArray
    backward_sums: FloatArray
    step_s: FloatArray
    gather_s: FloatArray
    cut_s: FloatArray
    cut_last_s: FloatArray
    parameter_elements: FloatArray
    expert_elements: FloatArray
    frozen_elements: FloatArray
    gathered_elements: FloatArray
    unsummed_elements: FloatArray
    recompute: IntArray
    entry: IntArray
    exit: IntArray
    assignments: Sequence[Mapping[int, int]]

    def __len__(self) -> int:
        return len(self.forward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWeights:
    """What a second of each kind, a byte and an element cost; all non-negative.

    ``step`` is that of messages and of copies once a step.
    """

    forward: float = 1.0
    backward: float = 1.0
    step: float = 0.0
    activation_byte: float = 0.0
    parameter_element: float = 0.0
    expert_element: float = 0.0
    frozen_element: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryStates:
    """Placements in which a boundary tensor and its gradient may cross, and the bytes one rank then sends.

    ``forward`` and ``backward`` hold the placements of each state; bytes are arrays of shape (states,).
    """

    forward: tuple[Placements, ...]
    backward: tuple[Placements, ...]
    forward_bytes: FloatArray
    backward_bytes: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """The least weighted sum over a whole network, and the label that each unrolled unit would take.

    ``entries`` and ``exits`` are the boundary states of each unrolled unit, ``assignments`` its strategy.
    """

    value: float
    entries: tuple[int, ...]
    exits: tuple[int, ...]
    recompute: tuple[int, ...]
    assignments: tuple[Mapping[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedParameter:
    """A parameter that several units read; one stage that has all of them stores it once.

    ``elements`` are those that one rank stores, ``whole_elements`` those that units read; ``trained`` says whether it
    has a gradient.
    """

    node: int
    units: tuple[int, ...]
    elements: float
    whole_elements: float
    trained: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Least:
    """Least seconds of both passes, and the best states of tied parameters.

    ``between_s`` are those of each unit of the folded chain between its boundary states, (entries, exits) each;
    ``whole_s`` are those of the whole network, units that meet in the same state.
    """

    between_s: tuple[FloatArray, ...]
    whole_s: float
    shared: Mapping[int, int]


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
