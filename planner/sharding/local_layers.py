"""Operators whose local part is not the operator itself on local tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.sharding.local_call import LocalCall, LocalOperator, Peers, Slot, elements, filled, invoke, operator
from planner.sharding.placement import REPLICATE
from simulator.calibration import convolutions, normalizations

CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
_MASK = 10
"""Argument that says which of its gradients are computed."""


def reshaped(call: LocalCall) -> LocalOperator:
    """Views of any kind: to the local shape; a local piece need not be contiguous, so it may copy."""
    shape = call.output_shape()
    return lambda tensors, peers: (tensors[0].reshape(shape),)


def expanded(call: LocalCall) -> LocalOperator:
    """Expand to the local shape."""
    shape = call.output_shape()
    return lambda tensors, peers: (tensors[0].expand(shape),)


def resized(position: int) -> Callable[[LocalCall], LocalOperator]:
    """Operators that are told the shape of their output at `position`."""
    return lambda call: invoke(call, call.with_argument(position, list(call.output_shape())))


def strided(call: LocalCall) -> LocalOperator:
    """A new tensor of the local shape without gaps, its dims in the order in which the whole one has them in memory."""
    shape, order = call.output_shape(), call.arguments[2]
    strides, step = [1] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (order[dim], -dim)):
        strides[dim], step = step, step * shape[dim]
    return invoke(call, (*call.arguments[:1], list(shape), strides))


def mean(call: LocalCall) -> LocalOperator:
    """Average; over a sharded dim each rank sums and divides by the global number of elements."""
    shape = call.inputs[0].shape
    given = call.arguments[1] if len(call.arguments) > 1 else call.keywords.get("dim")
    given = [given] if isinstance(given, int) else given
    dims = [d % len(shape) for d in given] if given else list(range(len(shape)))
    if not any(placement in dims for placement in call.input_placements(0)):
        return invoke(call)
    keeps = len(call.outputs[0].shape) == len(shape)
    dtype, count = call.keywords.get("dtype"), elements(shape, dims)
    return lambda tensors, peers: (tensors[0].sum(dims, keepdim=keeps, dtype=dtype) / count,)


def biased_product(call: LocalCall) -> LocalOperator:
    """Product plus bias, which only one rank adds where the result is partial."""
    keywords = dict(call.keywords) if call.adds_bias(0) else {**call.keywords, "beta": 0}
    run = filled(operator(call.op), call.arguments, keywords)
    return lambda tensors, peers: (run(tensors),)


def convolution(call: LocalCall) -> LocalOperator:
    """Convolution with this rank's groups, and a bias as in `biased_product`."""
    arguments = call.with_argument(8, _local_groups(call, 0, call.arguments[8]))
    if len(call.inputs) < 3 or call.adds_bias(2):
        run = filled(convolutions.convolution, arguments, call.keywords)
        return lambda tensors, peers: (run(tensors),)
    run = filled(convolutions.convolution, (*arguments[:2], None, *arguments[3:]), call.keywords)
    return lambda tensors, peers: (run(tensors[:2]),)


def convolution_backward(call: LocalCall) -> LocalOperator:
    """Gradients of a convolution with this rank's groups and output channels."""
    arguments = list(call.arguments)
    arguments[3] = arguments[3] and [call.input_shape(0)[1]]
    arguments[9] = _local_groups(call, 1, arguments[9])
    run = filled(convolutions.convolution_backward, tuple(arguments), call.keywords)
    return lambda tensors, peers: run(tensors)


def convolution_gradients(call: LocalCall, wanted: Sequence[bool]) -> LocalCall:
    """The call that makes only those gradients of a convolution that are wanted."""
    mask = [asked and read for asked, read in zip(call.arguments[_MASK], wanted, strict=True)]
    return replace(call, arguments=call.with_argument(_MASK, mask))


def _local_groups(call: LocalCall, source: int, groups: int) -> int:
    if groups == 1:
        return 1
    return groups * call.input_shape(source)[1] // call.inputs[source].shape[1]


def group_norm(call: LocalCall) -> LocalOperator:
    """Group norm of this rank's samples and groups."""
    return invoke(call, _local_norm(call, 0, 3))


def group_norm_backward(call: LocalCall) -> LocalOperator:
    """Gradient of `group_norm`."""
    return invoke(call, _local_norm(call, 1, 5))


