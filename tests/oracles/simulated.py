"""What only tests ask of the simulator: algorithms by name, tables with slow parts, axes that share links."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simulator.collectives import ALGORITHMS, CollectiveCost, _from_tables, _model, algorithm_costs
from simulator.engine import max_min_rates
from simulator.errors import InputError, ProfileError
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.task_table import FloatArray, StreamKind, TaskTable
from simulator.topology import GroupShape, shared_links
from simulator.topology.sharing import Pattern


def collective_algorithm(hardware: Hardware, collective: Collective, payload_bytes: float, group: GroupShape) -> str:
    """Name of the algorithm that `collective_time` takes: ``none`` for a group of one, ``measured`` for a table."""
    if group.size == 1:
        return "none"
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if _from_tables(hardware, collective, payload, group) is not None:
        return "measured"
    times = _model(hardware, collective, payload, group)
    return list(algorithm_costs(hardware, collective, group))[int(np.argmin(times))]


def slow_ranks(table: TaskTable, factors: FloatArray) -> TaskTable:
    """The table with the computation of rank r taking ``factors[r]`` times as long.

    Where one rank stands for several that behave alike, give it the largest factor among them, or write the
    ranks out: slow and fast ones do not behave alike.
    """
    if len(factors) <= int(table.stream_rank.max(initial=-1)) or not np.all(np.asarray(factors) > 0):
        raise InputError(
            f"{len(factors)} factors for ranks up to {table.stream_rank.max(initial=-1)}: one above 0 each"
        )
    computes = (table.stream_kind[table.stream] == StreamKind.COMPUTE) & (table.rate_bytes_per_s == 0)
    factor = np.where(computes, np.asarray(factors)[table.stream_rank[table.stream]], 1.0)
    return replace(table, work=table.work * factor)


def slow_links(table: TaskTable, shares: Mapping[int, float]) -> TaskTable:
    """The table with link l left with ``shares[l]`` of its capacity."""
    capacity = table.link_capacity.copy()
    for link, share in shares.items():
        if not 0 <= link < len(capacity) or not 0 < share <= 1:
            raise InputError(
                f"link {link} at {share} of its capacity: links are 0 to {len(capacity) - 1}, shares in (0, 1]"
            )
        capacity[link] *= share
    return replace(table, link_capacity=capacity)


def contended(
    hardware: Hardware,
    devices: int,
    axes: Mapping[str, tuple[int, int]],
    patterns: Mapping[str, Pattern] | None = None,
) -> dict[str, float]:
    """Factor by which each axis slows down when the groups of all `axes` communicate at once.

    Links are shared max-min fairly among the axes by the bytes that each sends over its own fullest link, no axis
    faster than it is alone; arguments as of `shared_links`.
    """
    links = shared_links(hardware, devices, axes, patterns)
    weights = [links.weights(name) for name in axes]
    rows = [np.flatnonzero(weight) for weight in weights]
    alone = np.array([links.widths[name] for name in axes])
    caps = np.where(np.isfinite(alone), alone, 0.0)
    together = max_min_rates(
        caps,
        np.array([0, *itertools.accumulate(map(len, rows))]),
        np.concatenate([*rows, np.zeros(0, dtype=np.int64)]),
        np.concatenate([weight[row] for weight, row in zip(weights, rows, strict=True)] or [np.zeros(0)]),
        links.capacities,
    )
    slowed = np.divide(caps, together, out=np.ones(len(caps)), where=together > 0)
    return dict(zip(axes, map(float, slowed), strict=True))


def pinned_cost(hardware: Hardware, collective: Collective, group: GroupShape, algorithm: str) -> CollectiveCost:
    """Cost of one algorithm, known to this hardware's library or not; ProfileError where it cannot run."""
    known = ALGORITHMS[collective]
    if algorithm not in known:
        raise ProfileError(f"{collective.value} has no algorithm {algorithm!r}; use one of {', '.join(known)}")
    cost = known[algorithm](hardware, group)
    if cost is None:
        raise ProfileError(
            f"{collective.value} by {algorithm} cannot run in a group with {group.members} members per level of "
            f"{hardware.name}: halving needs powers of two, switch a level that adds; use ring"
        )
    return cost
