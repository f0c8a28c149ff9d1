"""What a worker process asks of its operating system before it computes, in calibration as in execution."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from contextlib import suppress

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_INT = 2**31 - 1

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""glibc keeps large blocks instead of returning them: without it each large result is paged in anew."""


def worker_environment() -> dict[str, str]:
    """Variables that workers on this machine must find when they start; the user's own settings win."""
    loopback = "lo" if sys.platform == "linux" else "lo0"
    wanted = {**ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def worker_threads() -> int:
    """Compute threads of a worker: one, or what the user set; calibration and execution must agree on it."""
    text = os.environ.get("OMP_NUM_THREADS", "1")
    return int(text) if text.isdecimal() and int(text) > 0 else 1


def available_cores() -> int:
    """Cores this process may run on, how many."""
    return len(own_cores())


def own_cores() -> set[int]:
    """Numbers of the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def settle_worker(*, owned: bool) -> None:
    """Set scheduler and allocator, and tie an owned worker's life to its launcher's.

    The batch scheduler matters most: gloo's polling threads otherwise spin away whole time slices
    when there are more processes than cores. It must be set before any process group exists.
    """
    if owned:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and without a traceback
        _die_with_launcher()
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


def return_free_memory() -> None:
    """Give pages of freed blocks back to the system, so that they count as nobody's."""
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _die_with_launcher() -> None:
    """End this process when its launcher is gone, however that ended."""
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        launcher.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
