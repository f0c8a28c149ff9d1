"""Tasks of many ranks as arrays: what both engines run.

A *stream* is a queue of one rank: its tasks run one after the other, in the order of their numbers. A task starts
when the one before it on its stream and all its dependencies have ended. Tasks with the same non-negative
``meeting`` number start together, when the last of them can, and end together: a collective, or a send and its
receive.

A task with ``rate_bytes_per_s`` above zero is a transfer: it first takes ``latency_s``, then moves ``work`` bytes at
its rate or at what the links it crosses leave it, shared max-min fairly among the transfers that cross them. Any other
task takes ``work`` seconds after its latency. While a rank computes and transfers at the same time, its computation
runs at ``compute_speed`` and its transfers at most at ``transfer_speed`` of what they would reach alone.

Ranks that behave alike stand once in a table; a link use then counts all their copies
(``link_weights`` = copies that cross the link x bytes on the link per byte of work).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class StreamKind(IntEnum):
    """What a stream holds; computation and communication of one rank slow each other down."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskTable:
    """Tasks (T), streams (S), links (L), dependencies and link uses in compressed rows.

    Attributes
    ----------
    stream : (T,) stream of each task
    stream_rank, stream_kind : (S,) rank that a stream belongs to, and its `StreamKind`
    work : (T,) seconds, or bytes of a transfer
    latency_s : (T,) fixed time before the work
    rate_bytes_per_s : (T,) speed of a transfer that is alone; 0 for other tasks
    meeting : (T,) number of the meeting, -1 for none
    dependency_offsets, dependencies : (T + 1,), (D,) task t waits for ``dependencies[offsets[t]:offsets[t + 1]]``
    link_offsets, links, link_weights : (T + 1,), (U,), (U,) links a transfer crosses, bytes on each per byte of work
    link_capacity : (L,) bytes/s
    compute_speed, transfer_speed : factors in (0, 1] while both run on a rank
    label : (T,) index into ``labels``, for messages, traces and totals
    """

    stream: IntArray
    stream_rank: IntArray
    stream_kind: IntArray
    work: FloatArray
    latency_s: FloatArray
    rate_bytes_per_s: FloatArray
    meeting: IntArray
    dependency_offsets: IntArray
    dependencies: IntArray
    link_offsets: IntArray
    links: IntArray
    link_weights: FloatArray
    link_capacity: FloatArray
    compute_speed: float = 1.0
    transfer_speed: float = 1.0
    label: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    labels: Sequence[str] = ()

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.stream)
