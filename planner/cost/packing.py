"""Bytes that are copied to lay tensors together for a message, and to take them out of one."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simulator.program import Collective

Amount = TypeVar("Amount", float, NDArray[np.float64])
READ_AND_WRITTEN = 2.0


def packing_bytes(
    collective: Collective, payload_bytes: Amount, members: int, *, laid: bool = True, cut: bool = True
) -> Amount:
    """Bytes that are read and written to lay tensors together for a message, and to cut them out of one."""
    before = after = 0.0
    if laid and collective is Collective.ALL_GATHER:
        before = 1.0 / members
    if laid and collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        before = 1.0
    if cut and collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        after = 1.0
    return READ_AND_WRITTEN * (before + after) * payload_bytes
