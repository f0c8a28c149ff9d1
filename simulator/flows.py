"""Flows that share links: max-min fair rates, and the time of rounds of messages as fluids.

A set of rates is max-min fair when no rate can grow without taking from a flow that has no more (Bertsekas and
Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2). Progressive filling finds it: all rates rise together; a flow
stops at its own cap or when a link that it crosses is full.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import ProfileError

if TYPE_CHECKING:
    from simulator.topology.graph import Topology

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Links that fill within rounding of each other fill together.
SAME_LEVEL = 1 + 1e-12


class Message(NamedTuple):
    """Bytes from one device to another, or between a device and a switch that computes."""

    source: int | str
    destination: int | str
    size_bytes: float


Rounds = Iterable[Sequence[Message]]


def max_min_rates(
    caps: FloatArray, link_offsets: IntArray, links: IntArray, weights: FloatArray, capacities: FloatArray
) -> FloatArray:
    """Rates (F,) of F flows by progressive filling.

    At rate ``r`` flow ``f`` loads link ``links[u]`` with ``r * weights[u]`` for every ``u`` in
    ``link_offsets[f]:link_offsets[f + 1]``.

    Parameters
    ----------
    caps
        (F,) highest rate of each flow, infinity for none; then the flow must cross a link.
    link_offsets, links, weights
        (F + 1,), (U,), (U,) links of each flow in compressed rows, weights above zero.
    capacities
        (L,) what a link carries; a link of capacity 0 stops its flows.
    """
    rates = np.zeros(len(caps))
    rising = np.ones(len(caps), dtype=bool)
    flow_of_use = np.repeat(np.arange(len(caps)), np.diff(link_offsets))
    left = np.array(capacities, dtype=np.float64)
    while rising.any():
        using = rising[flow_of_use]
        growth = np.bincount(links[using], weights[using], minlength=len(left))
        full_at = np.divide(left, growth, out=np.full(len(left), np.inf), where=growth > 0)
        level = min(caps[rising].min(), full_at.min(initial=np.inf))
        if not np.isfinite(level):
            flow = int(np.flatnonzero(rising)[0])
            raise ProfileError(f"flow {flow} has no cap and crosses no link; give it a finite cap or a link")
        full = full_at <= level * SAME_LEVEL
        stopped = caps <= level
        stopped[flow_of_use[using & full[links]]] = True
        stopped &= rising
        rates[stopped] = np.minimum(level, caps[stopped])
        settled = stopped[flow_of_use]
        taken = np.bincount(links[settled], (weights * rates[flow_of_use])[settled], minlength=len(left))
        left = np.maximum(left - taken, 0.0)
        rising &= ~stopped
    return rates


def simulate_rounds(topology: Topology, rounds: Rounds) -> float:
    """Seconds of rounds of messages: one round starts when all messages of the round before have arrived.

    A message takes the latency of its route, then its bytes flow at the max-min fair rate.
    """
    known: dict[tuple[Message, ...], float] = {}  # a pipeline repeats the same round
    seconds = 0.0
    for messages in map(tuple, rounds):
        if messages not in known:
            known[messages] = round_seconds(topology, messages)
        seconds += known[messages]
    return seconds


def round_seconds(topology: Topology, messages: Sequence[Message]) -> float:
    """Seconds until the last of `messages`, all sent at once, has arrived."""
    moving = [message for message in messages if message.source != message.destination]
    if not moving:
        return 0.0
    routes = [topology.route(message.source, message.destination) for message in moving]
    crossed = [topology.links_of(route) for route in routes]
    offsets = np.array([0, *itertools.accumulate(map(len, crossed))], dtype=np.int64)
    links = np.array([link for route in crossed for link in route], dtype=np.int64)
    latencies = np.array([topology.latency_of(route) for route in routes])
    left = np.array([message.size_bytes for message in moving], dtype=np.float64)
    return _drain(left, latencies, offsets, links, np.asarray(topology.capacities))


def _drain(left: FloatArray, starts: FloatArray, offsets: IntArray, links: IntArray, capacities: FloatArray) -> float:
    """Seconds until all flows have ended that start at `starts` (F,) with `left` (F,) bytes each."""
    end = float(starts[left == 0].max(initial=0.0))
    flow_of_use = np.repeat(np.arange(len(left)), np.diff(offsets))
    clock = 0.0
    left = left.copy()
    while (left > 0).any():
        flowing = (left > 0) & (starts <= clock)
        waiting = (left > 0) & ~flowing
        next_start = float(starts[waiting].min(initial=np.inf))
        if not flowing.any():
            clock = next_start
            continue
        chosen = np.flatnonzero(flowing)
        uses = flowing[flow_of_use]
        counts = np.diff(offsets)[chosen]
        rates = max_min_rates(
            np.full(len(chosen), np.inf),
            np.concatenate(([0], np.cumsum(counts))),
            links[uses],
            np.ones(int(uses.sum())),
            capacities,
        )
        if not rates.all():
            raise ProfileError("a message crosses a link of no capacity and never arrives; give every link a bandwidth")
        ends = clock + left[chosen] / rates
        until = min(float(ends.min()), next_start)
        done = ends <= until * SAME_LEVEL
        left[chosen] = np.where(done, 0.0, left[chosen] - rates * (until - clock))
        clock = until
    return max(end, clock)
