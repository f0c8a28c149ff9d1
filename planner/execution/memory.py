"""Peak memory of this process, measured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from simulator.calibration.allocations import recorded_growth
from simulator.calibration.npu import load_npu

STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")
MEMORY = Path("/proc/meminfo")
GROUP = Path("/sys/fs/cgroup")
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
        self._resident_before = _status("VmRSS")
        self._allocated_before = 0
        if device.type != "cpu":
            self._allocated_before = int(getattr(torch, device.type).memory_allocated(device))

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
            return self._recorded or max(0, _status("VmHWM") - self._resident_before)
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
    found = [bound for bound in (_available(), _left_in_group()) if bound is not None]
    return min(found, default=None)


def least_free_memory(device_type: str, devices: int) -> int | None:
    """Bytes free on the fullest of this machine's first devices of an accelerator; None if unknown."""
    if device_type == "npu":
        load_npu()
    found = [free_memory(device_type, number) for number in range(devices)]
    return min((free for free in found if free is not None), default=None)


def _available() -> int | None:
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _left_in_group() -> int | None:
    """What the limit of this process's control group leaves; file cache does not count as used."""
    try:
        limit, used = (GROUP / "memory.max").read_text(), int((GROUP / "memory.current").read_text())
        lines = (GROUP / "memory.stat").read_text().splitlines()
        cache = next((int(line.split()[1]) for line in lines if line.startswith("file ")), 0)
        return max(0, int(limit) - used + cache)
    except (OSError, ValueError):  # no such group, or no limit
        return None


def _status(field: str) -> int:
    """Read a field of the process status in bytes; 0 where the system has none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
