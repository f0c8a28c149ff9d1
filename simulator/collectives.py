"""Time of one collective: the alpha-beta model, a level of the topology at a time.

Notation: ``n`` members, ``m_l`` of them per level (`GroupShape.members`), ``c_l = m_0 ... m_l`` inside
one unit of level ``l`` (``c_-1 = 1``), ``S`` the payload, ``a_l`` and ``b_l`` latency and bandwidth of
one device at level ``l``. Sources: Thakur, Rabenseifner and Gropp, "Optimization of collective
communication operations in MPICH", IJHPCA 19(1), 2005; Sanders, Speck and Traeff, "Two-tree algorithms
for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009.

Bandwidths are per device with all devices sending, so the groups that share the links of a node are
already accounted for: when a mesh axis communicates, all its groups do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import overload

import numpy as np
from numpy.typing import NDArray

from simulator.hardware import CollectiveTable, Hardware
from simulator.program import Collective
from simulator.topology import GroupShape

FloatArray = NDArray[np.float64]
Algorithm = Callable[[Hardware, GroupShape, FloatArray], FloatArray]


@overload
def collective_time(hardware: Hardware, collective: Collective, payload_bytes: float, group: GroupShape) -> float: ...
@overload
def collective_time(
    hardware: Hardware, collective: Collective, payload_bytes: FloatArray, group: GroupShape
) -> FloatArray: ...
def collective_time(
    hardware: Hardware, collective: Collective, payload_bytes: float | FloatArray, group: GroupShape
) -> float | FloatArray:
    """Seconds of one collective in one group; all groups of the axis run it at the same time.

    Measured tables of the profile come first; without them, the fastest of the algorithms is taken, as
    communication libraries do. A group of one costs nothing.

    Parameters
    ----------
    payload_bytes
        a float, or an array of shape ``(n,)``; what it counts is told in `program.Collective`.
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if group.size == 1:
        seconds = np.zeros_like(payload)
    else:
        measured = _from_tables(hardware, collective, payload, group)
        seconds = (
            np.min(_all_algorithms(hardware, collective, payload, group), axis=0) if measured is None else measured
        )
    return float(seconds) if seconds.ndim == 0 else seconds


def collective_algorithm(hardware: Hardware, collective: Collective, payload_bytes: float, group: GroupShape) -> str:
    """Name of the algorithm that `collective_time` takes: ``none`` for a group of one, ``measured`` for a table."""
    if group.size == 1:
        return "none"
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if _from_tables(hardware, collective, payload, group) is not None:
        return "measured"
    times = _all_algorithms(hardware, collective, payload, group)
    return list(ALGORITHMS[collective])[int(np.argmin(times))]


