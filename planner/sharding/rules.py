"""Which placements an operator may take along one mesh axis.

Rules of several axes compose: each axis splits what the axes outside it have left. A rule is exact in
real arithmetic when run by `planner.sharding.local_operator`; partial values are only passed through
operators that are linear and cheap, never through a matrix product or an attention.
"""

from __future__ import annotations

from planner.graph import attention, norms
from planner.graph.operator_graph import (
    CTC,
    CTC_BACKWARD,
    DROPOUT,
    PLACES,
    RECURRENCE,
    RECURRENCE_BACKWARD,
    Node,
    OperatorGraph,
    Role,
    TensorRef,
)
from planner.graph.recompute import KeptByGraph
from planner.sharding import rule_families as families
from planner.sharding import rule_layers as layers
from planner.sharding.placement import REPLICATE
from planner.sharding.rule_families import Family
from planner.sharding.rule_layers import notation
from planner.sharding.rule_notation import InnerMessage, Rule, call_of, replicated, rules_of

_NOT_LINEAR = {
    "default": """
        abs acos acosh addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_not ceil clamp cos cosh elu
        empty_like erf erfc exp exp2 expm1 floor floor_divide full_like gelu hardsigmoid hardswish hardtanh hypot
        isfinite isinf isnan leaky_relu log log10 log1p log2 logaddexp logical_and logical_not logical_or
        logical_xor logit maximum minimum mish nan_to_num ones_like reciprocal relu round rsqrt sgn sigmoid sign
        silu sin sinc sinh softplus sqrt square tan tanh trunc zeros_like
    """,
    "Scalar": """
        bitwise_and bitwise_or bitwise_xor eq fill floor_divide fmod ge gt le lerp lt ne pow remainder
    """,
    "Tensor": """
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp eq fmod ge gt le lerp lt ne
        remainder xlogy
    """,
    "Tensor_Scalar": """
        bitwise_left_shift bitwise_right_shift pow
    """,
    "Tensor_Tensor": """
        pow
    """,
    "Scalar_Tensor": """
        bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor remainder
    """,
}
"""Elementwise operators that are not linear, by overload."""

_POINTWISE: dict[str, Family] = {
    f"aten.{name}.{overload}": families.pointwise() for overload, names in _NOT_LINEAR.items() for name in names.split()
} | {
    "aten.div.Tensor_mode": families.pointwise(),
    "aten.div.Scalar_mode": families.pointwise(),
    "aten.rsub.Scalar": families.pointwise(),
    "aten.add.Scalar": families.pointwise(),
    "aten.sub.Scalar": families.pointwise(),
    "aten.where.Scalar": families.pointwise(),
    "aten.add.Tensor": families.pointwise((0, 1)),
    "aten.sub.Tensor": families.pointwise((0, 1)),
    "aten.rsub.Tensor": families.pointwise((0, 1)),
    "aten.mul.Tensor": families.pointwise((0,), (1,)),
    "aten.mul.Scalar": families.pointwise((0,)),
    "aten.div.Tensor": families.pointwise((0,)),
    "aten.div.Scalar": families.pointwise((0,)),
    "aten.where.self": families.pointwise((1, 2)),
    "aten.where.ScalarOther": families.fill(2, (1,)),
    "aten.where.ScalarSelf": families.fill(1, (2,)),
    "aten.masked_fill.Scalar": families.fill(2, (0,)),
    "aten.masked_fill.Tensor": families.pointwise((0, 2)),
    "aten.copy.default": families.pointwise((1,)),
    DROPOUT: families.pointwise((0,)),
    "aten.complex.default": families.pointwise((0, 1)),
    "aten.polar.default": families.pointwise((0,)),
    "aten.log_sigmoid_forward.default": families.pointwise(),
    "aten.log_sigmoid_backward.default": families.pointwise((0,)),
    "aten._prelu_kernel.default": families.pointwise(),
    "aten._prelu_kernel_backward.default": families.pointwise((0,)),
}

_SAME = "neg positive clone alias detach lift_fresh_copy _to_copy contiguous"
_GRADIENTS = """
gelu_backward silu_backward sigmoid_backward tanh_backward threshold_backward leaky_relu_backward elu_backward
hardtanh_backward hardswish_backward hardsigmoid_backward softplus_backward mish_backward
"""
_LINEAR: dict[str, Family] = {
    f"aten.{name}.default": families.pointwise((0,)) for name in (*_SAME.split(), *_GRADIENTS.split())
}

