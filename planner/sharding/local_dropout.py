r"""One rank's part of dropout: an element is kept by its place in the whole tensor, whoever holds it.

The mask is a function of seed, operator, step and the element's number, counted over all micro-batches of the step:
a counter-based generator, in the manner of Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011,
with the finaliser of SplitMix64 (Steele et al., OOPSLA 2014) as the mixing function. Sharding, recomputation and the
backward pass, which draws it again, all see the same mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from planner.graph.operator_graph import Node, OperatorGraph
from planner.sharding.local_call import LocalCall, LocalOperator, Moment, Parts, Peers
from planner.sharding.local_context import own_part
from planner.sharding.sequence import SequenceCut

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_DIGITS = 53


def dropout(call: LocalCall, number: int, cut: SequenceCut | None) -> LocalOperator:
    """Zero a share of the elements and scale the others up; `number` tells operators apart.

    `cut` says how a context axis shares the sequence.
    """
    probability = float(call.arguments[1])
    whole = call.outputs[0].shape
    places: dict[torch.device, Tensor] = {}

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        tensor = tensors[0]
        if tensor.device not in places:
            places[tensor.device] = _places(call, cut).to(tensor.device)
        return (dropped(tensor, probability, number, places[tensor.device], prod(whole), peers.moment),)

    return run


def operator_number(graph: OperatorGraph, node: Node) -> int:
    """Number of a dropout and of its gradient, from the name of the forward operator."""
    return crc32((node if node.forward is None else graph.nodes[node.forward]).name.encode())


def dropped(tensor: Tensor, probability: float, number: int, places: Tensor, elements: int, moment: Moment) -> Tensor:
    """Apply the mask of one micro-batch.

    Parameters
    ----------
    places : Tensor
        Number of each element of `tensor` in the whole tensor of the micro-batch, which has `elements`.
    """
    if probability >= 1.0:
        return torch.zeros_like(tensor)
    key = _mixed(_mixed(moment.seed * _GAMMA + number) + moment.step)
    dropped_out = _uniform(places + moment.micro_batch * elements, key) < probability
    return (tensor / (1.0 - probability)).masked_fill(dropped_out, 0.0)


def _places(call: LocalCall, cut: SequenceCut | None) -> Tensor:
    """Number, in the whole tensor, of each element that this rank holds."""
    shape = call.outputs[0].shape
    found = torch.zeros((), dtype=torch.int64)
    stride = prod(shape)
    for dim, extent in enumerate(shape):
        stride //= max(extent, 1)
        found = found.unsqueeze(-1) + _own_indices(call, cut, dim, extent) * stride
    return found


def _own_indices(call: LocalCall, cut: SequenceCut | None, dim: int, extent: int) -> Tensor:
    """Indices of a dim that this rank holds; of axes that cut one dim the outer cuts first."""
    indices = torch.arange(extent)
    axes = zip(call.output_placements(0), call.sizes, call.coordinates, strict=True)
    for axis, (placement, size, coordinate) in enumerate(axes):
        if placement == dim:
            if cut is not None and axis == cut.axis:
                indices = own_part(indices, 0, cut, coordinate, size)
            else:
                indices = indices.chunk(size)[coordinate]
    return indices


def _mixed(value: int) -> int:
    """SplitMix64's finaliser of the next state."""
    value = (value + _GAMMA) % _WORD
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ value >> shift) * factor % _WORD
    return value


def _uniform(places: Tensor, key: int) -> Tensor:
    """Numbers from 0 to 1 in float64, by the same finaliser on 64-bit words."""
    word = places * _signed(_GAMMA) + _signed(key)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        word = (word ^ _shifted(word, shift)) * _signed(factor)
    return _shifted(word, 64 - _DIGITS).double() * 2.0**-_DIGITS


def _signed(value: int) -> int:
    value %= _WORD
    return value - _WORD if value >= _WORD // 2 else value


def _shifted(word: Tensor, by: int) -> Tensor:
    """Shift right without the sign."""
    return word >> by & (1 << 64 - by) - 1
