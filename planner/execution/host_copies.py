"""Copies between an accelerator and the memory of its host that run beside computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from planner.execution.communication import PreparedCollective, Slots


class HostCopies:
    """Copies on a stream of their own, in the order in which they are asked for; host memory is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def to_host(self, value: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; its memory is given back once that has ended.

        Only `bringing` may read the copy.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            there = torch.empty_like(value, device="cpu", pin_memory=True)
            there.copy_(value, non_blocking=True)
        value.record_stream(self._stream)
        return there

    def bringing(self, slots: Slots, source: int, target: int) -> PreparedCollective:
        """A copy to the device: `start` begins it behind what was computed so far, `finish` lets computation wait."""
        events: list[Any] = []

        def start() -> None:
            there = slots[source]
            assert there is not None  # it has left the device before
            self._stream.wait_stream(self._module.current_stream(self._device))
            with self._module.stream(self._stream):
                slots[target] = there.to(self._device, non_blocking=True)
                events.append(self._stream.record_event())

        def finish() -> None:
            value, current = slots[target], self._module.current_stream(self._device)
            assert value is not None  # it has been started before
            current.wait_event(events.pop(0))
            value.record_stream(current)

        return PreparedCollective(
            start=start, finish=finish, arrived=lambda: False
        )  # computation waits where it is read