_VIEWS: dict[str, Family] = {
    f"aten.{name}": families.view
    for name in (
        "view.default",
        "_unsafe_view.default",
        "reshape.default",
        "unsqueeze.default",
        "squeeze.default",
        "squeeze.dim",
        "squeeze.dims",
        "flatten.using_ints",
        "unflatten.int",
    )
} | {
    "aten.expand.default": families.pointwise((0,)),
    "aten.t.default": families.permuted(families.reversed_dims),
    "aten.transpose.int": families.permuted(families.swapped),
    "aten.permute.default": families.permuted(families.reordered),
    "aten.split.Tensor": families.along(2, "dim", 0, ((0,),)),
    "aten.split_with_sizes.default": families.along(2, "dim", 0, ((0,),)),
    "aten.chunk.default": families.along(2, "dim", 0, ((0,),)),
    "aten.cat.default": families.along(1, "dim", 0, ((0,),)),
    "aten.stack.default": families.inserted(1, "dim"),
    "aten.select.int": families.dropped(1, "dim"),
    "aten.select_backward.default": families.inserted(2, "dim"),
    "aten.unbind.int": families.dropped(1, "dim"),
    "aten.slice.Tensor": families.changed((0,)),
    "aten.slice_backward.default": families.changed((0,)),
    "aten.repeat.default": families.changed((0,)),
    "aten.constant_pad_nd.default": families.padded,
    "aten.flip.default": families.rolled(1, "dims"),
    "aten.roll.default": families.rolled(2, "dims"),
    "aten.tril.default": families.last(2, ((0,),)),
    "aten.triu.default": families.last(2, ((0,),)),
}

_CREATED: dict[str, Family] = {
    f"aten.{name}.default": families.created
    for name in ("full", "zeros", "ones", "new_full", "new_zeros", "new_ones", "new_empty", "new_empty_strided")
}
_CONSTANT: dict[str, Family] = {
    f"aten.{name}": families.alone
    for name in ("arange.default", "arange.start", "arange.start_step", "eye.default", "scalar_tensor.default")
}

_REDUCTIONS: dict[str, Family] = {
    "aten.sum.default": families.reduction(1, adds=True),
    "aten.sum.dim_IntList": families.reduction(1, adds=True),
    "aten.mean.default": families.reduction(1, adds=True),
    "aten.mean.dim": families.reduction(1, adds=True),
    "aten.amax.default": families.reduction(1, adds=False),
    "aten.amin.default": families.reduction(1, adds=False),
    "aten.argmax.default": families.reduction(1, adds=False),
    "aten.max.default": families.reduction(1, adds=False),
    "aten.max.dim": families.reduction(1, adds=False),
    "aten.min.dim": families.reduction(1, adds=False),
    "aten.any.default": families.reduction(1, adds=False),
    "aten.any.dim": families.reduction(1, adds=False),
    "aten.all.default": families.reduction(1, adds=False),
    "aten.all.dim": families.reduction(1, adds=False),
    "aten.var.correction": families.reduction(1, adds=False),
    "aten.var_mean.correction": families.reduction(1, adds=False),
    "aten.argmin.default": families.reduction(1, adds=False),
    "aten.min.default": families.reduction(1, adds=False),
    "aten.prod.default": families.reduction(1, adds=False),
    "aten.prod.dim_int": families.reduction(1, adds=False),
    "aten.logsumexp.default": families.reduction(1, adds=False),
    "aten.linalg_vector_norm.default": families.reduction(2, adds=False),
    "aten.cumprod.default": families.along(1, "dim", 0),
    "aten.logcumsumexp.default": families.along(1, "dim", 0),
    "aten._safe_softmax.default": families.along(1, "dim"),
    "aten.glu.default": families.along(1, "dim"),
    "aten.glu_backward.default": families.along(2, "dim", linear=((0,),)),
    "aten.cumsum.default": families.along(1, "dim", 0, ((0,),)),
    "aten.topk.default": families.along(2, "dim", -1),
    "aten.sort.default": families.along(1, "dim", -1),
    "aten._softmax.default": families.along(1, "dim"),
    "aten._log_softmax.default": layers.log_softmax,
    "aten._softmax_backward_data.default": families.along(2, "dim", linear=((0,),)),
    "aten._log_softmax_backward_data.default": layers.log_softmax_backward,
}

