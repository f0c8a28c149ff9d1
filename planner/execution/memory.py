"""Peak memory of this process, measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from simulator.calibration.allocations import recorded_growth
from simulator.calibration.npu import load_npu
from simulator.calibration.process import return_free_memory
from simulator.machine_memory import free_memory as free_on_host
from simulator.machine_memory import status

CLEAR_REFERENCES = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class PeakMemory:
    """Peak bytes of tensors since its making, as torch's allocator hands them out.

    An accelerator's allocator counts by itself. On a CPU the allocations of the warm-up steps are recorded; they
    hold tensors, message buffers and the operators' own workspaces. Where nothing was recorded the growth of
    resident memory stands in, which also holds the allocator's waste and what libraries keep for themselves.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded = 0
        self._allocated_before = 0
        if device.type == "cpu":
            return_free_memory()  # blocks freed before would hide new ones
        else:
            self._allocated_before = int(getattr(torch, device.type).memory_allocated(device))
        self._resident_before = status("VmRSS")

    def restart(self) -> None:
        """Forget the peak so far, but not the start: what was built and thrown away does not count."""
        if self._device.type != "cpu":
            getattr(torch, self._device.type).reset_peak_memory_stats(self._device)
            return
        with suppress(OSError):  # forbidden in some containers: the growth then includes building the network
            CLEAR_REFERENCES.write_text(RESET_PEAK)

    def record(self, work: Callable[[], None], held_bytes: int) -> None:
        """Do some work and, on a CPU, record its allocations on top of the bytes held before."""
        if self._device.type != "cpu":
            work()
            return
        self._recorded = max(self._recorded, held_bytes + recorded_growth(work))

    def peak_bytes(self) -> int:
        """Peak of tensors, in bytes; resident growth where nothing was recorded."""
        if self._device.type == "cpu":
            return self._recorded or max(0, status("VmHWM") - self._resident_before)
        return int(getattr(torch, self._device.type).max_memory_allocated(self._device)) - self._allocated_before

    @property
    def method(self) -> str:
        """How `peak_bytes` was found."""
        if self._device.type != "cpu":
            return "peak of the device allocator"
        return "peak of the allocator in the warm-up steps" if self._recorded else "growth of resident memory"


def free_memory(device_type: str, local_rank: int) -> int | None:
    """Bytes free for new tensors on a device, or on this machine where its container allows that; None if unknown."""
    if device_type != "cpu":
        module = getattr(torch, device_type)
        return int(module.mem_get_info(local_rank)[0]) if hasattr(module, "mem_get_info") else None
    return free_on_host()


def least_free_memory(device_type: str, devices: int) -> int | None:
    """Bytes free on the fullest of this machine's first devices of an accelerator; None if unknown."""
    if device_type == "npu":
        load_npu()
    found = [free_memory(device_type, number) for number in range(devices)]
    return min((free for free in found if free is not None), default=None)
