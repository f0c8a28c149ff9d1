"""Run one rank's part of an operator, given the rule it follows along each mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from planner.graph import attention as written_out
from planner.graph import norms
from planner.graph.operator_graph import DROPOUT, PLACES, Node, OperatorGraph
from planner.sharding import local_layers as layers
from planner.sharding import local_norms
from planner.sharding import local_scores as products
from planner.sharding.local_attention import attention, attention_backward
from planner.sharding.local_call import LocalCall, LocalOperator, Peers, invoke, local_call, widened
from planner.sharding.local_context import (
    context_attention,
    context_attention_backward,
    masked_context_attention,
    masked_context_attention_backward,
)
from planner.sharding.local_dropout import dropout, operator_number
from planner.sharding.local_softmax import shared_log_softmax, shared_log_softmax_backward
from planner.sharding.rule_notation import Rule
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD, SequenceCut

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
    written_out.SCORES: products.scores,
    written_out.WEIGHTED: products.weighted,
    written_out.GATHERED: products.gathered,
    written_out.HIDDEN: products.hidden,
    written_out.SOFTMAX: products.scaled_softmax,
    written_out.SOFTMAX_BACKWARD: products.scaled_softmax_backward,
    norms.RMS_NORM: local_norms.rms_norm,
    norms.RMS_NORM_BACKWARD: local_norms.rms_norm_backward,
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
