"""What the states of a storage take at least: seconds and bytes that count before any way to run units is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import compress
from typing import Any

import numpy as np

from planner.graph.operator_graph import DTYPE_BYTES
from planner.search.configurations.passes import BoolArray
from planner.search.configurations.schedule_shapes import ScheduleShape
from planner.search.configurations.space import Extent, offloaded
from planner.search.configurations.step_model import Configuration, StepModel
from planner.search.configurations.storage import Storages, scatters_each, sharing_ranks
from planner.search.configurations.stored_ways import trained_parameters
from planner.search.stages.fragments import FloatArray, IntArray
from planner.search.units.labels import StageTables, UnitLabels
from simulator.corrections import message_time, telling_marks
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import GroupShape, group_shape

PAYLOADS: FloatArray = np.exp2(np.arange(41, dtype=np.float64))
"""Bytes of messages at which links are compared."""
MANY_ELEMENTS = 1e15
"""Elements of which an update takes its bytes' time alone."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LeastStates:
    """What the states of several storages of a placed configuration take at least.

    Attributes
    ----------
    ways, away : how they are stored, and whether on the host where the configuration says on the devices
    once_s, whole_s : seconds of a step, of each unit (storages, units) and of all of them (storages,)
    standing_bytes, room_bytes : (storages,) bytes that stand through a step on all ranks together, and memory of a rank
    sent_bytes : of the gradients that ranks of all stages sum over the data axis, 0 where a unit has none
    """

    ways: tuple[Configuration, ...]
    away: tuple[bool, ...]
    once_s: FloatArray
    whole_s: FloatArray
    standing_bytes: FloatArray
    room_bytes: FloatArray
    sent_bytes: float

    @property
    def fits(self) -> BoolArray:
        """(storages,) whether all ranks together have room for what stands through the step."""
        fits: BoolArray = self.standing_bytes <= self.ways[0].pipeline * self.room_bytes
        return fits

    def take(self, picked: BoolArray) -> LeastStates:
        """Some of the storages."""
        ways, away = tuple(compress(self.ways, picked.tolist())), tuple(compress(self.away, picked.tolist()))
        rows = (self.once_s, self.whole_s, self.standing_bytes, self.room_bytes)
        once_s, whole_s, standing_bytes, room_bytes = (each[picked] for each in rows)
        return LeastStates(
            ways=ways, away=away, once_s=once_s, whole_s=whole_s, standing_bytes=standing_bytes,
            room_bytes=room_bytes, sent_bytes=self.sent_bytes,
        )  # fmt: skip

    @property
    def anywhere_s(self) -> tuple[FloatArray, IntArray]:
        """``once_s`` of each way, on the host or on the devices as is less, and (storages,) the number of its way."""
        numbers: dict[Configuration, int] = {}
        of = np.array([numbers.setdefault(way, len(numbers)) for way in self.ways])
        least = np.full((len(numbers), self.once_s.shape[1]), np.inf)
        np.minimum.at(least, of, self.once_s)
        return least, of

    @property
    def stored(self) -> list[Configuration]:
        """The placed configuration in each of the storages."""
        each = zip(self.ways, self.away, strict=True)
        return [replace(way, offload=True) if moved else way for way, moved in each]

    @cached_property
    def places(self) -> dict[tuple[str, int, bool], int]:
        """Number of each storage by its level of ZeRO, ranks that share states, and whether they are on the host."""
        each = enumerate(zip(self.ways, self.away, strict=True))
        return {(way.optimizer_sharding, way.shard_size, way.offload or moved): n for n, (way, moved) in each}

    def place(self, configuration: Configuration) -> int:
        """Number of the storage in which states are stored as in a configuration."""
        c = configuration
        return self.places[c.optimizer_sharding, c.shard_size, c.offload]

    def gain_on_host_s(self, configuration: Configuration, model: StepModel) -> float:
        """Most seconds of a step by which the host may update states sooner, whatever way the units are run.

        An update is launched alike on both, and on the host copied there and back besides, so that it is the sooner one
        only where it takes less time for each element; there is no limit then.
        """
        c = configuration
        moves = not c.offload and (c.optimizer_sharding, c.shard_size, True) in self.places
        return np.inf if moves and _lags(model, configuration.devices) else 0.0

    def again_s(self, model: StepModel, tables: StageTables, placed: Configuration) -> FloatArray:
        """(storages,) seconds by which passes that keep no more than there is room for take longer, of each rank."""
        kept = self._kept_bytes(model, placed) / model.software.least_times(placed, tables.modes)
        if np.all(kept >= tables.saved_bytes):
            return np.zeros_like(kept)
        prices, priced_s = tables.priced
        again_s = np.maximum(0.0, (priced_s - prices * kept[:, None]).max(axis=1) - tables.least.whole_s)
        return np.where(kept >= tables.saved_bytes, 0.0, placed.micro_batches * again_s / placed.pipeline)

    def last_s(self, model: StepModel, placed: Configuration) -> FloatArray:
        """(storages,) seconds of the last message of gradients, which no pass hides, whatever unit a pass ends with."""
        return _last_s(self, model, placed.virtual)

    def _kept_bytes(self, model: StepModel, c: Configuration) -> FloatArray:
        """(storages,) most bytes that one micro-batch may keep on all ranks of a pipeline together."""
        if any(model.unit_pins.swaps):
            return np.full(len(self.ways), np.inf)
        room, (once, least, most) = self.room_bytes, _flights(model.shape(c), c.pipeline)
        # What stands lies on the ranks with most in flight, or on the others.
        return np.minimum(room * once - self.standing_bytes / most, (c.pipeline * room - self.standing_bytes) / least)


