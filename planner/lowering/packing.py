"""What is copied around a message: tensors into one buffer, and out of the buffer that came."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.lowering.instructions import Communicate
from simulator.program import Collective

Amount = TypeVar("Amount", float, NDArray[np.float64])
READ_AND_WRITTEN = 2.0


def copied_bytes(message: Communicate, payload_bytes: float, members: int) -> float:
    """Bytes that one rank reads and writes around a message, as `planner.execution.communication` does.

    A tensor alone that is gathered, or cut, along its first dim lies in the message as it lies in memory; all others
    are laid together first, and the parts of each put together behind. All-reduces and broadcasts copy whatever they
    send, which is part of their own time.

    Parameters
    ----------
    payload_bytes
        As `simulator.program.Collective` counts them.
    members
        Ranks of the group.
    """
    if not message.sources:  # sent inside an operator
        return 0.0
    several = len(message.sources) > 1
    laid = several or (message.collective is not Collective.ALL_GATHER and message.split_dims[0] != 0)
    cut = several or message.gather_dims[0] != 0
    return float(packing_bytes(message.collective, payload_bytes, members, laid=laid, cut=cut))


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
