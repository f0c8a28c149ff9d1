"""Copies beside computation: in order on their own stream, and waited for where they are read. A made-up device."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.execution import communication
from planner.execution.communication import HostCopies

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.log.append(f"event on {self.name}")
        return f"copy {self.log.count(f'event on {self.name}')}"

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    computing = Stream("compute", found)

    @contextmanager
    def entered(stream: Stream) -> Any:
        found.append(f"on {stream.name}")
        yield

    module = SimpleNamespace(
        Stream=lambda device: Stream("copies", found), current_stream=lambda device: computing, stream=entered
    )
    monkeypatch.setattr(torch, "meta", module, raising=False)
    empty = torch.empty_like
    monkeypatch.setattr(
        communication.torch, "empty_like", lambda value, device, pin_memory: empty(value, device=device)
    )
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: found.append(f"kept for {stream.name}"))
    return found


def test_a_copy_leaves_behind_computation_and_is_waited_for_alone(log: list[str]) -> None:
    copies = HostCopies(torch.device("meta"))
    slots: list[Any] = [copies.to_host(torch.ones(2, device="cpu")), None, torch.ones(3), None]
    assert log == ["copies waits for compute", "on copies", "kept for copies"]
    assert torch.equal(slots[0], torch.ones(2))
    log.clear()
    first, second = copies.bringing(slots, 0, 1), copies.bringing(slots, 2, 3)
    first.start()
    second.start()
    assert log == ["copies waits for compute", "on copies", "event on copies"] * 2
    log.clear()
    first.finish()
    assert log == ["compute waits for copy 1", "kept for compute"], "not for the second one"
    assert slots[1].device.type == "meta"


@pytest.mark.slow
@NO_GPU
def test_what_has_left_comes_back_as_it_was() -> None:
    copies, device = HostCopies(torch.device("cuda")), torch.device("cuda")
    value = torch.randn(64, 64, device=device).t()
    slots: list[Any] = [copies.to_host(value), None]
    message = copies.bringing(slots, 0, 1)
    message.start()
    message.finish()
    assert slots[0].is_cpu
    assert torch.equal(slots[1], value)
