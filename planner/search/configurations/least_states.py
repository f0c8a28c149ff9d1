"""What the states of a storage take at least: seconds and bytes that count before any way to run units is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np

from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.passes import BoolArray
from planner.search.configurations.schedule_shapes import ScheduleShape
from planner.search.configurations.space import Extent, offloaded, storages
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.configurations.storage import Storages, scatters_each, sharing_ranks
from planner.search.configurations.stored_ways import trained_parameters
from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.units.labels import StageTables, UnitLabels
from simulator.corrections import message_time
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import group_shape

PAYLOADS: FloatArray = np.exp2(np.arange(41, dtype=np.float64))
"""Bytes of messages at which links are compared."""
MANY_ELEMENTS = 1e15
"""Elements of which an update takes its bytes' time alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastStates:
    """What the states of a storage take at least: seconds of a step (units,), and bytes on all ranks together.

    ``sent_bytes`` are those of the gradients that ranks of all stages sum over the data axis, 0 where a unit has none.
    """

    stored: Configuration
    once_s: FloatArray
    standing_bytes: float
    sent_bytes: float

    def fits(self, model: StepModel) -> bool:
        """Whether all ranks together have room for what stands through a step."""
        return self.standing_bytes <= self.stored.pipeline * model.room_bytes(self.stored)

    def stores_as(self, configuration: Configuration) -> bool:
        """Whether states are stored as in a configuration."""
        one, other = self.stored, configuration
        return (one.optimizer_sharding, one.shard_size, one.offload) == (
            other.optimizer_sharding, other.shard_size, other.offload,
        )  # fmt: skip

    def gain_on_host_s(self, ways: Iterable[LeastStates], model: StepModel) -> float:
        """Most seconds of a step by which the host may update these states sooner, whatever way the units are run.

        ``ways`` are all there are. An update is launched alike on both, and on the host copied there and back besides,
        so that it is the sooner one only where it takes less time for each element; there is no limit then.
        """
        lags = _lags(model, self.stored.devices) and any(way.moves(self.stored) for way in ways)
        return np.inf if lags else 0.0

    def moves(self, configuration: Configuration) -> bool:
        """Whether states are stored as in a configuration, but on the host."""
        one, other = self.stored, configuration
        return (one.optimizer_sharding, one.shard_size, one.offload, other.offload) == (
            other.optimizer_sharding, other.shard_size, True, False,
        )  # fmt: skip

    def again_s(self, model: StepModel, tables: StageTables, placed: Configuration) -> float:
        """Seconds by which passes that keep no more than there is room for take longer, shared out over the ranks."""
        kept = self._kept_bytes(model, placed)
        if kept >= tables.saved_bytes:
            return 0.0
        prices, priced_s = tables.priced
        again_s = max(0.0, float((priced_s - prices * kept).max()) - tables.least.whole_s)
        return placed.micro_batches * again_s / placed.pipeline

    def last_s(self, model: StepModel, placed: Configuration) -> float:
        """Seconds of the last message of gradients, which no pass hides, whatever unit a backward pass ends with."""
        c, hardware = self.stored, model.hardware
        if not self.sent_bytes or c.data == 1:
            return 0.0
        # As `StepModel` fuses messages: all in one, or of half a bucket at least.
        payload = min(self.sent_bytes / (c.pipeline * placed.virtual), (c.bucket_bytes or model.bucket_bytes) / 2)
        shards, stride = sharing_ranks(c), c.stride("data")
        summed = least_message_s(hardware, Collective.ALL_REDUCE, c.data // shards, stride * shards, payload) / shards
        if scatters_each(c):
            return (1 - hardware.lost_to_messages) * summed
        whole = model.whole_sums and c.optimizer_sharding == "zero1"
        scatter = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
        scattered = least_message_s(hardware, scatter, shards, stride, payload)
        return (1 - hardware.lost_to_messages) * (summed + scattered)

    def _kept_bytes(self, model: StepModel, c: Configuration) -> float:
        """Most bytes that one micro-batch may keep on all ranks of a pipeline together."""
        if any(model.unit_pins.swaps):
            return np.inf
        room, (once, least, most) = model.room_bytes(self.stored), _flights(model.shape(c), c.pipeline)
        # What stands lies on the ranks with most in flight, or on the others.
        return min(room * once - self.standing_bytes / most, (c.pipeline * room - self.standing_bytes) / least)


@lru_cache(maxsize=4)
def _lags(model: StepModel, devices: int) -> bool:
    """Whether a device takes longer than its host for each element of an update."""
    here, there = (model.held_update_s(np.full(1, MANY_ELEMENTS), devices, offload=away) for away in (False, True))
    return bool(there[0] < here[0])


@lru_cache(maxsize=256)
def _flights(shape: ScheduleShape, ranks: int) -> tuple[float, float, float]:
    """Of the least micro-batches that chunks of each rank keep: the sum of one over them, the least and the most."""
    flight = np.full(ranks, np.inf)
    np.minimum.at(flight, shape.rank_of, shape.in_flight)
    flight *= max(gone for gone, _ in shape.mixes)
    return float((1 / flight).sum()), float(flight.min()), float(flight.max())


def least_states_of(extent: Extent, model: StepModel, tables: StageTables, placed: Configuration) -> list[LeastStates]:
    """What states take at least in every storage, on the devices and where they may move to the host."""
    if not (here := storages(extent, placed)):
        return []  # pins leave none
    there = [(number, moved) for number, way in enumerate(here) if (moved := offloaded(extent, way)) is not None]
    messages_s = _messages_s(model, tables, here)
    moved_s = messages_s[[number for number, _ in there]]
    return [
        *_least_of(model, tables, here, messages_s),
        *_least_of(model, tables, [moved for _, moved in there], moved_s),
    ]


def least_states_in(model: StepModel, tables: StageTables, stored: Configuration) -> LeastStates:
    """What the states of one storage take at least."""
    (least,) = _least_of(model, tables, [stored], _messages_s(model, tables, [stored]))
    return least


def _least_of(
    model: StepModel, tables: StageTables, ways: Sequence[Configuration], messages_s: FloatArray
) -> list[LeastStates]:
    """What states take at least in storages that are alike but for how states are stored, all here or on the host.

    ``messages_s`` (ways, units) are what they take but for their update.
    """
    if not ways:
        return []  # none may move
    c, sent_bytes = ways[0], least_states(tables)[-1] * DTYPE_BYTES[model.dtype]
    kept = tuple((way.optimizer_sharding, sharing_ranks(way)) for way in ways)
    once = c.pipeline == c.micro_batches == 1
    update_s, standing = _updated(model, tables, kept, c.offload, once, c.devices)
    return [
        LeastStates(stored=way, once_s=once_s, standing_bytes=bytes_held, sent_bytes=sent_bytes)
        for way, once_s, bytes_held in zip(ways, messages_s + update_s, standing, strict=True)
    ]


@lru_cache(maxsize=1024)
def _updated(
    model: StepModel, tables: StageTables, kept: tuple[tuple[str, int], ...], offload: bool, once: bool, devices: int
) -> tuple[FloatArray, tuple[float, ...]]:
    """(ways, units) least seconds of the update in each way to shard states, and bytes that stand, (ways,).

    ``kept`` are the levels of ZeRO with the ranks that share states; ``once`` says that gradients may take the place of
    activations: one stage and a single micro-batch.
    """
    labels, trained, counts, _ = least_states(tables)
    ways = [
        Configuration(pipeline=1 if once else 2, optimizer_sharding=level, shard_size=shards, offload=offload)
        for level, shards in kept
    ]
    held = labels.parameter_elements / np.array([[shards] for _, shards in kept], dtype=np.float64)
    update_s = model.held_update_s(held, devices, np.broadcast_to(trained, held.shape), offload=offload)
    return update_s, tuple(float(held_bytes @ counts) for held_bytes in model.resident_bytes(labels, Storages.of(ways)))


def least_once_s(ways: Sequence[LeastStates]) -> FloatArray:
    """(units,) least seconds of a step that the states of each unit take in any of several storages."""
    least: FloatArray = np.min([way.once_s for way in ways], axis=0)
    return least


def _messages_s(model: StepModel, tables: StageTables, ways: Sequence[Configuration]) -> FloatArray:
    """(ways, units) least seconds of a step that the states of each unit take but for their update, wherever they are.

    Those are the sums over micro-batches, what messages over the data axis take from kernels, and those that nothing
    hides.
    """
    labels, trained, *_ = least_states(tables)
    elements, c = labels.parameter_elements, ways[0]
    lost = np.array([lost_to_messages(model, way) for way in ways])
    found: FloatArray = elements * lost[:, np.minimum(np.arange(len(elements)), 1)]
    found += np.array([exposed_s(model, tables, way) for way in ways])
    if c.micro_batches > 1:
        added = [not scatters_each(way) for way in ways]
        first = Storages.of(ways[added.index(True) if any(added) else 0 :][:1])
        found[added] += c.micro_batches * model.accumulation_s(labels, elements, first, trained)
    return found


def exposed_s(model: StepModel, tables: StageTables, stored: Configuration) -> FloatArray:
    """(units,) least seconds of a step of messages beside no pass.

    Those are the first gather of ZeRO-1 and 2 on each rank, of any size, and with ZeRO-3 those at the ends of chunks in
    every micro-batch (in GPipe once), or all where nothing overlaps.
    """
    c, hardware, units = stored, model.hardware, sum(tables.counts)
    if c.optimizer_sharding == "none" or c.data == 1:
        return np.zeros(len(tables.counts))
    group = (sharing_ranks(c), c.stride("data"))
    if c.optimizer_sharding != "zero3":
        gather_s = 0.0
        if hardware.overlaps_communication:
            gather_s = least_message_s(hardware, Collective.ALL_GATHER, *group, 1.0)
        return np.full(len(tables.counts), c.pipeline / units * (1 - hardware.lost_to_messages) * gather_s)
    trained, places = _places(tables, DTYPE_BYTES[model.dtype])
    gather, scatter = (
        trained * _of_payloads_s(hardware, one, *group, sharded=True)[places]
        for one in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
    )
    if not hardware.overlaps_communication:
        return np.asarray(c.micro_batches * (2 * gather + scatter))
    times = (1 if c.in_a_row else c.micro_batches) * (1 - hardware.lost_to_messages)
    found = (times * (c.pipeline - 1) / max(1, units - 1)) * (gather + scatter)
    found[0] = times * (gather[0] + scatter[0])
    return np.asarray(found)


@lru_cache(maxsize=256)
def _places(tables: StageTables, element_bytes: int) -> tuple[BoolArray, IntArray]:
    """(units,) each: whether a unit has parameters, and the place of the least bytes of them among `PAYLOADS`."""
    sizes = np.log2(np.maximum(1.0, tables.least_elements * element_bytes))
    return tables.least_elements > 0, sizes.astype(np.int64)


def lost_to_messages(model: StepModel, configuration: Configuration) -> tuple[float, float]:
    """Least seconds that messages over the data axis take from kernels in a step for each element of a parameter.

    Of the first unit of the network and of others. Every byte travels at the best rate of any message.
    """
    c, lost = configuration, model.hardware.lost_to_messages
    if not lost or c.data == 1:
        return 0.0, 0.0
    shards, stride, size = sharing_ranks(c), c.stride("data"), DTYPE_BYTES[model.dtype]

    def rate(collective: Collective, ranks: int, apart: int) -> float:
        return size * least_byte_s(model.hardware, collective, ranks, apart)

    gather, scatter = (rate(one, shards, stride) for one in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER))
    summed = rate(Collective.ALL_REDUCE, c.data // shards, stride * shards) / shards
    if c.optimizer_sharding == "zero3":
        # Gathered forward and backward; what begins the network is read forward only.
        once, twice = c.micro_batches * (gather + scatter), c.micro_batches * (2 * gather + scatter)
        return lost * (summed + once), lost * (summed + twice)
    times = c.micro_batches if c.optimizer_sharding == "zero2" else 1
    each = lost * (summed + gather + times * scatter)
    return each, each


@lru_cache(maxsize=256)
def least_states(tables: StageTables) -> tuple[UnitLabels, IntArray, IntArray, float]:
    """Labels (units,) of ways that hold the least elements of each unit and take no time, and trained parameters.

    They keep all that gradients of a single micro-batch may take the place of. Behind them how many units each stands
    for, and the least elements of all, 0 where a unit has none.
    """
    nothing = np.zeros(len(tables.counts))
    none: dict[str, Any] = {field.name: nothing for field in fields(UnitLabels) if field.name != "assignments"}
    labels = UnitLabels(**none, assignments=())
    kept, least, counts = np.full_like(nothing, np.inf), tables.least_elements, np.array(tables.counts)
    sent = float(least @ counts) if least.all() else 0.0
    labels = replace(labels, parameter_elements=least, frozen_elements=tables.least_frozen, activation_bytes=kept)
    return labels, np.array(trained_parameters(tables)), counts, sent


def least_message_s(hardware: Hardware, collective: Collective, size: int, stride: int, payload: float) -> float:
    """Least seconds of a message of `payload` bytes or more, in groups of `size` ranks, `stride` apart."""
    return float(_of_payloads_s(hardware, collective, size, stride)[int(np.log2(max(1.0, payload)))])


@lru_cache(maxsize=4096)
def _of_payloads_s(
    hardware: Hardware, collective: Collective, size: int, stride: int, *, sharded: bool = False
) -> FloatArray:
    """Least seconds of messages of each size of `PAYLOADS` or more."""
    if size == 1:
        return np.zeros_like(PAYLOADS)
    seconds = payloads_s(hardware, collective, size, stride, sharded=sharded)
    least: FloatArray = np.minimum.accumulate(seconds[::-1])[::-1]
    return least


@lru_cache(maxsize=4096)
def least_byte_s(hardware: Hardware, collective: Collective, size: int, stride: int) -> float:
    """Least seconds of a byte in a message of any size of `PAYLOADS`, in groups of `size` ranks, `stride` apart."""
    return 0.0 if size == 1 else float((payloads_s(hardware, collective, size, stride) / PAYLOADS).min())


@lru_cache(maxsize=4096)
def payloads_s(
    hardware: Hardware, collective: Collective, size: int, stride: int, *, sharded: bool = False, axis: str = ""
) -> FloatArray:
    """Seconds of messages of each size of `PAYLOADS`."""
    return message_time(hardware, collective, PAYLOADS, group_shape(hardware, size, stride), sharded, axis)
