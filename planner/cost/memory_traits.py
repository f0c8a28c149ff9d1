"""What training software keeps in device memory: one record a stack, read from its source code.

Where a value does not follow from the source it was fitted, robustly and for all networks at once; its docstring
says so. Sources: Megatron-LM (core 0.4 to 0.13), Transformer Engine 1.x, DeepSpeed 0.9, PyTorch 2.x (FSDP,
``torch.cuda`` caching allocator), MindSpeed-LLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from planner.cost.stacks import Stack

MEBI = 2.0**20
GIBI = 2.0**30


PLAIN_LOSS_BYTES = 18.0
"""Bytes a logit of PyTorch's own cross entropy in float32 of 16-bit logits: these and their gradient 2 each, the
float32 copy and its gradient, the logarithm of the softmax 4 each, and what the view without the last token copies."""
DROPPED_LOGITS_BYTES = 14.0
"""The same where the logits are dropped once the loss is taken (``del pred`` in torchtitan, ``del logits`` in
torchtune): its logarithm keeps its own output alone, so that 16-bit logits and their float32 copy are gone."""
SHIFTED_LOGITS_BYTES = 4.0
"""Bytes a logit besides where float32 logits less their maximum are a tensor of their own: Megatron's loss, before it
subtracted in place."""
GATHERED_LOGITS_BYTES = 8.0
"""Bytes a logit besides, where tensor ranks gather them first: the received parts and the whole, both ways. Fitted."""


SCRIPTED_LOSS_BYTES = 18.0
"""Bytes a logit of Megatron's compiled loss where TorchScript compiles it, as before PyTorch 2.2: each function of the
loss returns logits anew in float32."""
EAGER_KERNELS_BYTES = {"ampere": 1.05 * 2**30}
OLDER_EAGER_KERNELS_BYTES = 0.5 * 2**30
"""What a context takes besides where all kernels of the libraries are loaded at once, as before CUDA 11.7, by device
family: 1,113 MiB in all on V100 (``python -c "torch.ones(1).cuda()"``, BigScience's calibration), 1,687 MiB on the next
generation (RTX 3090, PyTorch 1.8, https://github.com/pytorch/pytorch/issues/55277)."""


MANY_SIZES_SHARE = 0.12
"""What PyTorch's caching allocator holds over live tensors of many sizes: the tensors of ResNet-50, allocated and freed
by its rules, leave 13 to 15 % in all, whatever the batch (``benchmarks.caching_allocator``)."""


_WORKSPACE_BYTES = {"hopper": 104 * MEBI, "blackwell": 60 * MEBI}
OLDER_WORKSPACE_BYTES = 28 * MEBI


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTraits:
    """Memory habits of one stack.

    Attributes
    ----------
    padded_vocabulary
        The table is padded to a multiple of 128 times ``tp`` (Megatron).
    fused_rms_norm
        RMSNorm is one kernel that keeps its input; otherwise PyTorch keeps a float32 copy of the input and the
        normalised values in low precision.
    fused_gate
        The gated activation is one kernel that keeps its input only; otherwise the activated gate is kept as well.
    fused_scores
        Unfused attention still has scale, mask and softmax in one kernel, which keeps its low-precision output.
    scores_buffer
        Unfused attention multiplies into a buffer of the scores that is kept for good (Megatron's
        ``GlobalMemoryBuffer``).
    attention_output_copy
        FlashAttention works in another layout (batch first), so that its output is kept twice.
    attention_statistics
        Bytes that fused attention keeps for a token of a head beside its output: the logarithm of its sum, or eight
        times each the maximum and the sum, in float32 (``npu_fusion_attention``).
    loss_bytes
        Bytes for every logit while the loss goes back, at two bytes a logit: 2 and a float32 copy whose memory
        the softmax and its gradient use again (Megatron), 4 more where the maximum is subtracted into a copy of it
        (Megatron-DeepSpeed, forked in 2021), or float32 logits, their softmax and the gradient.
    compiled_loss_bytes
        The same where the loss is compiled: Megatron's writes anew in float32 what it changed in place (note in
        ``megatron/core/fusions/fused_cross_entropy.py``); PyTorch's own comes down to logits and their gradient.
    earlier_loss_bytes
        Bytes for every logit of the micro-batch before, which stand as well: DeepSpeed's pipeline engine has two
        buffers at least and keeps the output of the last stage until its buffer is used again
        (``PipelineEngine._exec_forward_pass``), logits in float32 (``GPTModelPipe``).
    weighted_experts
        Experts multiply the output of their activation function by the router's share of the token, not what comes out
        of their second product, which need not stand then (Megatron-Core from 0.12 on,
        ``megatron/core/transformer/moe/experts.py``). A gated function does so in its own kernel, others keep the
        output before and after.
    position_biases
        Attention that adds biases to its scores by distance gets them as tensors of the heads' scores.
    drops_logits
        The training loop drops its logits once the loss is taken (torchtitan, torchtune).
    warm_up_tensors
        Tensors as wide as the inner product of a layer, of whole sequences of a micro-batch, that stand while Megatron
        warms up its fused functions before the model is made (``_warmup_jit_function``): where nothing fuses, bias and
        GELU keep eight, those of the call before still stand, and so does the input.
    late_gradients
        Gradients are allocated one by one as the backward pass makes them (``zero_grad(set_to_none=True)``); otherwise
        they stand in buffers.
    low_precision_weights
        Parameters are kept in the precision of the products beside float32 master weights; otherwise parameters
        are float32 and what stands in low precision is the layer at work (autocast, FSDP mixed precision).
    saved_low_precision_inputs
        FP8 products keep their inputs in 8 bits (Transformer Engine).
    bucket_elements
        Elements of a bucket that is reduced apart from the gradients themselves, for stacks without contiguous
        gradient buffers (DistributedDataParallel: 25 MB).
    gathered_layers
        Layers whose parameters are whole at one time under ``zero3``: the one at work and the one prefetched.
    step_bytes
        Bytes a parameter that the optimizer step needs for a moment: multi-tensor Adam holds its denominators.
    workspace_bytes
        Library workspaces and small tensors inside the allocator, by device family: cuBLAS takes 8 MiB a stream, on
        Hopper 32 MiB; Transformer Engine 4 MiB, from Hopper on 32 MiB. Fitted.
    fixed_workspace_bytes
        What they take besides, other than on Hopper, where ``CUBLAS_WORKSPACE_CONFIG`` asks for 32 MiB: once for the
        forward and once for the backward thread.
    reserved_share, in_flight_share
        What the allocator holds over the bytes that come and go, as a share: cached and fragmented blocks; and besides
        over the activations of a stage that has several micro-batches in flight, which are freed in another order
        than they were allocated. Fitted to runs that did and did not fit.
    many_sizes_share
        The first of these where layers differ in size, so that blocks of one do not fit the next.
    allocator_bytes
        What the allocator holds in any run: partly filled blocks of small tensors, one pool a stream.
    takes_whole_device
        The allocator takes all of the device at once, whatever is needed (TensorFlow without ``allow_growth``).
    context_bytes, communicator_bytes, network_communicator_bytes, network_pair_bytes
        Outside the allocator: driver context with its kernels, and the buffers of a communicator within a node, of one
        that spans nodes (NCCL has buffers for each channel and peer), and of stages on several nodes, which only send
        to their neighbours: half of it. Fitted.
    """

    padded_vocabulary: bool = False
    fused_rms_norm: bool = False
    fused_gate: bool = False
    fused_scores: bool = False
    scores_buffer: bool = False
    attention_output_copy: bool = False
    attention_statistics: float = 4.0
    loss_bytes: float = PLAIN_LOSS_BYTES
    compiled_loss_bytes: float = 4.0
    earlier_loss_bytes: float = 0.0
    weighted_experts: bool = False
    position_biases: bool = False
    drops_logits: bool = False
    warm_up_tensors: int = 0
    late_gradients: bool = False
    low_precision_weights: bool = True
    saved_low_precision_inputs: bool = False
    bucket_elements: float = 0.0
    gathered_layers: float = 2.0
    step_bytes: float = 0.0
    workspace_bytes: Mapping[str, float] = field(default_factory=lambda: _WORKSPACE_BYTES)
    fixed_workspace_bytes: float = 48 * MEBI
    reserved_share: float = 0.05
    in_flight_share: float = 0.2
    many_sizes_share: float = 0.05
    allocator_bytes: float = 0.3 * GIBI
    takes_whole_device: bool = False
    context_bytes: float = 0.6 * GIBI
    communicator_bytes: float = 0.3 * GIBI
    network_communicator_bytes: float = 1.8 * GIBI
    network_pair_bytes: float = 0.9 * GIBI


_EAGER = MemoryTraits(
    low_precision_weights=False,
    late_gradients=True,
    bucket_elements=6.5e6,
    step_bytes=4.0,
    loss_bytes=DROPPED_LOGITS_BYTES,
    drops_logits=True,
    many_sizes_share=MANY_SIZES_SHARE,
)
_COMPILED = replace(_EAGER, fused_rms_norm=True, fused_gate=True, fused_scores=True, loss_bytes=12.0, step_bytes=0.0)
_STATIC_GRAPH = MemoryTraits(low_precision_weights=False, fused_gate=True, loss_bytes=10.0)
_DEEPSPEED = MemoryTraits(
    padded_vocabulary=True,
    attention_output_copy=True,
    loss_bytes=10.0,
    compiled_loss_bytes=10.0,
    earlier_loss_bytes=4.0,
)
_MEGATRON = replace(
    _DEEPSPEED, fused_gate=True, loss_bytes=6.0, earlier_loss_bytes=0.0, weighted_experts=True, scores_buffer=True
)
_ASCEND = MemoryTraits(
    fused_rms_norm=True, fused_gate=True, fused_scores=True, attention_statistics=64.0, loss_bytes=6.0
)

_TRAITS: dict[Stack, MemoryTraits] = {
    Stack.MINDSPORE_TOOLKIT: _ASCEND,
    Stack.COMPILED: _COMPILED,
    Stack.MEGATRON: _MEGATRON,
    Stack.DEEPSPEED: _DEEPSPEED,
    Stack.TRANSFORMER_ENGINE: replace(
        _MEGATRON, fused_rms_norm=True, fused_scores=True, saved_low_precision_inputs=True, scores_buffer=False
    ),
    Stack.MINDSPORE: _ASCEND,
    Stack.MINDSPEED: replace(_ASCEND, padded_vocabulary=True, position_biases=True, warm_up_tensors=17),
    Stack.TENSORFLOW: replace(_STATIC_GRAPH, takes_whole_device=True),
    Stack.PADDLE: _STATIC_GRAPH,
    Stack.MXNET: _STATIC_GRAPH,
    Stack.ONEFLOW: _STATIC_GRAPH,
}


def traits_of(stack: Stack) -> MemoryTraits:
    """Memory habits of `stack`; those of PyTorch's operators where the stack has no entry of its own."""
    return _TRAITS.get(stack, _EAGER)


LOW_PRECISION_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "fp4": 2}
"""Bytes of an activation or a low-precision parameter; 8- and 4-bit products take 16-bit tensors in and out."""

MOMENTS = {
    "adam": 2.0,
    "adamw": 2.0,
    "lamb": 2.0,
    "adagrad": 1.0,
    "sgd": 1.0,
    "momentum": 1.0,
    "lars": 1.0,
    "lion": 1.0,
    "muon": 1.0,
    "novograd": 1.0,
    "fused_novograd": 1.0,
    "adafactor": 0.0,
    "adamw8bit": 2.0,
}
"""Numbers that an optimizer keeps for every parameter, as wide as the master weights."""
UNEVEN_ROUTING = 1.3
"""Tokens that the experts of a rank get at most over an even share, where none are dropped. Fitted to MindSpeed-LLM's
tests; those of Megatron-LM, networks of a few steps, would have more than 1.5."""
EIGHT_BIT_OPTIMIZERS = ("adamw8bit",)
"""Those that keep them in 8 bits."""
SUB_GROUP_ELEMENTS = 1e9
"""Parameters that DeepSpeed's ZeRO-3 updates at once: the default of ``sub_group_size`` (its configuration's
documentation, ``zero_optimization``)."""
