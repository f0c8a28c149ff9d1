"""What is copied around a message: tensors into one buffer, and out of the buffer that came."""

from __future__ import annotations

from planner.cost.packing import packing_bytes
from planner.lowering.instructions import Communicate
from simulator.program import Collective


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
