"""What the states of a rank take besides messages: sums over micro-batches, the update, and the way to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.work import update_traffic
from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.storage import Storage, Storages
from planner.search.stages.fragments import FloatArray, IntArray
from simulator.corrections import kernel_factor
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.program import Kernel
from simulator.timing import host_memory_time, host_time

if TYPE_CHECKING:
    from planner.search.units.labels import UnitLabels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateTimes(Storage):
    """How long a rank works on the states that it holds. Elements that live on the host take as long as on a device."""

    hardware: Hardware

    def accumulation_s(
        self, labels: UnitLabels, elements: FloatArray, storages: Storages, trained: int | IntArray
    ) -> FloatArray:
        """Seconds (storages, ways) in which a micro-batch's gradients are added to those before.

        Two are read and one is written. The first micro-batch's are taken as they are. They are as large as operators
        write them, or shards.
        """
        c, held = storages.placed, elements / storages.shards
        if c.micro_batches == 1:
            return np.zeros_like(held)
        moved = 3.0 * np.where(storages.each, held, elements + labels.unsummed_elements) * DTYPE_BYTES[self.dtype]
        seconds = self._kernels_s(Kernel.ACCUMULATION, np.zeros_like(moved), moved, c.devices, trained)
        return seconds * (1 - 1 / c.micro_batches)

    def _kernels_s(
        self, kernel: Kernel, flops: FloatArray, moved: FloatArray, devices: int, count: int | IntArray
    ) -> FloatArray:
        """Seconds (n,) of work that `count` kernels share."""
        seconds = count * kernel_time(self.hardware, kernel, self.dtype, flops / count, moved / count)
        return np.where(moved > 0, seconds * kernel_factor(self.hardware, kernel, self.dtype, devices), 0.0)

    def update_s(self, elements: FloatArray, storages: Storages, trained: int | IntArray = 1) -> FloatArray:
        """Seconds of the update of the states that a rank holds, or of its host's, with the way there and back."""
        c = storages.placed
        return self.held_update_s(elements / storages.shards, c.devices, trained, offload=storages.offload)

    def held_update_s(
        self, held: FloatArray, devices: int, trained: int | IntArray = 1, *, offload: bool = False
    ) -> FloatArray:
        """`update_s` by the elements that a rank holds."""
        traffic = held * update_traffic(self.optimizer, self.dtype)
        if offload:
            slowdown = kernel_factor(self.hardware, Kernel.OPTIMIZER, self.dtype, devices)
            update = slowdown * self.hardware.kernels[Kernel.OPTIMIZER].overhead_s
            overhead = trained * (update + host_time(self.hardware, 0.0, copies=2.0))
            copies = host_time(self.hardware, 2.0 * held * DTYPE_BYTES[self.dtype], copies=0.0)
            found = overhead + host_memory_time(self.hardware, traffic) + copies
            return np.asarray(np.where(traffic > 0, found, 0.0))
        return self._kernels_s(Kernel.OPTIMIZER, held * self.optimizer.flops, traffic, devices, trained)