@lru_cache(maxsize=256)
def _last_s(states: LeastStates, model: StepModel, virtual: int) -> FloatArray:
    """`LeastStates.last_s` by what it depends on."""
    found = np.zeros(len(states.ways))
    for number, way in enumerate(states.ways if states.sent_bytes and states.ways[0].data > 1 else ()):
        # As `StepModel` fuses messages: all in one, or of half a bucket at least.
        payload = min(states.sent_bytes / (way.pipeline * virtual), (way.bucket_bytes or model.bucket_bytes) / 2)
        found[number] = _last_message_s(model, way, payload)
    return found


def _last_message_s(model: StepModel, way: Configuration, payload: float) -> float:
    """Least seconds of a message of so many gradients, on its way to where they are stored."""
    hardware, shards, stride = model.hardware, sharing_ranks(way), way.stride("data")
    summed = least_message_s(hardware, Collective.ALL_REDUCE, way.data // shards, stride * shards, payload) / shards
    if scatters_each(way):
        return (1 - hardware.lost_to_messages) * summed
    whole = model.whole_sums and way.optimizer_sharding == "zero1"
    scatter = Collective.ALL_REDUCE if whole else Collective.REDUCE_SCATTER
    scattered = least_message_s(hardware, scatter, shards, stride, payload)
    return (1 - hardware.lost_to_messages) * (summed + scattered)


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


def least_states_of(
    extent: Extent, model: StepModel, tables: StageTables, here: Sequence[Configuration]
) -> LeastStates | None:
    """What states take at least in storages of a placed configuration, and on the host where they may move there."""
    if not here:
        return None  # pins leave none
    # All of them may move, or none.
    moves = offloaded(extent, here[0]) is not None
    return _least_of(model, tables, here, (False, True) if moves else (False,))


def _least_of(
    model: StepModel, tables: StageTables, here: Sequence[Configuration], moved: tuple[bool, ...]
) -> LeastStates:
    """What states take at least where they are ``moved`` to the host, or stay where the configuration says."""
    held, messages_s = least_held(tables), _messages_s(model, tables, here)
    ways, once_s, standing, room = tuple(here), list[FloatArray](), list[FloatArray](), list[float]()
    stays = Storages.of(here)
    for away in moved:
        storages = replace(stays, offload=True) if away else stays
        once_s.append(messages_s + model.update_s(held.labels.parameter_elements, storages, held.trained))
        standing.append(model.resident_bytes(held.labels, storages))
        # Where nothing lives on the host anyway there is as much room whatever moves there.
        apart = away and model.host_elements
        room += [model.room_bytes(replace(way, offload=True) if apart else way) for way in ways]
    seconds, resident = np.concatenate(once_s), np.concatenate(standing)
    return LeastStates(
        ways=ways * len(moved),
        away=tuple(away for away in moved for _ in ways),
        once_s=seconds,
        whole_s=np.array([float(row @ held.counts) for row in seconds]),
        standing_bytes=np.array([float(row @ held.counts) for row in resident]),
        room_bytes=np.array(room),
        sent_bytes=held.sent * DTYPE_BYTES[model.dtype],
    )


def _messages_s(model: StepModel, tables: StageTables, ways: Sequence[Configuration]) -> FloatArray:
    """(ways, units) least seconds of a step that the states of each unit take but for their update, wherever they are.

    Those are the sums over micro-batches, what messages over the data axis take from kernels, and those that nothing
    hides.
    """
    held, c = least_held(tables), ways[0]
    elements = held.labels.parameter_elements
    lost = np.array([lost_to_messages(model, way) for way in ways])
    found: FloatArray = elements * lost[:, np.minimum(np.arange(len(elements)), 1)]
    found += np.array([exposed_s(model, tables, way) for way in ways])
    if c.micro_batches > 1:
        added = [not scatters_each(way) for way in ways]
        first = Storages.of(ways[added.index(True) if any(added) else 0 :][:1])
        found[added] += c.micro_batches * model.accumulation_s(held.labels, elements, first, held.trained)
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeastHeld:
    """The least that units hold, however they are run.

    Attributes
    ----------
    labels : (units,) of ways that hold the least elements of each unit and take no time; they keep all that gradients
        of a single micro-batch may take the place of
    trained, counts : (units,) trained parameters, and how many units each stands for
    sent : the least elements of all that are trained, 0 where a unit has none
    """

    labels: UnitLabels
    trained: IntArray
    counts: IntArray
    sent: float


@lru_cache(maxsize=256)
def least_held(tables: StageTables) -> LeastHeld:
    """The least that the units of some tables hold: one for all tables where it is the same."""
    each = tuple(tables.least_elements.tolist()), tuple(tables.least_frozen.tolist())
    return _least_held(*each, tuple(trained_parameters(tables)), tables.counts)


@lru_cache(maxsize=256)
def _least_held(
    elements: tuple[float, ...], frozen: tuple[float, ...], trained: tuple[int, ...], counts: tuple[int, ...]
) -> LeastHeld:
    least, units = np.array(elements), np.array(counts)
    nothing = np.zeros_like(least)
    none: dict[str, Any] = {field.name: nothing for field in fields(UnitLabels) if field.name != "assignments"}
    labels = replace(
        UnitLabels(**none, assignments=()),
        parameter_elements=least,
        frozen_elements=np.array(frozen),
        activation_bytes=np.full_like(nothing, np.inf),
    )
    sent = float(least @ units) if least.all() else 0.0
    return LeastHeld(labels=labels, trained=np.array(trained), counts=units, sent=sent)


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


def payloads_s(
    hardware: Hardware, collective: Collective, size: int, stride: int, *, sharded: bool = False, axis: str = ""
) -> FloatArray:
    """Seconds of messages of each size of `PAYLOADS`."""
    group = group_shape(hardware, size, stride)
    return _payloads_s(hardware, collective, group, *telling_marks(hardware, collective, group, sharded, axis))


@lru_cache(maxsize=4096)
def _payloads_s(hardware: Hardware, collective: Collective, group: GroupShape, sharded: bool, axis: str) -> FloatArray:
    """`payloads_s` by the marks that tell messages apart."""
    return message_time(hardware, collective, PAYLOADS, group, sharded, axis)
