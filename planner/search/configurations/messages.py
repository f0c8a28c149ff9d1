"""Messages of every micro-batch whatever the storage: those over cuts, and sums over the batch inside operators."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice, product
from typing import TYPE_CHECKING

import numpy as np

from planner.search.stages.fragments import FloatArray
from simulator.corrections import kernel_factor, message_time
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
    return float(message_s(hardware, collective, np.full(1, payload), size, stride)[0])


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


@lru_cache(maxsize=256)
def sends_s(hardware: Hardware, tables: StageTables, pairs: tuple[tuple[int, float], ...]) -> FloatArray:
    """(units - 1, states) seconds of an activation and of its gradient over a cut behind each unit.

    Parameters
    ----------
    pairs : distances of neighbours with their part of all pairs, whose mean counts
    """
    units, boundaries = tables.chain.units, tables.boundaries
    width = max((len(boundary.forward_bytes) for boundary in boundaries), default=1)
    seconds = np.zeros((len(boundaries), width))
    payloads = np.zeros((2, len(boundaries), width))
    for number, boundary in enumerate(boundaries):
        for way, payload in zip(payloads, (boundary.forward_bytes, boundary.backward_bytes), strict=True):
            way[number, : len(payload)] = payload
    for payload, (apart, share) in product(payloads, pairs):
        sent = message_s(hardware, Collective.SEND, payload.ravel(), 2, apart).reshape(payload.shape)
        seconds += np.where(payload > 0, share * sent, 0.0)
    # Between equal blocks goes what goes between the first and the second of them.
    rows = [place for n, unit in enumerate(units) for place in [n - 1] * (unit.count - 1) + [n]]
    return seconds[[min(max(row, 0), len(boundaries) - 1) for row in rows[:-1]]]
