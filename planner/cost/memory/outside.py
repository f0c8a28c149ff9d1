"""What a device holds beside the tensors of a run: workspaces of libraries, driver context, communicators."""

from __future__ import annotations

from functools import lru_cache

from planner.cost.memory_traits import (
    EAGER_KERNELS_BYTES,
    GIBI,
    MEBI,
    OLDER_EAGER_KERNELS_BYTES,
    OLDER_WORKSPACE_BYTES,
    MemoryTraits,
)
from planner.cost.stacks import Stack, family_of
from planner.cost.training_run import TrainingSetup
from simulator.hardware import Hardware

_family_of = lru_cache(maxsize=256)(family_of)

GRACE_HOPPER_BYTES = 3.2 * GIBI
"""What GH200 holds outside the allocator, communicators of any plan included: ``total_mb`` less ``reserved`` in runs of
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
