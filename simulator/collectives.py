"""Time of one collective: the alpha-beta model, a level of the topology at a time.

Every algorithm is two numbers for a group: latency ``L`` (all its hops one after the other) and seconds
per byte ``B`` of its narrowest part. A message of ``S`` bytes is cut into pieces that travel as a pipeline;
with the best number of pieces it takes

    t = overhead + L + S B + 2 sqrt(L S B) = overhead + (sqrt(L) + sqrt(S B))^2

(Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", Parallel
Computing 35(12), 2009, section 2; ``overhead`` is the fixed cost of a call).

Notation: ``n`` members, ``m_l`` of them per level (`GroupShape.members`), ``c_l = m_0 ... m_l`` inside one
unit of level ``l`` (``c_-1 = 1``), ``a_l`` and ``b_l`` latency and bandwidth of one device at level ``l``.
Costs of the algorithms: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations
in MPICH", IJHPCA 19(1), 2005, unless another source stands at the function.

Bandwidths are per device with all devices sending, so the groups that share the links of a node are
already accounted for: when a mesh axis communicates, all its groups do. Where devices are joined directly, or below a
PCIe tree, a group of part of a node has part of its links: `topology.node_shares` gives the part of the innermost
bandwidth that is left, for rings (and all that moves as little: trees, meshes), exchanges and sends.

Tests simulate the messages of every algorithm flow by flow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from simulator.hardware import CollectiveTable, Hardware, Level
from simulator.program import Collective
from simulator.topology import GroupShape, node_shares

FloatArray = NDArray[np.float64]


class CollectiveCost(NamedTuple):
    """What an algorithm costs in one group."""

    latency_s: float
    seconds_per_byte: float


Use = Literal["ring", "exchange", "send"]
Algorithm = Callable[[Hardware, GroupShape], CollectiveCost | None]


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

    Measured tables of the profile come first; without them the fastest algorithm is taken, as
    communication libraries do. A group of one costs nothing.

    Parameters
    ----------
    payload_bytes
        a float, or an array of shape ``(n,)``; what it counts is told in `program.Collective`.
    """
    if isinstance(payload_bytes, float) and not hardware.collective_tables:
        return _fastest(hardware, collective, payload_bytes, group)
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if group.size == 1:
        seconds = np.zeros_like(payload)
    else:
        measured = _from_tables(hardware, collective, payload, group)
        seconds = _model(hardware, collective, payload, group).min(axis=0) if measured is None else measured
    return float(seconds) if seconds.ndim == 0 else seconds


@lru_cache(maxsize=4096)
def algorithm_costs(hardware: Hardware, collective: Collective, group: GroupShape) -> Mapping[str, CollectiveCost]:
    """Costs of the algorithms that the library of this hardware has for `collective`, by name.

    Where an algorithm is pinned and can run, it is the only one.
    """
    pinned = hardware.pinned_algorithms.get(collective)
    only = ALGORITHMS[collective][pinned](hardware, group) if pinned is not None else None
    if pinned is not None and only is not None:
        return {pinned: only}
    costs = {}
    for name, algorithm in ALGORITHMS[collective].items():
        known = name in ALWAYS or name in hardware.collective_algorithms
        if known and (cost := algorithm(hardware, group)) is not None:
            costs[name] = cost
    return costs