def ring_all_reduce(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``2 sum_l h_l a_l + 2 (n - 1) / n S / b`` (Thakur et al.): reduce-scatter, then all-gather around one ring.

    ``h_l`` of the ``n - 1`` hops cross level ``l``; ``b`` is the ring's narrowest part (`ring_bandwidth`).
    """
    return 2 * ring_half(hardware, group, payload)


def ring_half(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l h_l a_l + (n - 1) / n S / b``: all-gather or reduce-scatter around a ring."""
    share = (group.size - 1) / group.size
    return _ring_latency(hardware, group) + share * payload / ring_bandwidth(hardware, group)


def ring_bandwidth(hardware: Hardware, group: GroupShape) -> float:
    """``min_l c_(l-1) b_l`` in bytes/s.

    A ring leaves a unit of ``c`` members once; libraries lay ``c`` rings side by side, each leaving
    over another member's link.
    """
    return min(
        group.within(level - 1) * hardware.levels[level].bandwidth_bytes_per_s
        for level, count in enumerate(group.members)
        if count > 1
    )


def tree_all_reduce(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``2 sum_l ceil(log2 m_l) a_l + 2 S / b`` (Sanders et al.): up and down two complementary binary trees."""
    return 2 * (_tree_latency(hardware, group) + payload / ring_bandwidth(hardware, group))


def hierarchical_all_reduce(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """Reduce-scatter from the inside out, all-gather from the outside in: twice `hierarchical_half`."""
    return 2 * hierarchical_half(hardware, group, payload)


def hierarchical_half(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l (m_l - 1) a_l + (m_l - 1) / m_l * S / c_(l-1) / b_l``: one ring per level, one level after the other.

    Level ``l`` works on the ``S / c_(l-1)`` bytes that the levels inside have left to a member.
    """
    seconds = np.zeros_like(payload)
    for level, count in enumerate(group.members):
        link = hardware.levels[level]
        part = payload / group.within(level - 1) * (count - 1) / count
        seconds = seconds + (count - 1) * link.latency_s + part / link.bandwidth_bytes_per_s
    return seconds


def switch_all_reduce(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """Ring or hierarchical time with the bandwidth part of switches that add numbers divided by their speed-up."""
    seconds = np.zeros_like(payload)
    for level, count in enumerate(group.members):
        link = hardware.levels[level]
        part = payload / group.within(level - 1) * (count - 1) / count
        speed = link.bandwidth_bytes_per_s * link.reduction_speedup
        seconds = seconds + 2 * (math.ceil(math.log2(count)) * link.latency_s + part / speed)
    return seconds if any(level.reduction_speedup > 1 for level in hardware.levels) else np.full_like(payload, np.inf)


def pairwise_all_to_all(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l (c_l - c_(l-1)) a_l + max_l (c_l - c_(l-1)) / n S / b_l``: a message of ``S / n`` to every other member.

    Levels have links of their own and work at the same time.
    """
    latency = 0.0
    slowest = np.zeros_like(payload)
    for level in range(len(group.members)):
        peers = group.within(level) - group.within(level - 1)
        link = hardware.levels[level]
        latency += peers * link.latency_s
        slowest = np.maximum(slowest, peers / group.size * payload / link.bandwidth_bytes_per_s)
    return latency + slowest


def doubling_all_to_all(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l ceil(log2 m_l) (a_l + S / 2 / b_l)`` (Bruck et al., 1997; Thakur et al.): few large messages."""
    seconds = np.zeros_like(payload)
    for level, count in enumerate(group.members):
        link = hardware.levels[level]
        rounds = math.ceil(math.log2(count))
        seconds = seconds + rounds * (link.latency_s + payload / 2 / link.bandwidth_bytes_per_s)
    return seconds


def ring_broadcast(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l h_l a_l + S / b``: a pipeline around the ring, in pieces small enough to hide."""
    return _ring_latency(hardware, group) + payload / ring_bandwidth(hardware, group)


def tree_broadcast(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``sum_l ceil(log2 m_l) a_l + S / b`` (Sanders et al.): down two complementary binary trees."""
    return _tree_latency(hardware, group) + payload / ring_bandwidth(hardware, group)


def direct_send(hardware: Hardware, group: GroupShape, payload: FloatArray) -> FloatArray:
    """``a + S / b`` of the outermost level of the group: all pairs of neighbours wait for the slowest."""
    link = hardware.levels[group.outermost]
    return link.latency_s + payload / link.bandwidth_bytes_per_s


ALGORITHMS: Mapping[Collective, Mapping[str, Algorithm]] = {
    Collective.ALL_REDUCE: {
        "ring": ring_all_reduce,
        "tree": tree_all_reduce,
        "hierarchical": hierarchical_all_reduce,
        "switch": switch_all_reduce,
    },
    Collective.ALL_GATHER: {"ring": ring_half, "hierarchical": hierarchical_half},
    Collective.REDUCE_SCATTER: {"ring": ring_half, "hierarchical": hierarchical_half},
    Collective.ALL_TO_ALL: {"pairwise": pairwise_all_to_all, "doubling": doubling_all_to_all},
    Collective.BROADCAST: {"ring": ring_broadcast, "tree": tree_broadcast},
    Collective.SEND: {"direct": direct_send},
}


def _all_algorithms(hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape) -> FloatArray:
    return np.stack([algorithm(hardware, group, payload) for algorithm in ALGORITHMS[collective].values()])


def _ring_latency(hardware: Hardware, group: GroupShape) -> float:
    hops = (
        group.size // group.within(level - 1) - group.size // group.within(level) for level in range(len(group.members))
    )
    return sum(count * level.latency_s for count, level in zip(hops, hardware.levels, strict=True))


def _tree_latency(hardware: Hardware, group: GroupShape) -> float:
    pairs = zip(group.members, hardware.levels, strict=True)
    return sum(math.ceil(math.log2(count)) * level.latency_s for count, level in pairs)


def _from_tables(
    hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape
) -> FloatArray | None:
    """Log-log interpolation in payload and group size; None where no table can speak.

    Tables hold for groups inside the innermost level. Outside the measured group sizes the nearest
    table is scaled as the model grows.
    """
    if group.outermost > 0:
        return None
    tables = sorted((t for t in hardware.collective_tables if t.collective is collective), key=lambda t: t.group_size)
    if not tables:
        return None
    low = max((t for t in tables if t.group_size <= group.size), key=lambda t: t.group_size, default=tables[0])
    high = min((t for t in tables if t.group_size >= group.size), key=lambda t: t.group_size, default=tables[-1])
    if low.group_size < group.size < high.group_size:
        share = math.log(group.size / low.group_size) / math.log(high.group_size / low.group_size)
        return np.exp((1 - share) * np.log(_read(low, payload)) + share * np.log(_read(high, payload)))
    seconds = _read(low, payload)
    if low.group_size != group.size:
        seconds = seconds * _growth(hardware, collective, low, group)
    return seconds


def _growth(hardware: Hardware, collective: Collective, table: CollectiveTable, group: GroupShape) -> float:
    """Model's time in `group` over its time in the table's group, the larger of both ends of the table.

    One factor for all payloads, so that time stays monotone in bytes.
    """
    ends = np.asarray([table.payload_bytes[0], table.payload_bytes[-1]])
    measured = GroupShape(members=(table.group_size, *(1,) * (len(group.members) - 1)))
    here = np.min(_all_algorithms(hardware, collective, ends, group), axis=0)
    there = np.min(_all_algorithms(hardware, collective, ends, measured), axis=0)
    return float(np.max(here / there))


def _read(table: CollectiveTable, payload: FloatArray) -> FloatArray:
    """Seconds at `payload`: constant below the table, the last seconds per byte above it."""
    sizes, seconds = np.asarray(table.payload_bytes), np.asarray(table.seconds)
    inside = np.clip(payload, sizes[0], sizes[-1])
    value = np.exp(np.interp(np.log(inside), np.log(sizes), np.log(seconds)))
    return np.asarray(value * np.maximum(payload / sizes[-1], 1.0))
