"""What the states of a storage take at least: seconds and bytes that count before any way to run units is known."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.schedule_shapes import ScheduleShape
from planner.search.configurations.space import Extent, offloaded, shardings
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.configurations.stored_ways import trained_parameters
from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.units.labels import StageTables, UnitLabels
from simulator.corrections import message_time
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import group_shape

PAYLOADS: FloatArray = np.exp2(np.arange(41, dtype=np.float64))
"""Bytes of messages at which links are compared."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastStates:
    """What the states of a storage take at least: seconds of a step (units,), and bytes on all ranks together."""

    stored: Configuration
    once_s: FloatArray
    standing_bytes: float

    @classmethod
    def of(cls, model: StepModel, tables: StageTables, stored: Configuration) -> LeastStates:
        """Work them out, whatever way the units are run."""
        standing = float(model.resident_bytes(least_states(tables)[0], stored) @ np.array(tables.counts))
        return cls(stored=stored, once_s=states_s(model, tables, stored), standing_bytes=standing)

    def fits(self, model: StepModel) -> bool:
        """Whether all ranks together have room for what stands through a step."""
        return self.standing_bytes <= self.stored.pipeline * model.room_bytes(self.stored)

    def stores_as(self, configuration: Configuration) -> bool:
        """Whether states are stored as in a configuration."""
        one, other = self.stored, configuration
        return (one.optimizer_sharding, one.shard_size, one.offload) == (
            other.optimizer_sharding, other.shard_size, other.offload,
        )  # fmt: skip

    def waited_s(self, model: StepModel, tables: StageTables, placed: Configuration) -> float:
        """Seconds that `even_bound` may grow by: states, and passes that keep no more than there is room for."""
        c, kept, again_s = placed, self._kept_bytes(model, placed), 0.0
        if kept < tables.saved_bytes:
            prices, priced_s = tables.priced
            again_s = max(0.0, float((priced_s - prices * kept).max()) - tables.least.whole_s)
        return (c.micro_batches * again_s + float(self.once_s @ np.array(tables.counts))) / c.pipeline

    def _kept_bytes(self, model: StepModel, c: Configuration) -> float:
        """Most bytes that one micro-batch may keep on all ranks of a pipeline together."""
        if any(model.unit_pins.swaps):
            return np.inf
        room, (once, least, most) = model.room_bytes(self.stored), _flights(model.shape(c), c.pipeline)
        # What stands lies on the ranks with most in flight, or on the others.
        return min(room * once - self.standing_bytes / most, (c.pipeline * room - self.standing_bytes) / least)


@lru_cache(maxsize=256)
def _flights(shape: ScheduleShape, ranks: int) -> tuple[float, float, float]:
    """Of the least micro-batches that chunks of each rank keep: the sum of one over them, the least and the most."""
    flight = np.full(ranks, np.inf)
    np.minimum.at(flight, shape.rank_of, shape.in_flight)
    flight *= max(gone for gone, _ in shape.mixes)
    return float((1 / flight).sum()), float(flight.min()), float(flight.max())


def least_states_of(extent: Extent, model: StepModel, tables: StageTables, placed: Configuration) -> list[LeastStates]:
    """What states take at least in every storage, on the devices and where they may move to the host."""
    stored = shardings(extent, placed)
    moved = (offloaded(extent, one) for one in stored)
    return [LeastStates.of(model, tables, one) for one in (*stored, *moved) if one is not None]


def states_s(model: StepModel, tables: StageTables, stored: Configuration) -> FloatArray:
    """(units,) least seconds of a step that the states of each unit take, whatever way it is run.

    Those are the update, the sums over micro-batches, and what messages over the data axis take from kernels.
    """
    labels, trained = least_states(tables)
    each_s, update_s = model.kernels_s(labels, stored, trained)
    lost = lost_to_messages(model, stored)
    lost_s = labels.parameter_elements * np.append(lost[:1], np.repeat(lost[1:], len(trained) - 1))
    found: FloatArray = stored.micro_batches * each_s + update_s + lost_s
    return found


def lost_to_messages(model: StepModel, configuration: Configuration) -> FloatArray:
    """(2,) least seconds that messages over the data axis take from kernels in a step for each element of a parameter.

    Of the first unit of the network and of others. Every byte travels at the best rate of any message.
    """
    c, lost = configuration, model.hardware.lost_to_messages
    if not lost or c.data == 1:
        return np.zeros(2)
    shards, stride, size = model.shards(c), c.stride("data"), DTYPE_BYTES[model.dtype]

    def rate(collective: Collective, ranks: int, apart: int) -> float:
        return size * least_byte_s(model.hardware, collective, ranks, apart)

    gather, scatter = (rate(one, shards, stride) for one in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    summed = rate(Collective.ALL_REDUCE, c.data // shards, stride * shards) / shards
    if c.optimizer_sharding == "zero3":
        # Gathered forward and backward; what begins the network is read forward only.
        return lost * (summed + c.micro_batches * np.array([gather + scatter, 2 * gather + scatter]))
    times = c.micro_batches if c.optimizer_sharding == "zero2" else 1
    return np.full(2, lost * (summed + gather + times * scatter))


@lru_cache(maxsize=256)
def least_states(tables: StageTables) -> tuple[UnitLabels, IntArray]:
    """Labels (units,) of ways that hold the least elements of each unit and take no time, and trained parameters.

    They keep all that gradients of a single micro-batch may take the place of.
    """
    nothing = np.zeros(len(tables.counts))
    none: dict[str, Any] = {field.name: nothing for field in fields(UnitLabels) if field.name != "assignments"}
    labels = UnitLabels(**none, assignments=())
    kept = np.full_like(nothing, np.inf)
    return replace(labels, parameter_elements=tables.least_elements, activation_bytes=kept), np.array(
        trained_parameters(tables)
    )


@lru_cache(maxsize=4096)
def least_byte_s(hardware: Hardware, collective: Collective, size: int, stride: int) -> float:
    """Least seconds of a byte in a message of any size of `PAYLOADS`, in groups of `size` ranks, `stride` apart."""
    if size == 1:
        return 0.0
    seconds = message_time(hardware, collective, PAYLOADS, group_shape(hardware, size, stride))
    return float((seconds / PAYLOADS).min())
