"""Seconds of messages: over cuts, of sums over the batch, and over the data axis in several ways to store states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from planner.search.configurations.passes import BoolArray
from planner.search.configurations.storage import Storages
from planner.search.stages.fragments import FloatArray
from simulator.corrections import kernel_factor, message_time, one_message_time
from simulator.hardware import Hardware
from simulator.kernels import kernel_time
from simulator.program import SUMMED_CLASS, Collective
from simulator.topology import group_shape

if TYPE_CHECKING:
    from planner.search.units.labels import StageTables
    from planner.search.units.stage_decisions import SummedWork

BatchSums = tuple[tuple[tuple[float, ...], tuple[float, ...]], ...]


def message_s(
    hardware: Hardware, collective: Collective, payload: FloatArray, size: int, stride: int, *, sharded: bool = False
) -> FloatArray:
    """Seconds (n,) of a collective in groups of `size` ranks, `stride` apart; of ``sharded`` parameters they differ."""
    if size == 1:
        return np.zeros_like(payload)
    return message_time(hardware, collective, np.maximum(payload, 1.0), group_shape(hardware, size, stride), sharded)


@lru_cache(maxsize=4096)
def one_message_s(hardware: Hardware, collective: Collective, payload: float, size: int, stride: int) -> float:
    """Seconds of one message: configurations that differ in their schedules or passes send the same ones."""
    if size == 1:
        return 0.0
    return one_message_time(hardware, collective, float(max(payload, 1.0)), group_shape(hardware, size, stride))


def told_s(hardware: Hardware, size: int, stride: int, shards: int = 0) -> float:
    """Seconds of the sum of the loss: over the `shards` ranks that share states, and then over their groups."""
    shards = shards or size
    found = one_message_s(hardware, Collective.ALL_REDUCE, 1.0, shards, stride)
    return found + one_message_s(hardware, Collective.ALL_REDUCE, 1.0, size // shards, stride * shards)


@lru_cache(maxsize=256)
def batch_sums_s(hardware: Hardware, sums: BatchSums, size: int, stride: int, shards: int = 0) -> FloatArray:
    """(units, 2) seconds in which the operators of each unit sum over the batch, forward and backward.

    Parameters
    ----------
    sums : bytes of each message of each unit, forward and backward
    shards : ranks that share states where that is a part of them: a sum over these and one over their groups follow
        each other, 0 where it is not
    """
    if shards:
        inside = batch_sums_s(hardware, sums, shards, stride)
        return inside + batch_sums_s(hardware, sums, size // shards, stride * shards)
    payloads = np.array([payload for unit in sums for passes in unit for payload in passes], dtype=np.float64)
    ends = np.cumsum([len(passes) for unit in sums for passes in unit], dtype=np.int64)
    seconds = np.concatenate([[0.0], message_s(hardware, Collective.ALL_REDUCE, payloads, size, stride).cumsum()])
    found: FloatArray = np.diff(seconds[ends], prepend=0.0).reshape(-1, 2)
    return found


@lru_cache(maxsize=256)
def least_batch_sums_s(hardware: Hardware, sums: BatchSums, size: int, stride: int) -> FloatArray:
    """`batch_sums_s` at least, however many ranks share states."""
    ways = [0, *(part for part in range(2, size) if size % part == 0)]
    found: FloatArray = np.stack([batch_sums_s(hardware, sums, size, stride, shards) for shards in ways]).min(axis=0)
    return found


@lru_cache(maxsize=256)
def summing_s(hardware: Hardware, work: SummedWork, grown: float, share: float, devices: int) -> FloatArray:
    """(units, 2) seconds that operators of each unit take longer for summing in their middle, messages aside.

    Parameters
    ----------
    grown : batch over that of the graph of `work`
    share : the part of their tensors that is local
    """
    rows = [one for unit in work for passes in unit for one in passes]
    moved = np.array([share * (fixed + grown * growing) for *_, fixed, growing in rows], dtype=np.float64)
    longer = np.zeros(len(rows))
    for kernel, dtype in dict.fromkeys((kernel, dtype) for kernel, dtype, *_ in rows):
        alike = [place for place, row in enumerate(rows) if row[:2] == (kernel, dtype)]
        whole, summed = (
            kernel_time(hardware, one, dtype, np.zeros(len(alike)), moved[alike])
            * kernel_factor(hardware, one, dtype, devices)
            for one in (kernel, SUMMED_CLASS.get(kernel, kernel))
        )
        longer[alike] = summed - whole
    seconds = iter(longer.tolist())
    return np.array([[sum(islice(seconds, len(passes))) for passes in unit] for unit in work], dtype=np.float64)


@lru_cache(maxsize=1024)
def whole_sums_s(
    hardware: Hardware, tables: StageTables, data: int, stride: int, shards: int | None, tensor: int, devices: int
) -> float:
    """Seconds of `unit_sums_s` of all units."""
    each = unit_sums_s(hardware, tables, data, stride, shards, tensor, devices)
    return float(each.sum(axis=1) @ np.array(tables.counts))


@lru_cache(maxsize=1024)
def unit_sums_s(
    hardware: Hardware, tables: StageTables, data: int, stride: int, shards: int | None, tensor: int, devices: int
) -> FloatArray:
    """(units, 2) seconds of the sums over the batch for which operators wait, forward and backward.

    With what operators that sum in their middle take longer; the least of all where there are no ``shards``.
    """
    decisions = tables.decisions
    grown = tables.parts.graph.batch_size / decisions.graph.batch_size
    longer = summing_s(hardware, decisions.summed_work, grown, 1.0 / tensor, devices)
    given = hardware, decisions.batch_sums, data, stride
    return longer + (least_batch_sums_s(*given) if shards is None else batch_sums_s(*given, shards))


@lru_cache(maxsize=256)
def sends_s(hardware: Hardware, tables: StageTables, pairs: tuple[tuple[int, float], ...]) -> FloatArray:
    """(units - 1, states) seconds of an activation and of its gradient over a cut behind each unit.

    Parameters
    ----------
    pairs : distances of neighbours with their part of all pairs, whose mean counts
    """
    payloads, rows = _payloads(tables)
    sent = [
        np.where(payloads > 0, share * message_s(hardware, Collective.SEND, payloads, 2, apart), 0.0)
        for apart, share in pairs
    ]
    seconds = np.zeros(payloads.shape[1:])
    for way in range(len(payloads)):
        for both in sent:
            seconds += both[way]
    return seconds[rows]


@lru_cache(maxsize=256)
def _payloads(tables: StageTables) -> tuple[FloatArray, list[int]]:
    """(2, boundaries, states) bytes of activations and gradients, and which of the boundaries each cut is like."""
    units, boundaries = tables.chain.units, tables.boundaries
    width = max((len(boundary.forward_bytes) for boundary in boundaries), default=1)
    payloads = np.zeros((2, len(boundaries), width))
    for number, boundary in enumerate(boundaries):
        for way, payload in zip(payloads, (boundary.forward_bytes, boundary.backward_bytes), strict=True):
            way[number, : len(payload)] = payload
    # Between equal blocks goes what goes between the first and the second of them.
    rows = [place for n, unit in enumerate(units) for place in [n - 1] * (unit.count - 1) + [n]]
    return payloads, [min(max(row, 0), len(boundaries) - 1) for row in rows[:-1]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataMessages:
    """How long they take in each storage, (storages, n) seconds of n ways to run units.

    Attributes
    ----------
    bucket : (storages, 1) bytes of a message of several parameters or gradients
    element_bytes, summed_bytes : of an element of a parameter, and of one of a gradient as it is summed
    whole_sums : ZeRO-1 sums gradients whole
    """

    hardware: Hardware
    storages: Storages
    bucket: FloatArray
    element_bytes: int
    summed_bytes: int
    whole_sums: bool = False

    def reduced_s(self, elements: FloatArray) -> FloatArray:
        """Seconds of what is all-reduced: gradients, or shards of them."""
        c, shards = self.storages.placed, self.storages.shards
        stride, held, known = c.stride("data"), elements / shards, dict[tuple[int, float], FloatArray]()
        # ZeRO-1 and 3 over the same ranks reduce the same shards.
        sent = list(zip(shards[:, 0].tolist(), self.bucket[:, 0].tolist(), strict=True))
        for number, key in enumerate(sent):
            if key not in known:
                groups = c.data // key[0], stride * key[0]
                known[key] = self._fused_s(number, Collective.ALL_REDUCE, held[number], *groups)
        return np.array([known[key] for key in sent])

    def scattered_s(self, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        """Seconds in which gradients are reduce-scattered, in storages (storages, 1) where that is ``wanted``."""
        return self._among_shards_s(Collective.REDUCE_SCATTER, elements, wanted)

    def gathered_s(self, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        """Seconds in which parameters are gathered that are fused."""
        return self._among_shards_s(Collective.ALL_GATHER, elements, wanted)

    def first_gather_s(self) -> FloatArray:
        """(storages, 1) seconds of the first message of gathered parameters: no pass is there to hide it."""
        storages, found = self.storages, np.zeros_like(self.bucket)
        if self.hardware.overlaps_communication:
            for number in np.flatnonzero(~(storages.whole | storages.zero3)).tolist():
                group = int(storages.shards[number, 0]), storages.placed.stride("data")
                most = float(self.bucket[number, 0])
                found[number] = one_message_s(self.hardware, Collective.ALL_GATHER, most, *group)
        return found

    def of_units_s(self, collective: Collective, payload: FloatArray) -> FloatArray:
        """(ZeRO-3, n) seconds of messages of a unit's parameters or gradients each, where everything is sharded."""
        stride = self.storages.placed.stride("data")
        ranks = self.storages.shards[self.storages.zero3].tolist()
        given = self.hardware, collective, payload
        found = np.array([message_s(*given, size, stride, sharded=True) for size in ranks])
        return np.where(payload > 0, found, 0.0)

    def usual_gather_s(self, payload: float) -> FloatArray:
        """(ZeRO-3, 1) seconds in which the parameters of one unit are gathered."""
        stride = self.storages.placed.stride("data")
        ranks = self.storages.shards[self.storages.zero3].tolist()
        return np.array([[one_message_s(self.hardware, Collective.ALL_GATHER, payload, n, stride)] for n in ranks])

    def _among_shards_s(self, collective: Collective, elements: FloatArray, wanted: BoolArray) -> FloatArray:
        storages, found = self.storages, np.zeros((len(self.bucket), elements.shape[-1]))
        rows, stride = np.broadcast_to(elements, found.shape), storages.placed.stride("data")
        for number in np.flatnonzero(wanted).tolist():
            whole = self.whole_sums and storages.ways[number].optimizer_sharding == "zero1"
            summed = Collective.ALL_REDUCE if whole and collective is Collective.REDUCE_SCATTER else collective
            ranks = int(storages.shards[number, 0])
            found[number] = self._fused_s(number, summed, rows[number], ranks, stride)
        return found

    def _fused_s(self, number: int, collective: Collective, elements: FloatArray, size: int, stride: int) -> FloatArray:
        """Seconds (n,) of messages of one storage, fused up to the size of a bucket."""
        if size == 1:
            return np.zeros_like(elements)
        payload = elements * (self.element_bytes if collective is Collective.ALL_GATHER else self.summed_bytes)
        most = float(self.bucket[number, 0])
        if float(payload.max(initial=0.0)) <= most:
            fused = one_message_s(self.hardware, collective, most, size, stride)
            return np.asarray(fused * (payload / most))
        sent = np.maximum(payload, most)
        return message_s(self.hardware, collective, sent, size, stride) * (payload / sent)
