"""Flows that share links: max-min fair rates.

A set of rates is max-min fair when no rate can grow without taking from a flow that has no more (Bertsekas and
Gallager, "Data Networks", 2nd ed., 1992, section 6.5.2). Progressive filling finds it: all rates rise together; a flow
stops at its own cap or when a link that it crosses is full.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.errors import ProfileError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Links that fill within rounding of each other fill together.
SAME_LEVEL = 1 + 1e-12


class Message(NamedTuple):
    """Bytes from one device to another, or between a device and a switch that computes."""

    source: int | str
    destination: int | str
    size_bytes: float


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
