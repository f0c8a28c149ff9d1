"""Tasks of many ranks as arrays: what both engines run.

A *stream* is a queue of one rank: its tasks run one after the other, in the order of their numbers. A task starts
when the one before it on its stream and all its dependencies have ended. Tasks with the same non-negative
``meeting`` number start together, when the last of them can, and end together: a collective, or a send and its
receive.

A task with ``rate_bytes_per_s`` above zero is a transfer: it first takes ``latency_s``, then moves ``work`` bytes at
its rate or at what the links it crosses leave it, shared max-min fairly among the transfers that cross them. Any other
task takes ``work`` seconds after its latency. While a rank computes and transfers at the same time, its computation
runs at ``compute_speed`` and its transfers at most at ``transfer_speed`` of what they would reach alone.

To be exact:

- A meeting, or a task without one, runs as a whole: it takes the longest latency of its members, then works. While it
  works all members have done the same part of their work at any time: the whole moves at the pace of its slowest
  member, and a link carries ``link_weights`` x the bytes/s of each member that crosses it. It is one flow of the
  fair sharing, of as many bytes as its largest transfer.
- A member *computes* if it is no transfer and on a `COMPUTE` stream; it *transfers* if it is on a `COMMUNICATION`
  stream (seconds or bytes) or a transfer on a `COMPUTE` stream. A `COPY` stream does neither. A rank computes and
  transfers at the same time while one of its tasks of each sort runs, from start to end, latency included: what sends
  holds its part of the device also while nothing moves. Waiting does not count.
  A computing member works then at ``compute_speed`` s/s, a transferring one at most at ``transfer_speed`` x its rate;
  latencies take their time.
- All that ends or begins at one time does so before shares are found anew. Nothing depends on the order of
  simultaneous events: streams fix every order, and shares of no duration move nothing.

Ranks that behave alike stand once in a table; a link use then counts all their copies
(``link_weights`` = copies that cross the link x bytes on the link per byte of work).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


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
    meeting : (T,) number of the meeting, below 4 T (or M); -1 for none
    dependency_offsets, dependencies : (T + 1,), (D,) task t waits for ``dependencies[offsets[t]:offsets[t + 1]]``
    link_offsets, links, link_weights : (T + 1,), (U,), (U,) links a transfer crosses, bytes on each per byte of work
    link_capacity : (L,) bytes/s
    compute_speed, transfer_speed : factors in (0, 1] while both run on a rank
    label : (T,) index into ``labels``, for messages, traces and totals
    meeting_size : (M,) tasks that each meeting must have, 0 where any number will do; empty: all of them
    stream_names : names of the streams for messages; empty: the rank and the kind are their name
    name : what messages call the table
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
    meeting_size: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    stream_names: Sequence[str] = ()
    name: str = "the task table"

    @property
    def size(self) -> int:
        """Number of tasks."""
        return len(self.stream)


Engine = Callable[[TaskTable], tuple[FloatArray, FloatArray]]
"""Runs a table: when its tasks start and end, arrays (tasks,) of seconds."""