def ring(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """All-gather or reduce-scatter around a ring: ``L = sum_l h_l a_l``, ``B = (n - 1) / n / min_l(c_(l-1) b_l)``.

    ``h_l`` of the ``n - 1`` hops cross level ``l``. A ring leaves a unit of ``c`` members once; libraries lay
    ``c`` rings side by side, each leaving over another member's link.
    """
    return CollectiveCost(
        _ring_latency(hardware, group), (group.size - 1) / group.size / _ring_bandwidth(hardware, group)
    )


def tree_all_reduce(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """``L`` twice that of `tree_broadcast`, ``B = max_l s_l / (c_(l-1) b_l)``; levels work at the same time.

    Up and down two complementary binary trees (Sanders et al.), which cost ``s = min(2, m / 2)``; inside a
    node up and down chains that begin at every member in turn, ``s = 2 (m - 1) / m``.
    """
    return CollectiveCost(2 * _tree_latency(hardware, group), max(_tree_parts(hardware, group).values()))


def hierarchical(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """One ring per level, one level after the other.

    ``L = sum_l (m_l - 1) a_l``, ``B = sum_l (m_l - 1) / m_l / (c_(l-1) b_l)``.
    A reduce-scatter goes from the inside out, level ``l`` working on the ``S / c_(l-1)`` bytes that the
    inner levels left to a member; an all-gather goes the same way back.
    """
    latency = sum((count - 1) * level.latency_s for count, _, level in _crossed(hardware, group))
    return CollectiveCost(
        latency, sum(_share(count, inside, level) for count, inside, level in _crossed(hardware, group))
    )


def switch_all_reduce(hardware: Hardware, group: GroupShape) -> CollectiveCost | None:
    """A tree whose switches add: such a level takes ``(1 + 1 / m_l) / (c_(l-1) r_l)`` seconds per byte.

    ``r_l`` is the level's reduction bandwidth. Each member sends its ``S`` bytes to the switch once and the
    sum of its own ``S / m`` back to all (Graham et al., "Scalable hierarchical aggregation protocol", COMHPC
    2016, in the form in which one GPU drives one slice of the message). Small messages gain nothing: the
    latency is the tree's.
    """
    parts = _tree_parts(hardware, group)
    helped = False
    for count, inside, level in _crossed(hardware, group):
        if level.reduction_bandwidth_bytes_per_s:
            helped = True
            parts[level.name] = (1 + 1 / count) / (inside * level.reduction_bandwidth_bytes_per_s)
    return CollectiveCost(2 * _tree_latency(hardware, group), max(parts.values())) if helped else None


def halving_doubling(hardware: Hardware, group: GroupShape) -> CollectiveCost | None:
    """Reduce-scatter by recursive halving or all-gather by recursive doubling, nearest members first.

    ``L = sum_l log2(m_l) a_l``, ``B`` that of `hierarchical`: rounds at level ``l`` exchange
    ``S / c_(l-1) (1/2 + 1/4 + … + 1/m_l)`` bytes a member (Thakur et al., sections 4.1 and 4.2, Rabenseifner's
    algorithm). For powers of two only.
    """
    if group.size & (group.size - 1):
        return None
    latency = sum(math.log2(count) * level.latency_s for count, _, level in _crossed(hardware, group))
    return CollectiveCost(latency, hierarchical(hardware, group).seconds_per_byte)


def mesh(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """Every member to every other directly inside the innermost level; between its units halving-doubling.

    ``L = a_0 + sum_(l>0) h_l a_l`` with ``h_l = log2(m_l)``, or ``m_l - 1`` around a ring where ``m_l`` is no power of
    two; ``B`` that of `hierarchical` (HCCL documentation, HCCL_ALGO: ``level0:fullmesh;level1:H-D_R``).
    """
    latency = 0.0
    for count, _, level in _crossed(hardware, group):
        halving = math.log2(count) if count & (count - 1) == 0 else count - 1
        latency += level.latency_s * (1 if level.name == hardware.levels[0].name else halving)
    return CollectiveCost(latency, hierarchical(hardware, group).seconds_per_byte)


def ring_halving(hardware: Hardware, group: GroupShape) -> CollectiveCost | None:
    """A ring inside the innermost level, halving-doubling between its units; only where these are powers of two.

    ``L = (m_0 - 1) a_0 + sum_(l>0) log2(m_l) a_l``, ``B`` that of `hierarchical` (HCCL documentation, HCCL_ALGO:
    ``level0:ring;level1:H-D_R``).
    """
    first, *outer = group.members
    if any(count & (count - 1) for count in outer):
        return None
    latency = (first - 1) * hardware.levels[0].latency_s
    latency += sum(math.log2(count) * level.latency_s for count, level in zip(outer, hardware.levels[1:], strict=True))
    return CollectiveCost(latency, hierarchical(hardware, group).seconds_per_byte)


def pairwise_all_to_all(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """A message of ``S / n`` to every other member, all at once.

    ``L = max_l a_l``, ``B = max_l (c_l - c_(l-1)) / n / b_l``: levels have links of their own.
    """
    parts = [
        (group.within(index) - group.within(index - 1)) / group.size / level.bandwidth_bytes_per_s
        for index, level in enumerate(_levels(hardware, group, "exchange"))
    ]
    return CollectiveCost(max(level.latency_s for _, _, level in _crossed(hardware, group)), max(parts))


def hierarchical_all_to_all(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """Inside the units to the member of the destination's place, then across them along each place.

    ``L = sum_l a_l``, ``B = sum_l (m_l - 1) / m_l / b_l``: fewer and larger messages than pairwise, more bytes inside
    (Hwang et al., "Tutel: Adaptive mixture-of-experts at scale", MLSys 2023, two-dimensional hierarchical all-to-all).
    """
    levels = _crossed(hardware, group, "exchange")
    moving = sum((count - 1) / count / level.bandwidth_bytes_per_s for count, _, level in levels)
    return CollectiveCost(sum(level.latency_s for _, _, level in levels), moving)


def ring_broadcast(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """A pipeline around the ring: ``L = sum_l h_l a_l``, ``B = 1 / min_l(c_(l-1) b_l)``."""
    return CollectiveCost(_ring_latency(hardware, group), 1 / _ring_bandwidth(hardware, group))


def tree_broadcast(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """Down two complementary binary trees (Sanders et al.), ``B`` as for the ring.

    ``L = sum_l ceil(log2 m_l) a_l``, where a chain of ``m_l - 1`` hops stands in for the tree inside a node.
    """
    return CollectiveCost(_tree_latency(hardware, group), 1 / _ring_bandwidth(hardware, group))


def direct_send(hardware: Hardware, group: GroupShape) -> CollectiveCost:
    """``L = a``, ``B = 1 / b`` of the outermost level that the group crosses: neighbours wait for the slowest pair."""
    level = _levels(hardware, group, "send")[group.outermost]
    return CollectiveCost(level.latency_s, 1 / level.bandwidth_bytes_per_s)


def _scatter_then_gather(half: Algorithm) -> Algorithm:
    """The all-reduce that is a reduce-scatter and an all-gather, each as `half` runs it."""

    def all_reduce(hardware: Hardware, group: GroupShape) -> CollectiveCost | None:
        cost = half(hardware, group)
        return cost and CollectiveCost(2 * cost.latency_s, 2 * cost.seconds_per_byte)

    return all_reduce


_HALVES: Mapping[str, Algorithm] = {
    "ring": ring,
    "hierarchical": hierarchical,
    "halving-doubling": halving_doubling,
    "mesh": mesh,
    "ring-halving": ring_halving,
}
"""Gathers, and scatters that run the same backwards."""
ALGORITHMS: Mapping[Collective, Mapping[str, Algorithm]] = {
    Collective.ALL_REDUCE: {
        "ring": _scatter_then_gather(ring),
        "tree": tree_all_reduce,
        "hierarchical": _scatter_then_gather(hierarchical),
        "switch": switch_all_reduce,
        "halving-doubling": _scatter_then_gather(halving_doubling),
        "mesh": _scatter_then_gather(mesh),
        "ring-halving": _scatter_then_gather(ring_halving),
    },
    Collective.ALL_GATHER: _HALVES,
    Collective.REDUCE_SCATTER: _HALVES,
    Collective.ALL_TO_ALL: {"pairwise": pairwise_all_to_all, "hierarchical": hierarchical_all_to_all},
    Collective.BROADCAST: {"ring": ring_broadcast, "tree": tree_broadcast},
    Collective.SEND: {"direct": direct_send},
}
ALWAYS = frozenset({"ring", "pairwise", "direct"})


def _model(hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape) -> FloatArray:
    """Seconds by algorithm, shape ``(algorithms, *payload.shape)``."""
    roots, rates = _roots(hardware, collective, group)
    across = (-1, *(1 for _ in payload.shape))
    root = roots.reshape(across) + np.sqrt(payload * rates.reshape(across))
    # root ** 2 would round floats and arrays differently.
    return np.asarray(hardware.collective_overhead_s + root * root)


@lru_cache(maxsize=4096)
def _roots(hardware: Hardware, collective: Collective, group: GroupShape) -> tuple[FloatArray, FloatArray]:
    """Root of the latency, and seconds per byte, of every algorithm, shape (algorithms,) each."""
    costs = algorithm_costs(hardware, collective, group).values()
    return np.array([math.sqrt(cost.latency_s) for cost in costs]), np.array([cost.seconds_per_byte for cost in costs])


def _fastest(hardware: Hardware, collective: Collective, payload: float, group: GroupShape) -> float:
    """What the arrays give for one payload, to the last digit, without them."""
    if len(group.members) == group.members.count(1):
        return 0.0
    costs = algorithm_costs(hardware, collective, group).values()
    roots = [math.sqrt(cost.latency_s) + math.sqrt(payload * cost.seconds_per_byte) for cost in costs]
    return hardware.collective_overhead_s + min(root * root for root in roots)


@lru_cache(maxsize=4096)
def _levels(hardware: Hardware, group: GroupShape, use: Use) -> tuple[Level, ...]:
    """Levels with the part of the innermost bandwidth that the group's own links have."""
    share: float = getattr(node_shares(hardware, group.members[0], group.stride), use)
    first, *outer = hardware.levels
    if share == 1:
        return hardware.levels
    return (replace(first, bandwidth_bytes_per_s=share * first.bandwidth_bytes_per_s), *outer)


@lru_cache(maxsize=4096)
def _crossed(hardware: Hardware, group: GroupShape, use: Use = "ring") -> tuple[tuple[int, int, Level], ...]:
    """``(m_l, c_(l-1), level)`` of the levels at which the group has more than one member."""
    levels = enumerate(zip(group.members, _levels(hardware, group, use), strict=True))
    return tuple((count, group.within(index - 1), level) for index, (count, level) in levels if count > 1)


def _tree_parts(hardware: Hardware, group: GroupShape) -> dict[str, float]:
    """Seconds per byte of a tree all-reduce by level name."""
    parts = {}
    for count, inside, level in _crossed(hardware, group):
        nodes = count / _chain(hardware, group, count, inside)
        sent = 2 * (count - 1) / count if nodes <= 2 else min(2.0, nodes / 2)
        parts[level.name] = sent / (inside * level.bandwidth_bytes_per_s)
    return parts


def _chain(hardware: Hardware, group: GroupShape, count: int, inside: int) -> int:
    """How many of the `count` units that a level joins lie in one node: a chain, where nodes are joined by trees."""
    return min(count, max(1, hardware.devices_per_node // (inside * group.stride)))


def _share(count: int, inside: int, level: Level) -> float:
    return (count - 1) / count / (inside * level.bandwidth_bytes_per_s)


def _ring_bandwidth(hardware: Hardware, group: GroupShape) -> float:
    return min(inside * level.bandwidth_bytes_per_s for _, inside, level in _crossed(hardware, group))


def _ring_latency(hardware: Hardware, group: GroupShape) -> float:
    n = group.size
    hops = [(n // inside - n // (inside * count), level) for count, inside, level in _crossed(hardware, group)]
    return sum(count * level.latency_s for count, level in hops)


def _tree_latency(hardware: Hardware, group: GroupShape) -> float:
    """``(m - 1) a`` for the chain inside a node, ``ceil(log2 m) a`` for the trees among nodes, as NCCL builds them."""
    seconds = 0.0
    for count, inside, level in _crossed(hardware, group):
        chain = _chain(hardware, group, count, inside)
        seconds += (chain - 1 + math.ceil(math.log2(count / chain))) * level.latency_s
    return seconds


def _from_tables(
    hardware: Hardware, collective: Collective, payload: FloatArray, group: GroupShape
) -> FloatArray | None:
    """Log-log interpolation in payload and group size; None where no table can speak.

    Tables hold for groups inside the innermost level. Outside the measured group sizes the nearest
    table is scaled as the model grows.
    """
    if not hardware.collective_tables or group.outermost > 0:
        return None
    tables = sorted((t for t in hardware.collective_tables if t.collective is collective), key=lambda t: t.group_size)
    if not tables:
        return None
    low = max((t for t in tables if t.group_size <= group.size), key=lambda t: t.group_size, default=tables[0])
    high = min((t for t in tables if t.group_size >= group.size), key=lambda t: t.group_size, default=tables[-1])
    if low.group_size < group.size < high.group_size:
        share = math.log(group.size / low.group_size) / math.log(high.group_size / low.group_size)
        return np.asarray(np.exp((1 - share) * np.log(_read(low, payload)) + share * np.log(_read(high, payload))))
    seconds = _read(low, payload)
    return seconds if low.group_size == group.size else seconds * _growth(hardware, collective, low, group)


def _growth(hardware: Hardware, collective: Collective, table: CollectiveTable, group: GroupShape) -> float:
    """Model's time in `group` over its time in the table's group, the larger of both ends of the table.

    One factor for all payloads, so that time stays monotone in bytes.
    """
    ends = np.asarray([table.payload_bytes[0], table.payload_bytes[-1]])
    measured = GroupShape(members=(table.group_size, *(1,) * (len(group.members) - 1)), stride=group.stride)
    here = np.min(_model(hardware, collective, ends, group), axis=0)
    there = np.min(_model(hardware, collective, ends, measured), axis=0)
    return float(np.max(here / there))


def _read(table: CollectiveTable, payload: FloatArray) -> FloatArray:
    """Seconds at `payload`: constant below the table, the last seconds per byte above it."""
    sizes, seconds = np.asarray(table.payload_bytes), np.asarray(table.seconds)
    inside = np.clip(payload, sizes[0], sizes[-1])
    value = np.exp(np.interp(np.log(inside), np.log(sizes), np.log(seconds)))
    return np.asarray(value * np.maximum(payload / sizes[-1], 1.0))
