"""Peak memory of this process, measured."""

from __future__ import annotations

from pathlib import Path

import torch

STATUS = Path("/proc/self/status")
CLEAR_REFERENCES = Path("/proc/self/clear_refs")
RESET_PEAK = "5"


class PeakMemory:
    """Growth of this process's memory since its making.

    On an accelerator it is what torch's allocator counts. On a CPU it is resident memory: the
    kernel's peak (`VmHWM`, reset at the start) less what was resident at the start, so it holds
    tensors, the operators' own workspaces, message buffers and the allocator's waste.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.method = "device allocator peak"
        if device.type == "cpu":
            self.method = "growth of resident memory"
            self._before = _status("VmRSS")
        else:
            self._before = int(getattr(torch, device.type).memory_allocated(device))
        self.restart()

    def restart(self) -> None:
        """Forget the peak so far, but not the start: what was built and thrown away does not count."""
        if self._device.type != "cpu":
            getattr(torch, self._device.type).reset_peak_memory_stats(self._device)
            return
        try:
            CLEAR_REFERENCES.write_text(RESET_PEAK)
        except OSError:
            self.method = "growth of resident memory, building of the network included"

    def peak_bytes(self) -> int:
        """Peak since the last restart, in bytes above the start."""
        if self._device.type == "cpu":
            return max(0, _status("VmHWM") - self._before)
        return int(getattr(torch, self._device.type).max_memory_allocated(self._device)) - self._before


def _status(field: str) -> int:
    """Read a field of the process status in bytes; 0 where the system has none."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)
