"""In a ring every message but the last is under way while a piece is worked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from planner.sharding import local_context
from planner.sharding.inner_messages import inner_messages, message_count, waiting_time
from planner.sharding.local_call import Parts
from planner.sharding.local_context import ring_attention_backward
from planner.sharding.rule_notation import InnerMessage, Rule
from simulator.program import Collective

SIZE = 4
KEPT = (2, 3, 7, 8)


def test_messages_of_the_backward_pass_travel_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    def work(tensors: Any, key: Any, value: Any, **_: object) -> Parts:
        events.append("work")
        return torch.zeros_like(tensors[1]), torch.zeros_like(key), torch.zeros_like(value)

    def pass_on(parts: Parts) -> Callable[[], Parts]:
        events.append("send")

        def arrive() -> Parts:
            events.append("wait")
            return parts

        return arrive

    monkeypatch.setattr(local_context, "attend_backward_anywhere", work)
    tensor, sums = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4)
    ring_attention_backward(
        (tensor, tensor, tensor, tensor, tensor, sums),
        rank=1, size=SIZE, causal=True, scale=None, copies=1, pass_on=pass_on,
    )  # fmt: skip
    first, between, last = ["send", "work", "wait"], ["send", "send", "work", "wait", "wait"], ["send", "work", "wait"]
    assert events == [*first, *between * (SIZE - 2), *last, "send", "wait"]


def test_they_are_as_many_and_as_large_as_timed() -> None:
    around = InnerMessage(Collective.SEND, tensors=KEPT, circulating=True, overlapped=True)
    home = InnerMessage(Collective.SEND, tensors=(7, 8))
    found = inner_messages(Rule((), (), splits_work=True, messages=(around, home)))
    assert [message.tensors for message in found] == [(2, 3), (7, 8), (7, 8)]
    assert sum(message_count(message, SIZE) for message in found) == 2 * (SIZE - 1) + 1
    waited = sum(waiting_time(message, SIZE, 0.5, 2.0) for message in found[:2])
    assert waited == waiting_time(around, SIZE, 1.0, 2.0), "two halves are hidden as the whole was"
