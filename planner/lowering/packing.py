"""What is copied around a message: tensors into one buffer, and out of the buffer that came."""

from __future__ import annotations

from planner.instructions import Communicate
from simulator.program import Collective

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
    alone = len(message.sources) == 1
    packed = cut = 0.0
    if message.collective is Collective.ALL_GATHER and not alone:
        packed = payload_bytes / members
    if message.collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        packed = 0.0 if alone and message.split_dims[0] == 0 else payload_bytes
    if message.collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        cut = 0.0 if alone and message.gather_dims[0] == 0 else payload_bytes
    return READ_AND_WRITTEN * (packed + cut)
