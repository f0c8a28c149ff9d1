"""What whole steps put on messages, asked for one by one and without marks that tell nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from simulator.corrections import SENT_ONCE, SHARDED, TENSOR_EXPOSED, message_time, one_message_time, telling_marks
from simulator.crowding import Crowding
from simulator.hardware import Hardware
from simulator.launches import LAUNCH, MESSAGE_LAUNCHES
from simulator.profiles import load_profile
from simulator.program import Collective
from simulator.topology import group_shape

PLAIN = load_profile("dgx-a100")
SOFTWARE = {LAUNCH: 5e-6, MESSAGE_LAUNCHES: 2.0, SHARDED: 1.5, TENSOR_EXPOSED: 0.5, SENT_ONCE: 4.0}
CASES = {
    "plain": PLAIN,
    "software": dataclasses.replace(
        PLAIN, overlaps_communication=False, training={**PLAIN.training, **SOFTWARE}, hash="software"
    ),
    "crowded": dataclasses.replace(
        PLAIN,
        crowding=(Crowding(group_size=2, processes=64, delay_s=1e-4, stretch=2.0),),
        processes=64.0,
        hash="crowded",
    ),
}
COLLECTIVES = (Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL, Collective.SEND)
PAYLOADS = np.array([1.0, 12345.678, 3e7, 4e12])


@pytest.mark.parametrize("hardware", CASES.values(), ids=CASES)
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_message_alone_takes_as_long_as_among_others(hardware: Hardware, collective: Collective) -> None:
    group = group_shape(hardware, 16, 4)
    alone = [one_message_time(hardware, collective, float(payload), group) for payload in PAYLOADS]
    assert alone == message_time(hardware, collective, PAYLOADS, group).tolist()


@pytest.mark.parametrize("hardware", CASES.values(), ids=CASES)
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("axis", ["", "data", "tensor", "expert"])
@pytest.mark.parametrize("sharded", [False, True])
def test_marks_that_are_left_out_tell_nothing(
    hardware: Hardware, collective: Collective, axis: str, sharded: bool
) -> None:
    group = group_shape(hardware, 16, 4)
    marks = telling_marks(hardware, collective, group, sharded, axis)
    given, left = (message_time(hardware, collective, PAYLOADS, group, *each) for each in ((sharded, axis), marks))
    assert np.array_equal(given, left)
    assert (marks == (False, "")) == np.array_equal(given, message_time(hardware, collective, PAYLOADS, group))