_LAYERS: dict[str, Family] = {
    "aten.mm.default": notation("mk,kn->mn"),
    "aten.bmm.default": notation("bmk,bkn->bmn"),
    "aten.mv.default": notation("mk,k->m"),
    "aten.dot.default": notation("k,k->"),
    "aten.addmm.default": layers.addmm,
    "aten.baddbmm.default": layers.baddbmm,
    "aten.convolution.default": layers.convolution,
    "aten.convolution_backward.default": layers.convolution_backward,
    "aten._native_batch_norm_legit.no_stats": layers.batch_norm(None),
    "aten._native_batch_norm_legit_functional.default": layers.batch_norm(5),
    "aten.native_batch_norm_backward.default": layers.batch_norm_backward,
    "aten.native_layer_norm.default": layers.layer_norm,
    "aten.native_layer_norm_backward.default": layers.layer_norm_backward,
    "aten.native_group_norm.default": layers.group_norm,
    "aten.native_group_norm_backward.default": layers.group_norm_backward,
    "aten.embedding.default": layers.embedding,
    "aten.embedding_dense_backward.default": layers.embedding_backward,
    "aten.gather.default": layers.gather,
    "aten.scatter_add.default": layers.scatter((0, 3)),
    "aten.scatter.src": layers.scatter((0, 3)),
    "aten.scatter.value": layers.scatter(),
    "aten.nll_loss_forward.default": layers.summed_loss,
    "aten.nll_loss_backward.default": layers.summed_loss_backward,
    "aten.index.Tensor": layers.index,
    "aten.index_put.default": layers.index_put,
    "aten._unsafe_index.Tensor": layers.index,
    "aten._unsafe_index_put.default": layers.index_put,
    "aten.max_pool2d_with_indices.default": families.last(2),
    "aten.avg_pool2d.default": families.last(2, ((0,),)),
    "aten._adaptive_avg_pool2d.default": families.last(2, ((0,),)),
    "aten.max_pool2d_with_indices_backward.default": layers.windowed_backward(2),
    "aten.avg_pool2d_backward.default": layers.windowed_backward(2),
    "aten._adaptive_avg_pool2d_backward.default": layers.windowed_backward(2),
    "aten._scaled_dot_product_flash_attention_for_cpu.default": layers.attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": layers.attention_backward,
    attention.MASKED: layers.masked_attention,
    attention.MASKED_BACKWARD: layers.masked_attention_backward,
    "aten._weight_norm_interface.default": layers.weight_norm,
    "aten._weight_norm_interface_backward.default": layers.weight_norm_backward,
    RECURRENCE: layers.recurrence,
    RECURRENCE_BACKWARD: layers.recurrence_backward,
    PLACES: notation("b.->b.,b.,b."),
    CTC: notation("b..,b.->b"),
    CTC_BACKWARD: notation("b,b..,b.->b.."),
    attention.SCORES: notation("bh..,bh..->bh.."),
    attention.WEIGHTED: notation("bh..,bh..->bh.."),
    attention.GATHERED: notation("bh..,bh..->bh.."),
    attention.HIDDEN: notation("bh..->bh.."),
    attention.SOFTMAX: notation("bh..->bh.."),
    attention.SOFTMAX_BACKWARD: notation("bh..,bh..->bh.."),
    norms.RMS_NORM: layers.rms_norm,
    norms.RMS_NORM_BACKWARD: layers.rms_norm_backward,
}

_UPSAMPLING = """
upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa
"""
_PADDING = "reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d"


def _last_dims(name: str) -> int:
    """How many dims an operator on images or signals works on, as its name says."""
    return 1 if "1d" in name else 2


