"""What a piece of work allocates on a CPU, by torch's profiler."""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

SILENCE = {"KINETO_LOG_LEVEL": "99"}
"""What keeps the profiler's library from telling on stderr, among what users say there, when it begins and ends."""


def recorded_growth(work: Callable[[], object]) -> int:
    """Do some work and return the most bytes that its tensors, message buffers and workspaces take together."""
    for name, value in SILENCE.items():
        os.environ.setdefault(name, value)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    return peak_growth(_allocations(recorded.profiler))


def peak_growth(events: Iterable[tuple[int, int]]) -> int:
    """Most bytes that allocations and releases, in order, add to what was held before them.

    Releases by threads of a message library are not recorded. A block that begins where another still stands says
    that this one has gone.

    Parameters
    ----------
    events : pairs
        Address and bytes of each; bytes are below 0 where memory is released.
    """
    begins: list[int] = []
    sizes: dict[int, int] = {}
    held = most = 0
    for address, size in events:
        if size < 0:
            if address in sizes:
                held -= sizes.pop(address)
                del begins[bisect_left(begins, address)]
            else:  # held before
                held += size
            continue
        place = bisect_left(begins, address)
        if place and begins[place - 1] + sizes[begins[place - 1]] > address:
            place -= 1
        while place < len(begins) and begins[place] < address + size:
            held -= sizes.pop(begins.pop(place))
        begins.insert(place, address)
        sizes[address] = size
        held += size
        most = max(most, held)
    return most


def _allocations(profiler: Any) -> list[tuple[int, int]]:
    """Address and bytes of every recorded allocation and release, in order."""
    waiting = list(profiler.kineto_results.experimental_event_tree())
    found: list[tuple[int, int, int]] = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == _EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda entry: entry[0])]
