"""How many bytes of gradients travel in one message: chosen for each configuration.

Small messages pay their latency often; of large ones the last is exposed for longer, for it starts when the last
gradient is there. With P bytes of gradients on a rank, messages of b bytes that take t(b), and a backward pass of B
seconds of the last micro-batch, the sum of gradients is exposed for max(P/b t(b) - B, t(b)); P and B are those of an
even share. What messages take from the kernels beside them (`Hardware.lost_to_messages`) counts as well. ZeRO-1 and 2
gather parameters, beside the next forward pass; ZeRO-2 reduce-scatters every micro-batch's gradients; ZeRO-3 sums those
of a unit in one message, and buckets matter between copies alone.
"""

from __future__ import annotations

from functools import lru_cache

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
LARGEST_PENDING = 100 * MIB
"""Largest bucket where whole gradients wait for their message in every micro-batch."""


def bucket_bytes(hardware: Hardware, configuration: Configuration, gradient_bytes: float, pass_s: float) -> int:
    """The size of `BUCKETS` that exposes least of the messages over the data axis; the usual one without any.

    Parameters
    ----------
    gradient_bytes : float
        Bytes of gradients on one rank.
    pass_s : float
        Seconds of both passes of a micro-batch on one rank, a third of them forward.
    """
    c = configuration
    shards = 1 if c.optimizer_sharding == "none" else (c.shard_size or c.data)
    if c.data == 1 or not gradient_bytes or (c.optimizer_sharding == "zero3" and shards == c.data):
        return USUAL
    hidden = pass_s if hardware.overlaps_communication else 0.0
    sizes = [b for b in BUCKETS if c.optimizer_sharding != "zero2" or b <= LARGEST_PENDING]
    return min(sizes, key=lambda b: _exposed_s(hardware, c, b, shards, gradient_bytes, hidden))


def _exposed_s(
    hardware: Hardware, c: Configuration, bucket: int, shards: int, gradient_bytes: float, pass_s: float
) -> float:
    """Seconds of a step that messages of one size add to those of the passes."""
    number, stride, forward_s, backward_s = BUCKETS.index(bucket), c.stride("data"), pass_s / 3, pass_s * 2 / 3

    def times(collective: Collective, ranks: int, apart: int, payload: float) -> tuple[float, float]:
        """All messages, and the last of them."""
        last = _seconds(hardware, collective, ranks, apart)[number]
        return last * max(1.0, payload / bucket), last

    def added(whole: float, work_s: float, last: float = 0.0) -> float:
        return hardware.lost_to_messages * whole + max(hidden * whole - work_s, hidden * last)

    hidden = 1 - hardware.lost_to_messages
    if c.optimizer_sharding == "none":
        whole, last = times(Collective.ALL_REDUCE, c.data, stride, gradient_bytes)
        return added(whole, backward_s, last)
    among, last_among = times(Collective.ALL_REDUCE, c.data // shards, stride * shards, gradient_bytes / shards)
    if c.optimizer_sharding == "zero3":
        return added(among, backward_s, last_among)
    scatter, last = times(Collective.REDUCE_SCATTER, shards, stride, gradient_bytes)
    gather, _ = times(Collective.ALL_GATHER, shards, stride, gradient_bytes)
    late = added(gather, forward_s)
    if c.optimizer_sharding == "zero2" and c.micro_batches > 1:
        return late + c.micro_batches * added(scatter, backward_s) + added(among, backward_s, last_among)
    return late + added(scatter + among, backward_s, last + last_among)


@lru_cache(maxsize=1024)
def _seconds(hardware: Hardware, collective: Collective, ranks: int, stride: int) -> tuple[float, ...]:
    """Seconds of a message of each size of `BUCKETS`."""
    if ranks == 1:
        return (0.0,) * len(BUCKETS)
    sizes = np.array(BUCKETS, dtype=np.float64)
    return tuple(message_time(hardware, collective, sizes, group_shape(hardware, ranks, stride)).tolist())
