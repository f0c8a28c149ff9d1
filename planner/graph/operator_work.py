"""What kind of kernel an operator is, and how many floating point operations it does."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry

from planner.graph.masked_attention import visible_keys
from planner.graph.recurrence import recurrence_flops
from simulator.program import Kernel

_CLASSES: dict[Kernel, tuple[str, ...]] = {
    Kernel.MATMUL: ("mm", "addmm", "bmm", "baddbmm", "mv", "dot"),
    Kernel.CONVOLUTION: ("convolution",),
    Kernel.CONVOLUTION_BACKWARD: ("convolution_backward",),
    Kernel.ATTENTION: (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "masked_attention",
        "masked_attention_backward",
        *("linear_recurrence", "linear_recurrence_backward"),
    ),
    Kernel.ACTIVATION: (
        *("relu", "threshold_backward", "leaky_relu", "leaky_relu_backward", "hardtanh", "hardtanh_backward"),
    ),
    Kernel.TRANSCENDENTAL: (
        *("gelu", "gelu_backward", "silu", "silu_backward", "tanh", "tanh_backward", "sigmoid", "sigmoid_backward"),
        *("elu", "elu_backward", "softplus", "softplus_backward", "mish", "mish_backward"),
    ),
    Kernel.SOFTMAX: ("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    Kernel.NORMALIZATION: (
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("_fused_rms_norm", "_fused_rms_norm_backward"),
    ),
    Kernel.BATCH_NORMALIZATION: ("_native_batch_norm_legit", "native_batch_norm", "native_batch_norm_backward"),
    Kernel.REDUCTION: (
        *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "var_mean", "prod", "any", "all"),
        *("cumsum", "expert_places", "nll_loss_forward", "_adaptive_avg_pool2d", "topk"),
        *("linalg_vector_norm", "logsumexp", "max_pool2d_with_indices_backward", "ctc_loss", "ctc_loss_backward"),
    ),
    Kernel.POOLING: ("max_pool2d_with_indices", "avg_pool2d"),
    Kernel.EMBEDDING: (
        *("embedding", "embedding_dense_backward", "gather", "scatter", "scatter_add", "index", "index_select"),
        *("index_put", "index_add", "_unsafe_index_put"),
        "scatter_reduce",
    ),
    Kernel.COPY: (
        *(
            "clone",
            "_to_copy",
            "cat",
            "stack",
            "constant_pad_nd",
            "select_backward",
            "slice_backward",
            "repeat",
            "flip",
        ),
        *("full", "zeros", "ones", "zeros_like", "ones_like", "full_like", "new_zeros", "new_full", "arange"),
        *("copy", "fill"),
        *(
            "roll",
            "nll_loss_backward",
            "select_scatter",
            "slice_scatter",
            "empty_like",
            "new_empty",
            "new_empty_strided",
            "scalar_tensor",
            "new_ones",
            "_unsafe_index",
        ),
    ),
    Kernel.VIEW: (
        *("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze", "slice", "select", "split"),
        *("split_with_sizes", "unbind", "as_strided", "chunk", "detach", "alias", "narrow", "diagonal", "unfold"),
    ),
}
_KERNELS = {name: kernel for kernel, names in _CLASSES.items() for name in names}
_ATTENTION_BACKWARD_RATIO = 2.5
_RECURRENCE_BACKWARD_RATIO = 3.0
"""Two products for each, behind the forward pass once more: no states are kept."""


def operator_name(op: str) -> str:
    """Bare name of an overload.

    >>> operator_name("aten.add.Tensor")
    'add'
    """
    return op.split(".")[1]


def kernel_class(op: str, args: Sequence[Any] = ()) -> Kernel:
    """Classify an overload, called with `args`; what is not listed works element by element."""
    kernel = _KERNELS.get(operator_name(op), Kernel.ELEMENTWISE)
    if kernel is Kernel.CONVOLUTION_BACKWARD and args:
        weight, stride, of_image = args[2], args[4], args[10][0]
        if of_image and max(stride) > 1 and prod(weight.shape[2:]) > 1:
            return Kernel.STRIDED_CONVOLUTION_BACKWARD
    return kernel


def count_flops(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> float:
    """Count the multiplications and additions of matrix products, convolutions and attention; 0 for the rest.

    Causal attention is counted as the kernel runs it: half of the score matrix. Its backward pass
    recomputes the scores: 5 matrix products for the forward pass's 2 (Dao et al., arXiv:2205.14135).
    """
    name = op.overloadpacket.__name__
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(*args[:3], causal=bool(args[4]) if len(args) > 4 else bool(kwargs.get("is_causal")))
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _ATTENTION_BACKWARD_RATIO * _attention_flops(*args[1:4], causal=bool(args[7]))
    if name == "masked_attention":
        return _masked_attention_flops(*args[:6])
    if name == "masked_attention_backward":
        return _ATTENTION_BACKWARD_RATIO * _masked_attention_flops(*args[1:4], *args[6:9])
    if name == "linear_recurrence":
        return recurrence_flops(args[1], args[2], *args[4:6])
    if name == "linear_recurrence_backward":
        return _RECURRENCE_BACKWARD_RATIO * recurrence_flops(args[2], args[3], *args[5:7])
    if name == "convolution_backward":
        return _convolution_backward_flops(*args)
    formula = flop_registry.get(op.overloadpacket)
    return 0.0 if formula is None else float(formula(*args, **kwargs, out_val=output))


def _convolution_backward_flops(gradient: Any, image: Any, weight: Any, _: Any, *how: Any) -> float:
    """As many as forward for each gradient asked for; torch's formula takes that of weights for one without groups."""
    *settings, asked = how
    forward = flop_registry[torch.ops.aten.convolution](image, weight, None, *settings, out_val=gradient)
    return float(sum(asked[:2]) * forward)


def _masked_attention_flops(query: Any, key: Any, value: Any, causal: bool, window: int, chunk: int) -> float:
    seen = visible_keys(int(query.shape[-2]), int(key.shape[-2]), causal, window, chunk)
    return 2.0 * float(prod(query.shape[:-2])) * seen * int(query.shape[-1] + value.shape[-1])


def _attention_flops(query: Any, key: Any, value: Any, *, causal: bool) -> float:
    scores = float(prod(query.shape[:-1]) * key.shape[-2])
    dims = int(query.shape[-1] + value.shape[-1])
    return 2.0 * scores * dims * (0.5 if causal else 1.0)
