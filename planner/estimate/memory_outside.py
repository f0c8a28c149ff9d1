"""What a device holds beside the tensors of a run: workspaces of libraries, driver context, communicators."""

from __future__ import annotations

from functools import lru_cache

from planner.estimate.device_family import family_of
from planner.estimate.memory_traits import EAGER_KERNELS_BYTES, OLDER_WORKSPACE_BYTES, MemoryTraits
from planner.estimate.training_run import TrainingSetup
from simulator.hardware import Hardware

_family_of = lru_cache(maxsize=256)(family_of)


def workspace_bytes(traits: MemoryTraits, hardware: Hardware, *, fixed: bool) -> float:
    """Library workspaces inside the allocator; `fixed` where ``CUBLAS_WORKSPACE_CONFIG`` sets their size."""
    family = _family_of(hardware.device_name)
    own = traits.workspace_bytes.get(family, OLDER_WORKSPACE_BYTES)
    return own + (traits.fixed_workspace_bytes if fixed and family != "hopper" else 0.0)


def context_bytes(setup: TrainingSetup, traits: MemoryTraits, hardware: Hardware) -> float:
    """Driver context, and one communicator for each axis; ranks count along tensor, context, data, pipeline axis."""
    total, stride = traits.context_bytes + (EAGER_KERNELS_BYTES if setup.eager_kernels else 0.0), 1
    for size in (setup.tp, setup.cp, setup.dp):
        stride *= size
        if size > 1:
            across_nodes = stride > hardware.devices_per_node
            total += traits.network_communicator_bytes if across_nodes else traits.communicator_bytes
    if setup.pp > 1:
        across_nodes = stride * setup.pp > hardware.devices_per_node
        total += traits.network_pair_bytes if across_nodes else traits.communicator_bytes
    return total + (traits.communicator_bytes if setup.ep > 1 else 0.0)
