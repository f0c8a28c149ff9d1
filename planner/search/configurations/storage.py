"""What a rank holds of parameters, gradients and optimizer states, and how long it works on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.cost.work import Optimizer, state_bytes, update_traffic
from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.configuration import Configuration
from planner.search.configurations.passes import BoolArray
from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.units.records import RECOMPUTE
from simulator.corrections import kernel_factor
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.program import Kernel
from simulator.timing import host_memory_time, host_time

if TYPE_CHECKING:
    from planner.search.units.labels import UnitLabels


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storages:
    """Ways to store the states of one placed configuration, all on the devices or all on the host.

    Attributes
    ----------
    ways : configurations that differ in their level of ZeRO, the ranks that share states, and buckets alone
    shards : (storages, 1) ranks that states are shared out to
    whole, zero3 : (storages, 1) whether nothing is sharded, or everything
    in_shards : (storages, 1) whether gradients are kept in shards
    offload : whether states live on the host
    each : (storages, 1) whether every micro-batch's gradients are reduce-scattered
    """

    ways: tuple[Configuration, ...]
    shards: IntArray
    whole: BoolArray
    zero3: BoolArray
    in_shards: BoolArray
    each: BoolArray
    offload: bool

    @classmethod
    def of(cls, ways: Sequence[Configuration]) -> Storages:
        """Several ways to store the states of the same units."""
        levels = [way.optimizer_sharding for way in ways]
        return cls(
            ways=tuple(ways),
            shards=np.array([[sharing_ranks(way)] for way in ways]),
            whole=_column(level == "none" for level in levels),
            zero3=_column(level == "zero3" for level in levels),
            in_shards=_column(level in ("zero2", "zero3") for level in levels),
            each=_column(scatters_each(way) for way in ways),
            offload=ways[0].offload,
        )

    @property
    def placed(self) -> Configuration:
        """What all of them share."""
        return self.ways[0]


def _column(values: Iterable[bool]) -> BoolArray:
    """(storages, 1) of what holds of each."""
    return np.array([[value] for value in values])


def sharing_ranks(configuration: Configuration) -> int:
    """Ranks that optimizer states are shared out to."""
    c = configuration
    return 1 if c.optimizer_sharding == "none" else (c.shard_size or c.data)


def scatters_each(configuration: Configuration) -> bool:
    """Whether every micro-batch's gradients are reduce-scattered."""
    c = configuration
    return c.optimizer_sharding == "zero3" or (c.optimizer_sharding == "zero2" and c.micro_batches > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Memory that software takes where it differs from that of the network's operators.

    Attributes
    ----------
    layer : bytes that a layer keeps for its backward pass in each mode of recomputation, by ranks of the tensor,
        context and expert axes and samples of a micro-batch; None where it keeps what its operators do
    alone : bytes that its operators keep of one sample on one device, by mode
    shares_sequence : whether tensor ranks may share what lies between their products, so that they share all
    in_flight : so many times as much where several micro-batches are in flight
    gradient_bytes : of one element of the sums of gradients; 0 for that of the parameters
    whole_between : between the micro-batches of a pipeline ZeRO-3 keeps parameters and gradients whole
    fixed_bytes : of buffers that stand on every rank
    """

    layer: Callable[[int, int, int, int], tuple[float, ...]] | None = None
    alone: tuple[float, ...] = ()
    shares_sequence: bool = True
    in_flight: float = 1.0
    gradient_bytes: float = 0.0
    whole_between: bool = False
    fixed_bytes: float = 0.0

    def _layer_bytes(self, c: Configuration) -> FloatArray:
        assert self.layer is not None  # asked before
        several = c.pipeline > 1 and c.micro_batches > 1
        kept = np.array(self.layer(c.tensor, c.context, c.expert, c.micro_batch))
        return kept * (self.in_flight if several else 1.0)

    def kept_bytes(self, labels: UnitLabels, layer: UnitLabels, c: Configuration) -> FloatArray:
        """(ways,) bytes that units keep of a micro-batch, from those of the most frequent ``layer``.

        Of its ways those that keep least in a mode are what the software has; all others keep as many times as much as
        by their operators.
        """
        if self.layer is None:
            return labels.activation_bytes
        mode, times = np.asarray(layer.recompute, dtype=np.int64), np.ones(len(RECOMPUTE))
        for number, held in enumerate(self._layer_bytes(c).tolist()):
            least = float(layer.activation_bytes[mode == number].min(initial=np.inf))
            if 0 < least < np.inf:
                times[number] = held / least
        kept: FloatArray = labels.activation_bytes * times[np.asarray(labels.recompute, dtype=np.int64)]
        return kept

    def least_times(self, c: Configuration, modes: Sequence[int]) -> float:
        """How many times as much as their operators units keep at least, in some modes."""
        if self.layer is None:
            return 1.0
        ranks = c.context * (c.tensor if self.shares_sequence else 1)
        times = self._layer_bytes(c) * ranks / (np.array(self.alone) * c.micro_batch)
        return float(times[list(modes)].min())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Storage:
    """Where the numbers that are trained live, how many bytes that takes, and how long a rank works on them.

    ``limit_bytes`` is the memory of a device. ``host_elements`` are the trained elements that live in the memory of the
    host: their memory is free, and they take as long as on a device. With ``parameters_away`` all parameters do.
    ``software`` is what that holds.
    """

    hardware: Hardware
    optimizer: Optimizer
    dtype: str
    limit_bytes: float
    host_elements: float = 0.0
    parameters_away: bool = False
    software: Held = Held()

    def resident_bytes(self, labels: UnitLabels, storages: Storages) -> FloatArray:
        """Bytes (storages, ways) of parameters, gradients and optimizer states that stand through the step.

        A rank holds its shard of the parameters and, but for ZeRO-3, those that are gathered for the step; frozen ones
        are parameters alone, and whole but for ZeRO-3. Gradients
        are accumulated as backward operators write them, or with ZeRO-2 and 3 in shards. In a single micro-batch on one
        stage they come as activations go: what is larger counts.
        """
        c, shards, size = storages.placed, storages.shards, float(DTYPE_BYTES[self.dtype])
        elements = labels.parameter_elements + labels.expert_elements
        unsummed, each_held = elements + labels.unsummed_elements, elements / shards
        summed = self.software.gradient_bytes or size
        whole_between = storages.zero3 & (self.software.whole_between and c.pipeline > 1)
        held: FloatArray = np.zeros_like(each_held)
        if not self.parameters_away:
            frozen = labels.frozen_elements * size
            gathered = np.where(
                storages.whole, labels.gathered_elements, np.maximum(unsummed, labels.gathered_elements)
            )
            held = each_held * size + np.where(storages.zero3, frozen / shards, frozen)
            held += np.where(storages.zero3 & ~whole_between, 0.0, gathered * size)
        gradient = np.where(storages.in_shards & ~whole_between, each_held, unsummed) * summed
        if c.pipeline == 1 and c.micro_batches == 1:
            gradient = np.maximum(gradient - labels.activation_bytes, 0.0)
        state = 0.0 if storages.offload else state_bytes(self.optimizer, self.dtype) / shards
        resident: FloatArray = held + gradient + elements * state
        return resident

    def room_bytes(self, configuration: Configuration) -> float:
        """Memory of a device with what tables on the host leave free at least: every axis inside may shard them."""
        c, ranks = configuration, sharing_ranks(configuration)
        elements = self.host_elements / (c.tensor * c.context * c.expert)
        size = float(DTYPE_BYTES[self.dtype])
        copies = 1.0 if c.optimizer_sharding in ("zero1", "zero2") else 0.0
        state = 0.0 if c.offload else state_bytes(self.optimizer, self.dtype)
        room = self.limit_bytes - self.software.fixed_bytes
        return room + elements * (size * copies + (size + state) / ranks)

    def gathered_bytes(self, labels: UnitLabels, storages: Storages, bucket: FloatArray) -> FloatArray:
        """Bytes (storages, ways) of whole gradients and parameters that stand while a unit goes backward.

        ``bucket`` (storages, 1) are those of a message.
        """
        whole = labels.parameter_elements + labels.expert_elements + labels.unsummed_elements
        size = whole * DTYPE_BYTES[self.dtype]
        # A unit's parameters and gradients, and the parameters of the next one.
        two = 3.0 * size + 2.0 * labels.frozen_elements * DTYPE_BYTES[self.dtype]
        # Gradients wait for a full message.
        waiting = np.where(storages.each, np.minimum(size, bucket + size / 3), 0.0)
        return np.where(storages.zero3 | self.parameters_away, two, waiting)

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
