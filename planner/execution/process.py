"""What a worker process asks of its operating system before it computes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_INT = 2**31 - 1

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""glibc keeps large blocks instead of returning them: without it each large result is paged in anew."""


def worker_environment(processes: int, *, local: bool) -> dict[str, str]:
    """Variables a worker must find when it starts; the user's own settings win.

    Parameters
    ----------
    processes : int
        Workers on this machine; its cores are divided among them.
    local : bool
        Whether all workers are on this machine, so that gloo can use the loopback interface.
    """
    wanted = {**ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": str(threads_for(processes))}
    if local:
        wanted["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {name: value for name, value in wanted.items() if name not in os.environ}


def threads_for(processes: int) -> int:
    """Compute threads of each of `processes` workers on this machine, at least one."""
    return max(1, available_cores() // processes)


def available_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def settle_worker(*, owned: bool) -> None:
    """Set scheduler and allocator, and tie an owned worker's life to its launcher's.

    The batch scheduler matters most: gloo's polling threads otherwise spin away whole time slices
    when there are more processes than cores. It must be set before any process group exists.
    """
    if owned:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _die_with_parent()
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # forbidden in some containers: slower, not wrong
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    keep_large_blocks()


def keep_large_blocks() -> None:
    """Make glibc's allocator reuse large blocks, also where the environment came too late."""
    mallopt = getattr(_libc(), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(M_MMAP_THRESHOLD, LARGEST_INT)
        mallopt(M_TRIM_THRESHOLD, LARGEST_INT)


def _die_with_parent() -> None:
    prctl = getattr(_libc(), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
