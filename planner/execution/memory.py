"""Peak memory of this process, measured."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from simulator.calibration.machine import load_npu
from simulator.calibration.messages import recorded_growth
from simulator.calibration.process import return_free_memory
from simulator.errors import ExecutionError
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


class MappedStates:
    """States of one optimizer, each of more than one number in a file of its own.

    Files are made where the system keeps temporary ones (``TMPDIR``) and have no name once they are mapped: nothing is
    left of them when the process ends, however it ends.
    """

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}

    def settle(self, state: dict[str, Tensor]) -> None:
        """Move states that are new, or were put in another's place, to files.

        Raises
        ------
        ExecutionError
            The disk is full, or its folder cannot be written.
        """
        for name, value in state.items():
            if value.dim() and self._mapped.get(name) is not value:
                self._mapped[name] = state[name] = mapped(value, "optimizer states")


def mapped(value: Tensor, what: str) -> Tensor:
    """A copy of a tensor in a file; ExecutionError, which says `what` it is, where the disk does not take it."""
    folder = tempfile.gettempdir()
    try:
        handle, path = tempfile.mkstemp(prefix="meshwright-states-", dir=folder)
        try:
            # Space is taken now: a mapped file that outgrows its disk would end the process without a word.
            take = getattr(os, "posix_fallocate", lambda file, start, size: os.truncate(file, size))
            take(handle, 0, max(value.nbytes, 1))
            made = torch.from_file(path, shared=True, size=value.numel(), dtype=value.dtype).view(value.shape)
        finally:
            os.close(handle)
            Path(path).unlink()
    except OSError as error:
        raise ExecutionError(
            f"{what} of {value.nbytes} bytes cannot be put on the disk of {folder}: "
            f"{error.strerror or error}; set TMPDIR to a folder with room, or plan with --pin offload_to=host"
        ) from error
    made.copy_(value)
    return made
