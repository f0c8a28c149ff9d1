"""How many bytes of gradients travel in one message: chosen for each configuration.

Small messages pay their latency often; of large ones the last is exposed for longer, for it starts when the last
gradient is there. With P bytes of gradients on a rank, messages of b bytes that take t(b), and a backward pass of B
seconds of the last micro-batch, the sum of gradients is exposed for max(P/b t(b) - B, t(b)); P and B are those of an
even share. What messages take from the kernels beside them (`Hardware.lost_to_messages`) counts as well. ZeRO-1 and 2
gather parameters, beside the next forward pass; ZeRO-2 reduce-scatters every micro-batch's gradients; ZeRO-3 sums those
of a unit in one message, and buckets matter between copies alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from planner.search.configurations.step_model import Configuration
from simulator.corrections import message_time
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import group_shape

MIB = 2**20
USUAL = 25 * MIB
BUCKETS = (USUAL, *(size * MIB for size in (1, 5, 50, 100, 200, 400)))
"""Sizes that are tried; of equally good ones the first is taken."""
_SIZES = np.array(BUCKETS, dtype=np.float64)
LARGEST_PENDING = 100 * MIB
"""Largest bucket where whole gradients wait for their message in every micro-batch."""


class DataAxis(NamedTuple):
    """What decides how gradients travel over the data axis of a configuration."""

    sharding: str
    shard_size: int
    ranks: int
    stride: int
    micro_batches: int

    @classmethod
    def of(cls, c: Configuration) -> DataAxis:
        """Read it off a configuration."""
        return cls(c.optimizer_sharding, c.shard_size, c.data, c.stride("data"), c.micro_batches)


@lru_cache(maxsize=4096)
def bucket_bytes(hardware: Hardware, axis: DataAxis, gradient_bytes: float, pass_s: float) -> int:
    """The size of `BUCKETS` that exposes least of the messages over the data axis; the usual one without any.

    Parameters
    ----------
    gradient_bytes : float
        Bytes of gradients on one rank.
    pass_s : float
        Seconds of both passes of a micro-batch on one rank, a third of them forward.
    """
    shards = 1 if axis.sharding == "none" else (axis.shard_size or axis.ranks)
    if axis.ranks == 1 or not gradient_bytes or (axis.sharding == "zero3" and shards == axis.ranks):
        return USUAL
    hidden = pass_s if hardware.overlaps_communication else 0.0
    exposed = dict(zip(BUCKETS, _exposed_s(hardware, axis, shards, gradient_bytes, hidden), strict=True))
    return min((b for b in BUCKETS if axis.sharding != "zero2" or b <= LARGEST_PENDING), key=exposed.__getitem__)


def _exposed_s(
    hardware: Hardware, axis: DataAxis, shards: int, gradient_bytes: float, pass_s: float
) -> Iterator[float]:
    """Seconds of a step that messages of each size of `BUCKETS` add to those of the passes."""
    sharding, stride, forward_s, backward_s = axis.sharding, axis.stride, pass_s / 3, pass_s * 2 / 3
    lost = hardware.lost_to_messages
    hidden = 1 - lost

    def times(collective: Collective, ranks: int, apart: int, payload: float) -> list[tuple[float, float]]:
        """All messages, and the last of them."""
        seconds = zip(BUCKETS, _seconds(hardware, collective, ranks, apart), strict=True)
        return [(last * max(1.0, payload / bucket), last) for bucket, last in seconds]

    def added(whole: float, work_s: float, last: float = 0.0) -> float:
        return lost * whole + max(hidden * whole - work_s, hidden * last)

    if sharding == "none":
        for whole, last in times(Collective.ALL_REDUCE, axis.ranks, stride, gradient_bytes):
            yield added(whole, backward_s, last)
        return
    among = times(Collective.ALL_REDUCE, axis.ranks // shards, stride * shards, gradient_bytes / shards)
    if sharding == "zero3":
        for whole, last in among:
            yield added(whole, backward_s, last)
        return
    scatters, gathers = (
        times(one, shards, stride, gradient_bytes) for one in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
    )
    for (sums, last_sum), (scatter, last), (gather, _) in zip(among, scatters, gathers, strict=True):
        late = added(gather, forward_s)
        if sharding == "zero2" and axis.micro_batches > 1:
            yield late + axis.micro_batches * added(scatter, backward_s) + added(sums, backward_s, last_sum)
        else:
            yield late + added(scatter + sums, backward_s, last + last_sum)


@lru_cache(maxsize=1024)
def _seconds(hardware: Hardware, collective: Collective, ranks: int, stride: int) -> tuple[float, ...]:
    """Seconds of a message of each size of `BUCKETS`."""
    if ranks == 1:
        return (0.0,) * len(BUCKETS)
    return tuple(message_time(hardware, collective, _SIZES, group_shape(hardware, ranks, stride)).tolist())
