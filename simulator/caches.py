"""How much of what kernels read and write lies in the caches: by what a step touches between two uses of a tensor.

A step that holds less than the caches finds everything there, one that holds far more finds nothing, since each byte is
needed again only after all others. Profiles state caches where kernels have a speed in them (processors); on others
nothing here counts.
"""

from __future__ import annotations

from dataclasses import replace
from math import log

from simulator.hardware import Hardware

ALL_BELOW, NONE_ABOVE = 0.25, 2.0
"""Parts of the caches that a working set must not exceed to lie there, and that it must to be gone."""


def cached_share(hardware: Hardware, working_set_bytes: float, processes: int) -> float:
    """Part of the bytes that kernels move which lies in the caches of a device that has its share of the common one.

    All of them up to `ALL_BELOW` of the caches, none from `NONE_ABOVE` of them, evenly on the logarithm between:
    kernels of all classes timed on inputs taken in turn from growing memory lose what they gain by caches so, because
    caches are not filled in order and other programs are in them too.
    """
    if hardware.caches is None:
        return 0.0
    sharing = max(1, min(processes, hardware.devices_per_node))
    size = hardware.caches.own_bytes + hardware.caches.shared_bytes / sharing
    if not size:
        return 0.0
    place = log(NONE_ABOVE * size / max(working_set_bytes, 1.0)) / log(NONE_ABOVE / ALL_BELOW)
    return min(1.0, max(0.0, place))


def in_caches(hardware: Hardware, working_set_bytes: float, processes: int) -> Hardware:
    """The hardware as kernels and messages meet it in a step of this working set, on so many processes."""
    share = cached_share(hardware, working_set_bytes, processes)
    hardware = sharing_cores(hardware, processes)
    return hardware if share == hardware.cached_share else replace(hardware, cached_share=share)


def sharing_cores(hardware: Hardware, processes: float) -> Hardware:
    """The hardware as messages meet it where so many processes compute at a time, on average."""
    same = not hardware.crowding or processes == hardware.processes
    return hardware if same else replace(hardware, processes=processes)