def _local_norm(call: LocalCall, source: int, place: int) -> tuple[Any, ...]:
    """Arguments with this rank's samples, channels, and groups, which are numbers in a row from `place` on."""
    samples, channels, *image = call.input_shape(source)
    whole, groups = call.arguments[place + 1], call.arguments[place + 3]
    local = (samples, channels, elements(image, range(len(image))), groups * channels // whole)
    return (*call.arguments[:place], *local, *call.arguments[place + 4 :])


def embedding(call: LocalCall) -> LocalOperator:
    """Look-up; with a part of the vocabulary, zeros for the words of others."""
    start, length = call.span(call.input_placements(0), 0, call.inputs[0].shape[0])
    if length == call.inputs[0].shape[0]:
        return invoke(call)
    run = operator(call.op)

    def look_up(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        weight, indices = tensors
        local, foreign = _local_index(indices, start, length)
        return (run(weight, local).masked_fill_(foreign.unsqueeze(-1), 0),)

    return look_up


def embedding_backward(call: LocalCall) -> LocalOperator:
    """Gradient of a look-up; a part of the vocabulary leaves out the words of others."""
    rows = call.outputs[0].shape[0]
    start, length = call.span(call.output_placements(0), 0, rows)
    if length == rows:
        return invoke(call, call.with_argument(2, rows))
    run, padding = operator(call.op), call.arguments[3]

    def collect(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        gradient, indices = tensors
        local = indices - start
        skipped = (local < 0) | (local >= length) | (indices == padding)
        return (run(gradient, local.masked_fill_(skipped, -1), length, -1, False),)

    return collect


def expert_places(call: LocalCall) -> LocalOperator:
    """Places of this rank's tokens, in its part of the buffers where ranks share the sequence."""
    ranks = _ranks(call, tuple(axis for axis, held in enumerate(call.input_placements(0)) if held == 1))
    return invoke(call, call.with_argument(3, call.arguments[3] // ranks))


def gather(call: LocalCall) -> LocalOperator:
    """Gather; from a part of the gathered dim, zeros for the elements of others."""
    dim, start, length, whole = _range_along(call, call.input_placements(0))
    if whole:
        return invoke(call)
    run = operator(call.op)

    def look_up(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        local, foreign = _local_index(tensors[1], start, length)
        return (run(tensors[0], dim, local).masked_fill_(foreign, 0),)

    return look_up


def scatter_add(call: LocalCall) -> LocalOperator:
    """Scatter and add; into a part of the dim, the elements of others add zero."""
    dim, start, length, whole = _range_along(call, call.output_placements(0))
    if whole:
        return invoke(call)
    run = operator(call.op)

    def add(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        local, foreign = _local_index(tensors[1], start, length)
        return (run(tensors[0], dim, local, tensors[2].masked_fill(foreign, 0)),)

    return add


def scatter(call: LocalCall) -> LocalOperator:
    """Scatter; into a part of the dim, the elements of others land in a slice that is cut off."""
    dim, start, length, whole = _range_along(call, call.output_placements(0))
    if whole:
        return invoke(call)
    run, value = operator(call.op), call.arguments[3]

    def write(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        target, indices = tensors[0], tensors[1]
        local = indices - start
        local = local.masked_fill_((local < 0) | (local >= length), length)
        wider = torch.cat((target, target.narrow(dim, 0, 1)), dim)
        source = tensors[value.position] if isinstance(value, Slot) else value
        return (run(wider, dim, local, source).narrow(dim, 0, length),)

    return write


def summed_loss(call: LocalCall) -> LocalOperator:
    """Summed loss; over a part of the classes, the labels of others are ignored."""
    start, length = call.span(call.input_placements(0), 1, call.inputs[0].shape[-1])
    return _ignoring(call, 1, 4, start, length)


def summed_loss_backward(call: LocalCall) -> LocalOperator:
    """Gradient of `summed_loss`."""
    start, length = call.span(call.input_placements(1), 1, call.inputs[1].shape[-1])
    return _ignoring(call, 2, 5, start, length)


_NO_CLASS = -1


def _ignoring(call: LocalCall, target: int, ignored: int, start: int, length: int) -> LocalOperator:
    """Call a loss with the labels outside a range of classes ignored; `target`, `ignored` are arguments' positions."""
    if length == call.inputs[target - 1].shape[-1]:
        return invoke(call)
    run, unused = invoke(call, call.with_argument(ignored, _NO_CLASS)), call.arguments[ignored]

    def within_range(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        labels = tensors[target]
        local = labels - start
        skipped = (local < 0) | (local >= length) | (labels == unused)
        return run((*tensors[:target], local.masked_fill_(skipped, _NO_CLASS), *tensors[target + 1 :]), peers)

    return within_range


def _range_along(call: LocalCall, placements: tuple[int, ...]) -> tuple[int, int, int, bool]:
    """Dim a look-up works along, this rank's first element and number of elements, and whether these are all."""
    shape = call.inputs[0].shape
    dim = call.arguments[1] % max(len(shape), 1)
    extent = shape[dim] if shape else 1
    # Ranks that share the index as well count from the first element of their own part.
    own = [held == dim and index == dim for held, index in zip(placements, call.input_placements(1), strict=True)]
    extent //= prod(size for size, alone in zip(call.sizes, own, strict=True) if alone)
    others = tuple(REPLICATE if alone else held for held, alone in zip(placements, own, strict=True))
    start, length = call.span(others, dim, extent)
    return dim, start, length, length == extent


def _local_index(indices: Tensor, start: int, length: int) -> tuple[Tensor, Tensor]:
    """Indices relative to this rank's range, 0 where they are another's, and which those are."""
    local = indices - start
    foreign = (local < 0) | (local >= length)
    return local.masked_fill_(foreign, 0), foreign


def synchronised_batch_norm(call: LocalCall) -> LocalOperator:
    """Batch norm with statistics over the ranks that share the batch."""
    axes = _reduced_axes(call)
    if not axes and not (call.op == "aten._native_batch_norm_legit.no_stats" and call.arguments[-3]):
        return invoke(call)
    functional = call.op == "aten._native_batch_norm_legit_functional.default"
    momentum, epsilon = call.arguments[-2:]
    shares = _ranks(call, axes)

    def normalise(tensors: Sequence[Tensor], peers: Peers) -> tuple[Tensor, ...]:
        values = tensors[0]
        scale, shift = (tensors[a.position] if isinstance(a, Slot) else None for a in call.arguments[1:3])
        if not axes:
            return normalizations.batch_norm(values, scale, shift, epsilon)
        total = _total(peers, axes)
        *found, (mean, variance) = normalizations.batch_norm_among(values, scale, shift, epsilon, total, shares)
        if not functional:
            return tuple(found)
        count = values.numel() // values.shape[1] * shares
        unbiased = variance * (count / (count - 1))
        running = (
            old.lerp(new.to(old.dtype), momentum) for old, new in zip(tensors[-2:], (mean, unbiased), strict=True)
        )
        return (*found, *running)

    return normalise


def synchronised_batch_norm_backward(call: LocalCall) -> LocalOperator:
    """Gradient of `synchronised_batch_norm`."""
    axes = _reduced_axes(call)
    if not axes:
        whole = filled(normalizations.batch_norm_backward, call.arguments, call.keywords)
        return lambda tensors, peers: whole(tensors)
    weight, mean, deviation = call.arguments[2], call.arguments[5], call.arguments[6]
    shares, epsilon, mask = _ranks(call, axes), call.arguments[8], call.arguments[9]

    def differentiate(tensors: Sequence[Tensor], peers: Peers) -> tuple[Any, ...]:
        scale = tensors[weight.position] if isinstance(weight, Slot) else None
        saved = tensors[mean.position], tensors[deviation.position]
        gradient, values, total = tensors[0], tensors[1], _total(peers, axes)
        return normalizations.batch_norm_backward_among(gradient, values, scale, *saved, epsilon, mask, total, shares)

    return differentiate


def _total(peers: Peers, axes: Sequence[int]) -> Callable[[Tensor], Tensor]:
    """Sum over the ranks of some axes."""

    def total(sums: Tensor) -> Tensor:
        for axis in axes:
            sums = peers.sum(sums, axis)
        return sums

    return total


def _reduced_axes(call: LocalCall) -> tuple[int, ...]:
    return tuple(axis for axis, rule in enumerate(call.rules) if rule.reduced_elements)


def _ranks(call: LocalCall, axes: tuple[int, ...]) -> int:
    ranks = 1
    for axis in axes:
        ranks *= call.sizes[axis]
    return ranks
