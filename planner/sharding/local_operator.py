"""Run one rank's part of an operator, given the rule it follows along each mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from planner.graph import attention as written_out
from planner.graph import norms
from planner.graph.operator_graph import DROPOUT, PLACES, Node, OperatorGraph
from planner.sharding import local_layers as layers
from planner.sharding.local_attention import attention, attention_backward
from planner.sharding.local_call import LocalCall, LocalOperator, Moment, Parts, Peers, invoke, local_call, widened
from planner.sharding.local_context import (
    context_attention,
    context_attention_backward,
    masked_context_attention,
    masked_context_attention_backward,
    own_part,
)
from planner.sharding.rule_notation import NARROW, Rule
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD, SequenceCut

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
    """Apply the mask of one micro-batch: an element is kept by its place in the whole tensor, whoever holds it.

    The mask is a function of seed, operator, step and the element's number over all micro-batches of the step: a
    counter-based generator (Salmon et al., *Parallel random numbers: as easy as 1, 2, 3*, SC 2011) with the finaliser
    of SplitMix64 (Steele et al., OOPSLA 2014). Sharding, recomputation and the backward pass see the same mask.

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


def rms_norm(call: LocalCall) -> LocalOperator:
    """Values over the root of their mean square, which is float32 where they are narrower, times a weight."""
    epsilon = float(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        values, weight = tensors
        scaled, _ = _scaled(values, epsilon)
        return (weight * scaled.to(values.dtype),)

    return run


def rms_norm_backward(call: LocalCall) -> LocalOperator:
    """Gradients of values and weight: ``r (w g - n mean(w g n))`` and ``sum(g n)``, n being the values times r."""
    epsilon = float(call.arguments[3])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, values, weight = tensors
        scaled, inverse = _scaled(values, epsilon)
        weighted = gradient.to(scaled.dtype) * weight
        of_weight = (gradient * scaled).flatten(0, -2).sum(0)
        of_values = inverse * (weighted - scaled * (weighted * scaled).mean(-1, keepdim=True))
        return of_values.to(values.dtype), of_weight.to(weight.dtype)

    return run


def _scaled(values: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return wide * inverse, inverse


def shared_log_softmax(call: LocalCall) -> LocalOperator:
    r"""Logarithm of the softmax of one's own classes, less what those of the others add.

    With :math:`z_i` the logarithm of the summed exponentials of rank i, a number each row, the whole sum is that of
    :math:`m = \max z_i`: :math:`z = m + \log \sum \exp(z_i - m)`.
    """
    dim, axes, dtype = call.arguments[1], _cut_axes(call), getattr(torch, call.outputs[0].dtype)
    run, half = invoke(call), call.inputs[0].dtype in NARROW

    def share(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        values = tensors[0]
        own = values.log_softmax(dim, torch.float32) if half else run(tensors, peers)[0]
        mine = values.amax(dim).to(own.dtype) - own.amax(dim)
        whole = mine
        for axis in axes:
            most = peers.largest(whole, axis)
            whole = most + peers.sum((whole - most).exp_(), axis).log_()
        return (own.sub_((whole - mine).unsqueeze(dim)).to(dtype),)

    return share


def shared_log_softmax_backward(call: LocalCall) -> LocalOperator:
    r"""Gradient of `shared_log_softmax`: :math:`g - e^y \sum g` for the gradient g of the result y."""
    dim, axes, dtype = call.arguments[2], _cut_axes(call), getattr(torch, call.outputs[0].dtype)

    def differentiate(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, result = (t.float() if call.inputs[0].dtype in NARROW else t for t in tensors)
        total = gradient.sum(dim)
        for axis in axes:
            total = peers.sum(total, axis)
        return (result.exp().mul_(total.neg_().unsqueeze(dim)).add_(gradient).to(dtype),)

    return differentiate


def _cut_axes(call: LocalCall) -> tuple[int, ...]:
    """Axes that cut the classes."""
    return tuple(axis for axis, rule in enumerate(call.rules) if rule.messages)


def scores(call: LocalCall) -> LocalOperator:
    """``x @ y^T``; a head of `y` may serve several of `x`."""
    return lambda tensors, peers: (tensors[0] @ _per_head(tensors[1], tensors[0]).mT,)


def weighted(call: LocalCall) -> LocalOperator:
    """``x @ y``, as `scores`."""
    return lambda tensors, peers: (tensors[0] @ _per_head(tensors[1], tensors[0]),)


def gathered(call: LocalCall) -> LocalOperator:
    """``x^T @ y``, added up over the heads that share one of the result."""
    heads = call.output_shape()[1]

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        found = tensors[0].mT @ tensors[1]
        batch, all_heads = found.shape[:2]
        if all_heads == heads:
            return (found,)
        return (found.reshape(batch, heads, all_heads // heads, *found.shape[2:]).sum(2),)

    return run


def hidden(call: LocalCall) -> LocalOperator:
    """Scores of later tokens as minus infinity; a rank has all tokens."""
    return lambda tensors, peers: (_seen(tensors[0]),)


def scaled_softmax(call: LocalCall) -> LocalOperator:
    """Weights of scores times a factor, perhaps without those of later tokens."""
    factor, causal = float(call.arguments[1]), bool(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        scaled = tensors[0] * factor
        return ((_seen(scaled) if causal else scaled).softmax(-1),)

    return run


def scaled_softmax_backward(call: LocalCall) -> LocalOperator:
    """``(g - sum(g w)) w`` times the factor, for the gradient g of the weights w."""
    factor = float(call.arguments[2])

    def run(tensors: Sequence[Tensor], peers: Peers) -> Parts:
        gradient, weights = tensors
        return (torch._softmax_backward_data(gradient, weights, -1, weights.dtype) * factor,)

    return run


def _seen(scores: Tensor) -> Tensor:
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril_()
    return scores.masked_fill(~visible, -torch.inf)


def _per_head(tensor: Tensor, like: Tensor) -> Tensor:
    """Repeat shared heads for each of those of `like`."""
    times = like.shape[1] // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


__all__ = ["LocalOperator", "Peers", "prepare"]

_SPECIAL: dict[str, Callable[[LocalCall], LocalOperator]] = {
    "aten.view.default": layers.reshaped,
    "aten._unsafe_view.default": layers.reshaped,
    "aten.reshape.default": layers.reshaped,
    "aten.unsqueeze.default": layers.reshaped,
    "aten.squeeze.default": layers.reshaped,
    "aten.squeeze.dim": layers.reshaped,
    "aten.squeeze.dims": layers.reshaped,
    "aten.flatten.using_ints": layers.reshaped,
    "aten.unflatten.int": layers.reshaped,
    "aten.expand.default": layers.expanded,
    "aten.full.default": layers.resized(0),
    "aten.zeros.default": layers.resized(0),
    "aten.ones.default": layers.resized(0),
    "aten.new_full.default": layers.resized(1),
    "aten.new_zeros.default": layers.resized(1),
    "aten.new_ones.default": layers.resized(1),
    "aten.new_empty.default": layers.resized(1),
    "aten.new_empty_strided.default": layers.strided,
    "aten.slice_backward.default": layers.resized(1),
    "aten.select_backward.default": layers.resized(1),
    "aten.unfold_backward.default": layers.resized(1),
    **{
        f"aten.{name}_backward.default": layers.resized(2)
        for name in (
            *("upsample_nearest1d", "upsample_nearest2d", "upsample_linear1d", "upsample_bilinear2d"),
            *("upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        )
    },
    "aten.mean.default": layers.mean,
    "aten.mean.dim": layers.mean,
    "aten.addmm.default": layers.biased_product,
    "aten.baddbmm.default": layers.biased_product,
    "aten.convolution.default": layers.convolution,
    layers.CONVOLUTION_BACKWARD: layers.convolution_backward,
    "aten.native_group_norm.default": layers.group_norm,
    "aten.native_group_norm_backward.default": layers.group_norm_backward,
    "aten.embedding.default": layers.embedding,
    "aten.embedding_dense_backward.default": layers.embedding_backward,
    PLACES: layers.expert_places,
    "aten.gather.default": layers.gather,
    "aten.scatter_add.default": layers.scatter_add,
    "aten.scatter.src": layers.scatter,
    "aten.scatter.value": layers.scatter,
    "aten.nll_loss_forward.default": layers.summed_loss,
    "aten.nll_loss_backward.default": layers.summed_loss_backward,
    ATTENTION: attention,
    ATTENTION_BACKWARD: attention_backward,
    written_out.SCORES: scores,
    written_out.WEIGHTED: weighted,
    written_out.GATHERED: gathered,
    written_out.HIDDEN: hidden,
    written_out.SOFTMAX: scaled_softmax,
    written_out.SOFTMAX_BACKWARD: scaled_softmax_backward,
    norms.RMS_NORM: rms_norm,
    norms.RMS_NORM_BACKWARD: rms_norm_backward,
    "aten._native_batch_norm_legit.no_stats": layers.synchronised_batch_norm,
    "aten._native_batch_norm_legit_functional.default": layers.synchronised_batch_norm,
    "aten.native_batch_norm_backward.default": layers.synchronised_batch_norm_backward,
}

_AMONG_RANKS: dict[str, Callable[[LocalCall], LocalOperator]] = {
    ATTENTION: context_attention,
    ATTENTION_BACKWARD: context_attention_backward,
    written_out.MASKED: masked_context_attention,
    written_out.MASKED_BACKWARD: masked_context_attention_backward,
    "aten._log_softmax.default": shared_log_softmax,
    "aten._log_softmax_backward_data.default": shared_log_softmax_backward,
}
"""Operators whose rule has messages of its own."""


def prepare(
    graph: OperatorGraph,
    node: Node,
    rules: tuple[Rule, ...],
    sizes: tuple[int, ...],
    coordinates: tuple[int, ...],
    *,
    device: torch.device | None = None,
    cut: SequenceCut | None = None,
    wanted: Sequence[bool] | None = None,
) -> LocalOperator:
    """Resolve everything that can be known before run time of one rank's part of `node`.

    ``rules``, ``sizes`` and ``coordinates`` (of this rank) have one entry for each mesh axis, outermost
    first. Where two axes shard one dim the outer one cuts it first, into contiguous chunks. `device`
    is where operators without tensor inputs make theirs, `cut` how a context axis shares the sequence of a dropout,
    `wanted` which outputs are read: gradients of a convolution that are not are not computed. The result is called with
    this rank's tensors, aligned with ``node.tensor_inputs``, and with the other ranks of every axis; the tensors it
    returns may share memory with those it was given, as views do.
    """
    call = local_call(graph, node, rules, sizes, coordinates, device)
    if wanted is not None and node.op == layers.CONVOLUTION_BACKWARD:
        call = layers.convolution_gradients(call, wanted)
    if node.op == DROPOUT:
        return dropout(call, operator_number(graph, node), cut)
    if any(rule.messages for rule in rules):
        return _AMONG_RANKS[node.op](call)
    return widened(call, _SPECIAL.get(node.op, invoke)(call))
