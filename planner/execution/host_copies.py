"""Copies between an accelerator and the memory of its host that run beside computation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class HostCopies:
    """Copies on a stream of their own, in the order in which they are asked for; host memory is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)
        self._stream = self._module.Stream(device)

    def to_host(self, value: Tensor) -> Tensor:
        """Begin to copy a tensor to the host; its memory is given back once that has ended.

        Only `from_host` may read the copy.
        """
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            there = torch.empty_like(value, device="cpu", pin_memory=True)
            there.copy_(value, non_blocking=True)
        value.record_stream(self._stream)
        return there

    def from_host(self, there: Tensor) -> tuple[Tensor, Any]:
        """Begin to copy a tensor to the device, behind what was computed so far; with it what `arrived` waits for."""
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            return there.to(self._device, non_blocking=True), self._stream.record_event()

    def arrived(self, value: Tensor, event: Any) -> None:
        """Let computation wait for a copy to the device."""
        current = self._module.current_stream(self._device)
        current.wait_event(event)
        value.record_stream(current)
