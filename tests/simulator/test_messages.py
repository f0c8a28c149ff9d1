"""What calibration makes of the moments at which ranks come to messages and have done."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist

from simulator.calibration import messages
from simulator.calibration.messages import SENDERS, Calls, MessageCalls
from simulator.program import Collective

COMPUTING, LATENCY = 2e-3, 5e-4


def calls_by_turns(ranks: int, cores: int, rounds: int = 8, late: float = 0.0) -> Calls:
    """Ranks in turns on their cores, first with what follows a message and then with what comes before the next.

    A message is there `LATENCY` after the last rank has come; every rank then needs its core to go on, and computes for
    `COMPUTING` as soon as it has it, the first rank longer by `late`.
    """
    turn = np.arange(ranks) // cores
    turns = -(-ranks // cores)
    period = turns * COMPUTING + LATENCY + late
    there = period * np.arange(rounds + 1)[None, :]
    end = there + (turn * COMPUTING)[:, None]
    begin = end[:, :-1] + COMPUTING
    begin[turn == turns - 1] += late
    computing = np.full((ranks, rounds), COMPUTING)
    return Calls(since=end[:, :-1], begin=begin, end=end[:, 1:], computing=computing)


@pytest.mark.parametrize(("ranks", "cores"), [(2, 2), (4, 2), (8, 2), (8, 1)])
def test_what_others_compute_meanwhile_is_no_part_of_a_message(ranks: int, cores: int) -> None:
    """Between the last rank's coming and its going on the others compute already, which is in their computation."""
    calls, turns = calls_by_turns(ranks, cores), ranks / cores
    assert calls.seconds(turns) == pytest.approx(LATENCY)
    assert calls.direct_seconds() == pytest.approx(LATENCY + (turns - 1) * COMPUTING)
    steps = turns * COMPUTING + calls.seconds(turns)  # computation and message, as a step adds them up
    assert steps == pytest.approx(float(np.diff(calls.end[0]).mean()))


def test_waiting_for_late_ranks_is_counted_once() -> None:
    """What the slowest rank takes longer is in the message, or in the factor on computation, where that has it."""
    late = 0.1 * COMPUTING
    calls = calls_by_turns(2, 2, late=late)
    assert calls.seconds(1.0) == pytest.approx(LATENCY + late)
    assert calls.seconds(1.0 + late / COMPUTING) == pytest.approx(LATENCY)


def test_a_message_takes_no_less_than_until_the_first_goes_on() -> None:
    assert calls_by_turns(4, 2).seconds(3.0) == pytest.approx(LATENCY)


def test_a_send_is_timed_between_its_two_ranks() -> None:
    calls, others = calls_by_turns(2, 2), calls_by_turns(4, 1)
    names = ("since", "begin", "end", "computing")
    joined = Calls(**{name: np.concatenate([getattr(calls, name), getattr(others, name)]) for name in names})
    of_all = dict.fromkeys(Collective, (joined,))
    times = MessageCalls(calls=of_all, overlap=1.0, resident_bytes=0, workspace={}).times(1.0)
    assert times.processes == 6
    assert times.seconds[Collective.SEND] == (pytest.approx(LATENCY),)
    assert joined.of(SENDERS).end.tolist() == calls.end.tolist()
    assert times.seconds[Collective.ALL_REDUCE][0] > 2 * LATENCY


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_calls_follow_each_other_and_their_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SIZES", (64,))
    monkeypatch.setattr(messages, "CALL_ROUNDS", 2)
    monkeypatch.setattr(messages, "PART_ELEMENTS", 64)
    found = messages._run_collectives(torch.device("cpu"))
    assert set(found) == set(Collective)
    moments = [
        [float(getattr(calls, name)[0, call]) for name in ("since", "begin", "end")]
        for half in (0, 1)
        for (calls,) in found.values()
        for call in np.array_split(np.arange(calls.end.shape[1]), 2)[half]
    ]
    for before, (since, begin, end) in zip([None, *moments[:-1]], moments, strict=True):
        assert since < begin < end
        assert before is None or before[2] == since
