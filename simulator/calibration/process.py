"""What a worker process asks of its operating system before it computes, in calibration as in execution."""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
LARGEST_INT = 2**31 - 1

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(4 * 2**30),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 2**30),
}
"""glibc keeps large blocks instead of returning them: without it each large result is paged in anew."""


STOPPED_S = 10.0
"""A process that has been stopped (SIGSTOP) for so long counts as lost."""
LOOK_S = 1.0
PR_SET_PDEATHSIG = 1


def worker_environment() -> dict[str, str]:
    """Variables that workers on this machine must find when they start.

    The user's own settings win, but not over the interface: workers of one machine listen on the loopback alone.
    """
    loopback = "lo" if sys.platform == "linux" else "lo0"
    wanted = {**ALLOCATOR_ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    always = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    return {name: value for name, value in wanted.items() if name not in os.environ} | always


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


def settle_worker(stopped_launcher: Callable[[], None] | None = None) -> None:
    """Set scheduler and allocator, and tie a local worker's life to its launcher's.

    The batch scheduler matters most: gloo's polling threads otherwise spin away whole time slices
    when there are more processes than cores. It must be set before any process group exists.

    Parameters
    ----------
    stopped_launcher : callable, optional
        For workers of this machine's launcher: called before the process ends because its launcher stays stopped.
    """
    if stopped_launcher is not None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # end at once and without a traceback
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _die_with_launcher(stopped_launcher)
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


def process_state(pid: int) -> str:
    """The state of a process in Linux's letters, such as ``T`` when it is stopped; empty where there is none to know.

    >>> process_state(os.getpid())
    'R'
    """
    return _state_and_parent(pid)[0]


@contextmanager
def stopped_children_killed() -> Iterator[None]:
    """Kill children of this process that stay stopped meanwhile, which pools would wait for without end.

    A pool then meets a dead process, as it is prepared to. Children that are stopped before are left alone. Only looks
    of this process count: after Ctrl-Z all processes go on together. At the end, every child that is stopped is killed.
    """
    before = _stopped_children()
    over = threading.Event()

    def watch() -> None:
        stopped_for: dict[int, float] = {}
        while not over.wait(LOOK_S):
            stopped_for = {pid: stopped_for.get(pid, 0.0) + LOOK_S for pid in _stopped_children() - before}
            _kill(pid for pid, seconds in stopped_for.items() if seconds >= STOPPED_S)

    watching = threading.Thread(target=watch, daemon=True, name="stopped-children")
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        _kill(_stopped_children() - before)


@contextmanager
def children_killed_on_error() -> Iterator[None]:
    """Kill the children of `multiprocessing` that were started meanwhile when an error ends it.

    A ``ProcessPoolExecutor`` of Python 3.11 that breaks while it starts a process does not end that one, and waits for
    it without end.
    """
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        for child in set(multiprocessing.active_children()) - before:
            child.kill()
        raise


def kill_stopped_children_until_exit() -> None:
    """Do so until this process ends, for it may wait for its children once more then."""
    watching = ExitStack()
    watching.enter_context(stopped_children_killed())
    atexit.register(watching.close)


def _stopped_children() -> set[int]:
    """Children of this process that a signal has stopped; empty where there is no /proc."""
    pids = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return {pid for pid in pids if _state_and_parent(pid) == ("T", os.getpid())}


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (OSError, ValueError):
        return "", 0
    return state, int(parent)


def end_with_parent() -> None:
    """Have Linux end this process with the thread that started it, even while this process is stopped."""
    libc = _libc()
    if libc is not None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        # The parent may have been gone before; without /proc nobody can tell.
        if parent is not None and process_state(os.getpid()) and process_state(parent.pid or 0) in ("", "Z"):
            os.kill(os.getpid(), signal.SIGKILL)


def _die_with_launcher(stopped_launcher: Callable[[], None]) -> None:
    """End this process when its launcher is gone or stays stopped.

    Linux ends it with its parent, the server that it was forked from, even while it is stopped itself. The server ends
    with the launcher, and is ended here if it cannot, because it is stopped or because its launcher is.
    """
    server = os.getppid()
    end_with_parent()
    launcher = multiprocessing.parent_process()
    if launcher is None:
        return

    def watch() -> None:
        stopped = 0.0
        while stopped < STOPPED_S and not wait([launcher.sentinel], LOOK_S):
            stopped = stopped + LOOK_S if process_state(launcher.pid or 0) == "T" else 0.0
        if stopped:
            stopped_launcher()
        if os.getppid() == server != launcher.pid:
            with suppress(OSError):
                os.kill(server, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None)