_WINDOWED: dict[str, Family] = (
    {f"aten.{name}.default": families.last(_last_dims(name), ((0,),)) for name in (_UPSAMPLING + _PADDING).split()}
    | {
        f"aten.{name}_backward.default": layers.windowed_backward(_last_dims(name))
        for name in (_UPSAMPLING + _PADDING).split()
    }
    | {
        "aten.pixel_shuffle.default": families.last(3, ((0,),)),
        "aten.pixel_unshuffle.default": families.last(3, ((0,),)),
        "aten.avg_pool3d.default": families.last(3, ((0,),)),
        "aten.avg_pool3d_backward.default": layers.windowed_backward(3),
        "aten.max_pool3d_with_indices.default": families.last(3),
        "aten.max_pool3d_with_indices_backward.default": layers.windowed_backward(3),
        "aten._adaptive_avg_pool3d.default": families.last(3, ((0,),)),
        "aten._adaptive_avg_pool3d_backward.default": layers.windowed_backward(3),
        "aten.grid_sampler_2d.default": notation("nc..,n...->nc.."),
        "aten.grid_sampler_2d_backward.default": notation("nc..,nc..,n...->nc..,n..."),
        "aten.unfold.default": families.windows,
        "aten.unfold_backward.default": families.windows_backward,
    }
)

_OTHERS: dict[str, Family] = {
    "aten.binary_cross_entropy.default": families.elementwise_loss(3),
    "aten.binary_cross_entropy_backward.default": families.elementwise_loss(4, (0,)),
    "aten.smooth_l1_loss.default": families.elementwise_loss(2),
    "aten.smooth_l1_loss_backward.default": families.elementwise_loss(3, (0,)),
    "aten.huber_loss.default": families.elementwise_loss(2),
    "aten.huber_loss_backward.default": families.elementwise_loss(3, (0,)),
    "aten.index_select.default": families.selected,
    "aten.index_add.default": families.added_slices,
    "aten._conj.default": families.pointwise(),
    "aten.view_as_real.default": families.pairs,
    "aten.view_as_complex.default": families.pairs,
}

TABLE: dict[str, Family] = (
    _POINTWISE | _LINEAR | _VIEWS | _CREATED | _CONSTANT | _REDUCTIONS | _LAYERS | _WINDOWED | _OTHERS
)


__all__ = ["InnerMessage", "Rule", "has_rule", "rules_for"]


def rules_for(graph: OperatorGraph, node: Node) -> tuple[Rule, ...]:
    """List the rules of `node`, the fully replicated one first.

    Whether a sharded dim divides by the size of the axis is for the caller to check. Parameters may be
    stored sharded on any dim and inputs on the batch dim; constants are replicated, as is an operator
    without rules of its own (see `has_rule`). Those of a graph's nodes are found once and kept as long as the graph is.
    """
    made = _MADE.of(graph)
    found = made.get(id(node))
    if found is None:
        alike = _ALIKE.of(graph)
        key = (node.op, node.role, _sized(graph, node.args), _sized(graph, node.kwargs), node.outputs)
        if key not in alike:
            alike[key] = _rules_for(graph, node)
        # The node is kept beside its rules, so that no other one gets its number.
        found = made[id(node)] = node, alike[key]
    return found[1]


_MADE = KeptByGraph[int, tuple[Node, tuple[Rule, ...]]]()
_ALIKE = KeptByGraph[tuple[object, ...], tuple[Rule, ...]]()


def _sized(graph: OperatorGraph, argument: object) -> object:
    """An argument by the sizes of its tensors; a number that equals another of a different type is told apart."""
    if isinstance(argument, TensorRef):
        return graph.spec(argument)
    if isinstance(argument, tuple):
        return tuple(_sized(graph, item) for item in argument)
    return type(argument), argument


def _rules_for(graph: OperatorGraph, node: Node) -> tuple[Rule, ...]:
    if node.role in (Role.PARAMETER, Role.INPUT):
        return _stored(node)
    family = TABLE.get(node.op)
    if family is None or node.role is Role.CONSTANT:
        return (replicated(len(node.tensor_inputs), len(node.outputs)),)
    call = call_of(graph, node)
    return rules_of(call, family(call))


def has_rule(op: str) -> bool:
    """Whether `op` has rules of its own; if not it is replicated, and callers must say so."""
    return op in TABLE or op in (Role.PARAMETER, Role.INPUT, Role.CONSTANT)


def _stored(node: Node) -> tuple[Rule, ...]:
    """Parameters and inputs read nothing: only the placement in which they are held differs."""
    shape = node.outputs[0].shape
    dims: tuple[int, ...] = ()
    if node.role is Role.PARAMETER:
        dims = tuple(d for d, size in enumerate(shape) if size > 1)
    elif shape:
        dims = (0,)
    return tuple(Rule((), (placement,) * len(node.outputs), False) for placement in (REPLICATE, *dims))
