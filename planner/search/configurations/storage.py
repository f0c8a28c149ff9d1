"""What a rank of a configuration holds: parameters, gradients and states of the optimizer, whole or in shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.configuration import Configuration
from planner.search.stages.fragments import FloatArray
from planner.work import Optimizer, state_bytes

if TYPE_CHECKING:
    from planner.search.units.labels import UnitLabels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """Where the numbers that are trained live, and how many bytes that takes.

    ``limit_bytes`` is the memory of a device. ``host_elements`` are the trained elements that live in the memory of the
    host: their memory is free. With ``parameters_away`` all parameters do.
    """

    optimizer: Optimizer
    dtype: str
    limit_bytes: float
    host_elements: float = 0.0
    parameters_away: bool = False

    def shards(self, configuration: Configuration) -> int:
        """Ranks that optimizer states are shared out to."""
        c = configuration
        return 1 if c.optimizer_sharding == "none" else (c.shard_size or c.data)

    @staticmethod
    def scatters_each(c: Configuration) -> bool:
        """Whether every micro-batch's gradients are reduce-scattered."""
        return c.optimizer_sharding == "zero3" or (c.optimizer_sharding == "zero2" and c.micro_batches > 1)

    def resident_bytes(self, labels: UnitLabels, configuration: Configuration) -> FloatArray:
        """Bytes of parameters, gradients and optimizer states that stand through the step.

        A rank holds its shard of the parameters and, but for ZeRO-3, those that are gathered for the step; frozen ones
        are parameters alone, and whole but for ZeRO-3. Gradients
        are accumulated as backward operators write them, or with ZeRO-2 and 3 in shards. In a single micro-batch on one
        stage they come as activations go: what is larger counts.
        """
        c, shards = configuration, self.shards(configuration)
        size = float(DTYPE_BYTES[self.dtype])
        elements = labels.parameter_elements + labels.expert_elements
        unsummed = elements + labels.unsummed_elements
        frozen = labels.frozen_elements * size
        held = elements / shards * size + (frozen / shards if c.optimizer_sharding == "zero3" else frozen)
        if c.optimizer_sharding in ("zero1", "zero2"):
            held = held + np.maximum(unsummed, labels.gathered_elements) * size
        elif c.optimizer_sharding == "none":
            held = held + labels.gathered_elements * size
        if self.parameters_away:
            held = np.zeros_like(held)
        gradient = (elements / shards if c.optimizer_sharding in ("zero2", "zero3") else unsummed) * size
        if c.pipeline == 1 and c.micro_batches == 1:
            gradient = np.maximum(gradient - labels.activation_bytes, 0.0)
        state = 0.0 if c.offload else state_bytes(self.optimizer, self.dtype) / shards
        resident: FloatArray = held + gradient + elements * state
        return resident

    def room_bytes(self, configuration: Configuration) -> float:
        """Memory of a device with what tables on the host leave free at least: every axis inside may shard them."""
        c, shards = configuration, self.shards(configuration)
        elements = self.host_elements / (c.tensor * c.context * c.expert)
        size = float(DTYPE_BYTES[self.dtype])
        copies = 1.0 if c.optimizer_sharding in ("zero1", "zero2") else 0.0
        state = 0.0 if c.offload else state_bytes(self.optimizer, self.dtype)
        return self.limit_bytes + elements * (size * copies + (size + state) / shards)

    def gathered_bytes(self, labels: UnitLabels, c: Configuration, bucket: float) -> FloatArray:
        """Bytes of whole gradients and parameters that stand while a unit goes backward."""
        whole = labels.parameter_elements + labels.expert_elements + labels.unsummed_elements
        size = whole * DTYPE_BYTES[self.dtype]
        if c.optimizer_sharding == "zero3" or self.parameters_away:
            # A unit's parameters and gradients, and the parameters of the next one.
            return 3.0 * size + 2.0 * labels.frozen_elements * DTYPE_BYTES[self.dtype]
        if not self.scatters_each(c):
            return np.zeros_like(size)
        # Gradients wait for a full message.
        return np.minimum(size, bucket + size / 3)
