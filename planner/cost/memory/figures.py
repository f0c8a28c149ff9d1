"""What tools that measure device memory show of a run, and what of a stage it consists of.

Three figures are told apart. *Allocated* is the largest sum of live tensors, what ``max_memory_allocated`` shows.
*Reserved* is what the framework's allocator holds for them, fragments included. *Device total* adds what lies
outside the allocator, driver context and communicators, and is what ``nvidia-smi`` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Literal

import numpy as np

from planner.cost.software_file import shipped_stacks
from simulator.program import BufferKind


class MemoryFigure(StrEnum):
    """What a tool that measures memory shows."""

    ALLOCATED = "allocated"
    """``torch.cuda.max_memory_allocated`` of the fullest device."""
    LAST_STAGE_ALLOCATED = "last_stage_allocated"
    """The same on the last pipeline stage, whose last rank writes Megatron's log."""
    FIRST_STEP_ALLOCATED = "first_step_allocated"
    """The same by the end of the first step, whose update allocates the moments when activations have gone."""
    RESERVED = "reserved"
    """``torch.cuda.max_memory_reserved`` of the fullest device."""
    DEVICE = "device"
    """``nvidia-smi``, ``npu-smi``."""
    FIRST_NODE_DEVICE = "first_node_device"
    """The same on the node of the first ranks, where a run is started and looked after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one rank of one pipeline stage at its peak; the first nine, less ``late``, are ``allocated_bytes``.

    ``working`` are the recomputed values and gradients of the layer that goes back, or the logits and the loss where
    these are larger; ``gathered_parameters`` whole layers of sharded parameters; ``allocator_slack`` what the
    allocator holds besides; ``context`` what lies outside the allocator.

    Four more are apart: ``headroom`` is the share of ``allocator_slack`` that a run needs in order to fit but that no
    tool shows while memory is plentiful, none where gradients go and come with every micro-batch; ``cached`` are free
    blocks that tools show while memory is plentiful and that the allocator gives back before a run fails; ``late`` is
    the share of ``gradients`` that is not there yet when the others are at their fullest; ``first_step_bytes`` are the
    live tensors of the first step.
    """

    parameters: float
    gradients: float
    master_weights: float
    moments: float
    activations: float
    working: float
    gathered_parameters: float
    communication: float
    workspace: float
    allocator_slack: float
    context: float
    headroom: float = 0.0
    cached: float = 0.0
    late: float = 0.0
    first_step_bytes: float = 0.0

    @property
    def allocated_bytes(self) -> float:
        """Live tensors."""
        return (
            self.parameters + self.gradients + self.master_weights + self.moments + self.activations
            + self.working + self.gathered_parameters + self.communication + self.workspace - self.late
        )  # fmt: skip

    @property
    def reserved_bytes(self) -> float:
        """What the framework's allocator holds."""
        return self.allocated_bytes + self.allocator_slack

    @property
    def device_bytes(self) -> float:
        """What the device holds for the process."""
        return self.reserved_bytes + self.context

    def shown_bytes(self, limit: float, *, outside: bool = False) -> float:
        """What tools show of the allocator on a device of which it may take `limit`; with what is `outside` of it."""
        needed = self.reserved_bytes - self.headroom
        shown = max(needed, min(needed + self.cached, limit - self.context))
        return shown + self.context if outside else shown

    def by_kind(self) -> dict[str, float]:
        """Bytes that the allocator holds, by `simulator.program.BufferKind`; they add up to ``reserved_bytes``."""
        held = {
            BufferKind.PARAMETER: self.parameters,
            BufferKind.GRADIENT: self.gradients - self.late,
            BufferKind.OPTIMIZER_STATE: self.master_weights + self.moments,
            BufferKind.ACTIVATION: self.activations,
            BufferKind.RECOMPUTED: self.working,
            BufferKind.GATHERED_PARAMETER: self.gathered_parameters,
            BufferKind.COMMUNICATION: self.communication,
            BufferKind.WORKSPACE: self.workspace,
            BufferKind.ALLOCATOR_SLACK: self.allocator_slack,
        }
        return {str(kind): size for kind, size in held.items() if size}

    def components(self) -> dict[str, float]:
        """Every part by name, gradients as far as they are there; they add up to ``device_bytes``."""
        found = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NO_COMPONENTS}
        return {**found, "gradients": self.gradients - self.late}


_NO_COMPONENTS = ("headroom", "cached", "late", "first_step_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of every pipeline stage; the figures of the run are those of the fullest stage.

    The first ``first_node_stages`` of the stages lie on the first node.
    """

    stages: tuple[StageMemory, ...]
    limit_bytes: float
    first_node_stages: int = 1

    @property
    def fullest(self) -> StageMemory:
        """The stage whose allocator needs most: the one that decides."""
        return max(self.stages, key=lambda stage: stage.reserved_bytes)

    @property
    def allocated_bytes(self) -> float:
        """Peak of live tensors."""
        return max(stage.allocated_bytes for stage in self.stages)

    @property
    def reserved_bytes(self) -> float:
        """Peak of the allocator."""
        return self.fullest.reserved_bytes

    @property
    def device_bytes(self) -> float:
        """Peak of the device."""
        return self.fullest.device_bytes

    def figures(self) -> dict[MemoryFigure, float]:
        """What the tools that measure memory would show."""
        devices = [stage.shown_bytes(self.limit_bytes, outside=True) for stage in self.stages]
        return {
            MemoryFigure.ALLOCATED: self.allocated_bytes,
            MemoryFigure.LAST_STAGE_ALLOCATED: self.stages[-1].allocated_bytes,
            MemoryFigure.FIRST_STEP_ALLOCATED: max(stage.first_step_bytes for stage in self.stages),
            MemoryFigure.RESERVED: max(stage.shown_bytes(self.limit_bytes) for stage in self.stages),
            MemoryFigure.DEVICE: max(devices),
            MemoryFigure.FIRST_NODE_DEVICE: max(devices[: self.first_node_stages]),
        }

    @property
    def fits(self) -> bool:
        """Whether the allocator gets what it needs."""
        return self.reserved_bytes <= self.limit_bytes


Basis = Literal["software", "tensors"]


def probability_to_fit(predicted_bytes: float, limit_bytes: float, basis: Basis) -> float:
    """Probability that a run takes no more than `limit_bytes`, from 0 to 1.

    It is the share of earlier predictions whose measurement was at most ``limit_bytes / predicted_bytes`` times the
    prediction. Between the quantiles that ``hw_profiles/software/stacks.yaml`` lists it is interpolated linearly, as if
    one prediction more had been below the least and one above the greatest.

    Parameters
    ----------
    basis
        What the prediction counts: all that named software holds, or live tensors alone.
    """
    if predicted_bytes <= 0:
        return 1.0
    quantiles, rows = _quantiles(basis)
    share = np.linspace(1.0, rows, len(quantiles)) / (rows + 1.0)
    room = limit_bytes / predicted_bytes
    return float(np.interp(room, quantiles, share, left=0.0, right=1.0))


@lru_cache(maxsize=2)
def _quantiles(basis: Basis) -> tuple[tuple[float, ...], int]:
    errors = shipped_stacks().memory_errors[basis]
    return tuple(errors.quantiles), errors.rows
