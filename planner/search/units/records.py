"""Records of what is known about the units of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
