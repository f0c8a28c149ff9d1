"""Bytes of a training run that stand through the whole step: parameters, gradients and optimizer states of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from planner.cost.memory.parameters import RankParameters
from planner.cost.memory_traits import (
    EAGER_KERNELS_BYTES,
    EIGHT_BIT_OPTIMIZERS,
    GIBI,
    LOW_PRECISION_BYTES,
    MEBI,
    MOMENTS,
    OLDER_EAGER_KERNELS_BYTES,
    OLDER_WORKSPACE_BYTES,
    SUB_GROUP_ELEMENTS,
    MemoryTraits,
)
from planner.cost.stacks import Stack, family_of
from planner.cost.training_run import OptimizerSharding, TrainingSetup
from simulator.errors import InputError
from simulator.hardware import Hardware

_BOTH_GRADIENTS = 6
"""Bytes of a 16-bit gradient and its float32 sum."""
_SHARDED_GRADIENTS = (OptimizerSharding.ZERO2, OptimizerSharding.ZERO3)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStates:
    """Bytes of one rank, by what they are for."""

    parameters: float
    gradients: float
    master_weights: float
    moments: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.master_weights + self.moments


def shards(setup: TrainingSetup) -> tuple[int, float]:
    """Over how many ranks dense and expert states are shared out, where they are."""
    ranks = setup.shard_group or setup.dp * setup.cp
    return ranks, max(ranks * setup.tp / (setup.ep * setup.expert_tp), 1.0)


def states_of(parameters: RankParameters, setup: TrainingSetup, traits: MemoryTraits) -> tuple[RankStates, float]:
    """Bytes of parameters, gradients and optimizer states, and how many parameters the rank updates.

    Sharding is that of Rajbhandari et al., "ZeRO" (arXiv:1910.02054).

    Raises
    ------
    InputError
        The optimizer is unknown.
    """
    if setup.optimizer not in MOMENTS:
        raise InputError(f"optimizer {setup.optimizer!r} is unknown; choose one of {', '.join(sorted(MOMENTS))}")
    low = LOW_PRECISION_BYTES[setup.precision]
    sharding, trained = setup.optimizer_sharding, setup.trained_fraction
    dense_ranks, expert_ranks = shards(setup)
    shard = parameters.dense / dense_ranks + parameters.expert / expert_ranks
    updated = (parameters.total if sharding is OptimizerSharding.NONE else shard) * trained
    held = shard if sharding is OptimizerSharding.ZERO3 else parameters.total
    reduced = (shard if sharding in _SHARDED_GRADIENTS else parameters.total) * trained
    width = low if traits.low_precision_weights or _pure(setup, traits) else 4
    state = 2 if _pure(setup, traits) else 4
    moment = 1 if setup.optimizer in EIGHT_BIT_OPTIMIZERS else state
    frozen = setup.frozen_weight_bytes or width
    has_master = low == 2 and width == 2 and state == 4
    on_device = 0.0 if setup.offload_optimizer else updated
    if setup.offload_optimizer and sharding in _SHARDED_GRADIENTS:
        reduced = 0.0  # each bucket goes to the host as soon as it is reduced (ZeRO-Offload, arXiv:2101.06840)
    if setup.offload_parameters and sharding is OptimizerSharding.ZERO3:
        held = 0.0
    return RankStates(
        parameters=held * (trained * width + (1 - trained) * frozen),
        gradients=reduced * gradient_width(setup),
        master_weights=setup.master_weight_bytes * on_device if has_master else 0.0,
        moments=MOMENTS[setup.optimizer] * moment * on_device,
    ), updated


def _pure(setup: TrainingSetup, traits: MemoryTraits) -> bool:
    """Whether everything is in 16 bits: gradients of two bytes without master weights mean states of two as well."""
    low = LOW_PRECISION_BYTES[setup.precision] == 2 and setup.gradient_bytes <= 2
    return low and not traits.low_precision_weights


def usual_gradient_bytes(stack: Stack, precision: str) -> int:
    """Bytes of a gradient as a stack keeps and sums it unless told otherwise.

    Megatron sums in float32 beside bfloat16 (``accumulate_allreduce_grads_in_fp32``), in 16 bits beside float16, as
    MindSpeed and MindSpore do; parameters of PyTorch's own stacks are float32, and so are their gradients.
    """
    narrow = (Stack.MEGATRON, Stack.DEEPSPEED, Stack.MINDSPORE, Stack.MINDSPEED)
    return 2 if precision == "fp16" and stack in narrow else 4


def gradient_width(setup: TrainingSetup) -> float:
    """Bytes of one element of the sums of gradients."""
    return 4.0 if LOW_PRECISION_BYTES[setup.precision] == 4 else float(setup.gradient_bytes)


def accumulated_apart(setup: TrainingSetup) -> bool:
    """Whether float32 sums of gradients stand beside the 16-bit gradients (DeepSpeed's ``BF16_Optimizer``)."""
    return setup.gradient_bytes == _BOTH_GRADIENTS


def step_bytes(setup: TrainingSetup, traits: MemoryTraits, shard: float) -> float:
    """Bytes that the optimizer step needs for a moment on a rank that updates `shard` parameters.

    16-bit gradients are copied to float32. DeepSpeed clones and flattens them before (2 + 2 + 4 bytes,
    ``stage_1_and_2.py``), but for a single replica, whose partition they all lie in already. With ZeRO-3 it updates
    one group of parameters after the other (``sub_group_size``, ``stage3.py``). PyTorch's multi-tensor Adam holds the
    denominators.
    """
    if setup.offload_optimizer or LOW_PRECISION_BYTES[setup.precision] == 4 or _pure(setup, traits):
        return 0.0
    if accumulated_apart(setup):
        return 0.0  # the sums are float32 already, and the update works on views of them
    if setup.reduce_bucket_elements:
        grouped = setup.optimizer_sharding is OptimizerSharding.ZERO3
        updated = min(shard, SUB_GROUP_ELEMENTS) if grouped else shard
        return (8.0 if shards(setup)[0] > 1 else 6.0) * updated
    return (4.0 if setup.gradient_bytes < 4 else traits.step_bytes) * shard


_family_of = lru_cache(maxsize=256)(family_of)

GRACE_HOPPER_BYTES = 3.2 * GIBI
"""Memory of GH200 outside the allocator, with the communicators of any plan: ``total_mb`` less ``reserved`` in runs of
Aceso on Alps, 3.8 GiB of four tensor ranks in a node, 2.9 and 3.1 GiB of 64 ranks with data and pipeline axes
(``aceso_validation_clariden`` of github.com/eth-easl/sailor). The driver keeps more for memory that the processor
shares, and buffers for Slingshot lie in the host."""
_LARGE_CUBLAS_BYTES, _CUBLAS_BYTES = 32 * MEBI, 8 * MEBI
_GROUPED_STREAMS = 4
_LARGE_GROUPED_BYTES, _GROUPED_BYTES = 32 * MEBI, 4 * MEBI
"""Transformer Engine runs the products of a group on four streams (``NUM_CUBLASLT_STREAMS``), each with a workspace of
its own: 32 MiB from Hopper on, 4 MiB before (``get_multi_stream_cublas_workspace``)."""
_CAPTURED_WORKSPACES = 2
"""cuBLAS has a workspace for each thread and stream: graphs are captured on a stream of their own, by the threads of
forward and backward (``torch.cuda.make_graphed_callables``)."""


def workspace_bytes(traits: MemoryTraits, setup: TrainingSetup, hardware: Hardware) -> float:
    """Library workspaces inside the allocator; fixed where ``CUBLAS_WORKSPACE_CONFIG`` sets their size."""
    family = _family_of(hardware.device_name)
    own = traits.workspace_bytes.get(family, OLDER_WORKSPACE_BYTES)
    if setup.fixed_workspaces and family != "hopper":
        own += traits.fixed_workspace_bytes
    if setup.grouped_products and setup.stack is Stack.TRANSFORMER_ENGINE:
        recent = family in ("hopper", "blackwell")
        own += _GROUPED_STREAMS * (_LARGE_GROUPED_BYTES if recent else _GROUPED_BYTES)
    if setup.captured_graphs or setup.captured_step:
        large = setup.fixed_workspaces or family == "hopper"
        own += _CAPTURED_WORKSPACES * (_LARGE_CUBLAS_BYTES if large else _CUBLAS_BYTES)
    return own


def context_bytes(setup: TrainingSetup, traits: MemoryTraits, hardware: Hardware) -> float:
    """Driver context, and one communicator for each axis; ranks count along tensor, context, data, pipeline axis."""
    if "GH200" in hardware.device_name:
        return GRACE_HOPPER_BYTES
    total, stride = traits.context_bytes, 1
    if setup.eager_kernels:
        total += EAGER_KERNELS_BYTES.get(_family_of(hardware.device_name), OLDER_EAGER_KERNELS_BYTES)
    for size in (setup.tp, setup.cp, setup.dp):
        stride *= size
        if size > 1:
            across_nodes = stride > hardware.devices_per_node
            total += traits.network_communicator_bytes if across_nodes else traits.communicator_bytes
    if setup.pp > 1:
        across_nodes = stride * setup.pp > hardware.devices_per_node
        total += traits.network_pair_bytes if across_nodes else traits.communicator_bytes
    return total + (traits.communicator_bytes if setup.ep > 1 else 0.0)
