"""Messages of tokens on their way to experts and back, as the software that sends them has it.

Without more, each of a token's copies travels to its expert and is waited for. Dispatchers that know the topology send
a token once to each node that has experts of it, where it is passed on over the links inside (DeepEP; DeepSeek-V3,
arXiv:2412.19437, section 3.2.2), and schedules that run two micro-batches in turn hide such messages behind what the
other computes (section 3.2.1; ``--overlap-moe-expert-parallel-comm`` of Megatron-Core).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.topology import GroupShape

Amount = TypeVar("Amount", float, NDArray[np.float64])
AXIS = "expert"
EXPERT_EXPOSED = "planned_expert_exposed"
"""Key of a profile's training: part of the time of tokens' messages that is left where they travel beside another
micro-batch; there where a plan asks for that."""
EXPERT_LOAD = "planned_expert_load"
"""Key of a profile's training: how much longer messages of tokens are for ranks whose experts get more than others."""
EXPERT_WORK = "planned_expert_work"
"""Key of a profile's training: tokens of the busiest rank's experts over an even share."""
SENT_ONCE = "planned_sent_once"
"""Key of a profile's training: experts that a token goes to, where it travels once to each node; there where a plan
asks for that."""


def places_reached(places: Amount, chosen: Amount) -> Amount:
    """Of ``n`` places those that a token's ``k`` experts lie on: ``n (1 - (1 - 1/n)^k)`` on average.

    Experts are drawn evenly from all; a router that draws from few groups of them reaches fewer places.
    """
    reached: Amount = places * (1 - (1 - 1 / places) ** chosen)
    return reached


def sent_share(hardware: Hardware, collective: Collective, axis: str, group: GroupShape) -> float:
    """Share of the bytes of a message that travels: less than all where a token goes once to each node of a group.

    It is more where the experts of some rank get more tokens than an even share and the room beside it.

    Inside a node ranks take the place of nodes, and so they do inside a larger domain of fast links (NVL72).
    """
    chosen = hardware.training.get(SENT_ONCE, 0.0)
    if group.size == 1 or not of_tokens(collective, axis):
        return 1.0
    load = hardware.training.get(EXPERT_LOAD, 1.0)
    if not chosen:
        return load
    near = max(1, max(hardware.devices_per_node, hardware.levels[0].size) // group.stride)
    places = group.size / near if group.size > near else float(group.size)
    return load * places_reached(places, chosen) / chosen


def expert_exposed(hardware: Hardware, collective: Collective, axis: str) -> float:
    """What a message of tokens leaves to wait for: a part, where it travels beside another micro-batch, else all."""
    return hardware.training.get(EXPERT_EXPOSED, 1.0) if of_tokens(collective, axis) else 1.0


def of_tokens(collective: Collective, axis: str) -> bool:
    """Whether a message takes tokens to experts or back."""
    return axis == AXIS and collective is Collective.ALL_TO_ALL
