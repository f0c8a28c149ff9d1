"""Tables whose tasks take known times: the longest path, task by task.

Plain functions of numbers and sequences: Python runs them on lists, numba compiles them for arrays.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import NamedTuple

Integers = MutableSequence[int]
Reals = MutableSequence[float]


def run_in_order(
    stream: Sequence[int],
    dependency_offsets: Sequence[int],
    dependencies: Sequence[int],
    latency_s: Sequence[float],
    seconds: Sequence[float],
    free: Reals,
    starts: Reals,
    ends: Reals,
) -> None:
    """Fill `starts` and `ends` (T,) where no task waits for a later one and none meets another.

    ::

        start_i = max(end_previous(i), max over j in after_i of end_j),  end_i = start_i + latency_i + seconds_i
    """
    use = 0
    for task in range(len(stream)):
        own = stream[task]
        start = free[own]
        last = dependency_offsets[task + 1]
        while use < last:
            end = ends[dependencies[use]]
            if end > start:
                start = end
            use += 1
        starts[task] = start
        ends[task] = free[own] = (start + latency_s[task]) + seconds[task]


class Recurrence(NamedTuple):
    """A table of known times, and how far its streams have come.

    Of streams (S): ``head`` is the place in ``stream_tasks`` of the next task, ``pointer`` the first of its
    dependencies not known to have ended, ``free`` when all before it and the others have. ``first_waiter`` (T,) and
    ``next_waiter`` (S,) chain the streams that wait for a task; ``stack`` holds those that may go on. Of wholes (T,)
    at their owner: members that have ``arrived``, when they are all ``ready``.
    """

    stream: Integers
    stream_offsets: Integers
    stream_tasks: Integers
    dependency_offsets: Integers
    dependencies: Integers
    owner: Integers
    size: Integers
    next_member: Integers
    latency_s: Reals
    seconds: Reals
    starts: Reals
    ends: Reals
    head: Integers
    pointer: Integers
    free: Reals
    first_waiter: Integers
    next_waiter: Integers
    stack: Integers
    arrived: Integers
    ready: Reals


def run_streams(state: Recurrence) -> None:
    """Fill ``starts`` and ``ends``; tasks of a deadlock keep an end that is not a number.

    A stream goes on until a task of it waits for another stream; the end of that task lets it go on. So the order of
    the evaluation need not be that of time.
    """
    s = state
    depth = len(s.head)
    for i in range(depth):
        s.stack[i] = depth - 1 - i
    while depth > 0:
        depth -= 1
        own = s.stack[depth]
        while s.head[own] < s.stream_offsets[own + 1]:
            task = s.stream_tasks[s.head[own]]
            start = s.free[own]
            use = s.pointer[own]
            last = s.dependency_offsets[task + 1]
            blocking = -1
            while use < last:
                end = s.ends[s.dependencies[use]]
                if end != end:
                    blocking = s.dependencies[use]
                    break
                if end > start:
                    start = end
                use += 1
            s.free[own] = start
            s.pointer[own] = use
            if blocking >= 0:
                s.next_waiter[own] = s.first_waiter[blocking]
                s.first_waiter[blocking] = own
                break
            whole = s.owner[task]
            s.arrived[whole] += 1
            if start > s.ready[whole]:
                s.ready[whole] = start
            if s.arrived[whole] < s.size[whole]:
                break
            depth = end_whole(s, whole, own, depth)


def end_whole(state: Recurrence, whole: int, running: int, depth: int) -> int:
    """Time a whole and let on all streams but the `running` one that waited for it; the new depth of the stack."""
    s = state
    start = s.ready[whole]
    end = (start + s.latency_s[whole]) + s.seconds[whole]
    task = whole
    while task >= 0:
        s.starts[task] = start
        s.ends[task] = end
        own = s.stream[task]
        s.free[own] = end
        s.head[own] += 1
        if s.head[own] < s.stream_offsets[own + 1]:
            s.pointer[own] = s.dependency_offsets[s.stream_tasks[s.head[own]]]
        if own != running:
            s.stack[depth] = own
            depth += 1
        waiter = s.first_waiter[task]
        while waiter >= 0:
            s.stack[depth] = waiter
            depth += 1
            waiter = s.next_waiter[waiter]
        task = s.next_member[task]
    return depth


def time_alone(
    order: Sequence[int],
    stream: Sequence[int],
    owner: Sequence[int],
    next_member: Sequence[int],
    link_offsets: Sequence[int],
    links: Sequence[int],
    use_weights: Sequence[float],
    amount: Sequence[float],
    pace: Sequence[float],
    capacity: Sequence[float],
    load: Reals,
    peak_stream: Integers,
    seconds: Reals,
    peak: Reals,
    total: Reals,
) -> None:
    """Fill `seconds` (T,) that wholes work alone, and the largest loads of links: `total` and `peak` together (L,).

    `order` are the tasks stream by stream. Wholes of one stream never run together, so a link carries at most the
    sum over streams of the largest load of each. `load`, `peak` and `total` begin as 0, `peak_stream` as -1.
    """
    for first in order:
        if owner[first] != first:
            continue
        rate = pace[first]
        task = first
        while task >= 0:
            rate = min(rate, pace[task])
            for use in range(link_offsets[task], link_offsets[task + 1]):
                load[links[use]] += use_weights[use]
            task = next_member[task]
        task = first
        while task >= 0:
            for use in range(link_offsets[task], link_offsets[task + 1]):
                link = links[use]
                if load[link] * rate > capacity[link]:
                    rate = capacity[link] / load[link]
            task = next_member[task]
        if amount[first] > 0.0:
            seconds[first] = amount[first] / rate
        task = first
        while task >= 0:
            for use in range(link_offsets[task], link_offsets[task + 1]):
                link = links[use]
                if load[link] > 0.0:
                    if peak_stream[link] != stream[first]:
                        total[link] += peak[link]
                        peak[link] = 0.0
                        peak_stream[link] = stream[first]
                    peak[link] = max(peak[link], load[link] * rate)
                    load[link] = 0.0
            task = next_member[task]
