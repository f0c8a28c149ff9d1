"""Runs a user's code in a process of its own, so that code that crashes or never ends stops nothing else."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

from simulator.calibration.process import end_with_parent
from simulator.errors import MeshwrightError, NetworkError
from simulator.machine_memory import bound_memory

Result = TypeVar("Result")

LIMIT = "MESHWRIGHT_CAPTURE_LIMIT"
"""Variable with the most seconds that a user's code may take."""
LIMIT_S = 600.0
IDLE_S = 20.0
"""Code that has used no processor time for so long waits for something that does not come."""
POLL_S = 1.0
GRACE_S = 2.0


def in_child(name: str, work: Callable[[], Result]) -> Result:
    """Return what `work` returns in a fork of this process, which nothing that it does changes.

    Here and now where forks are not safe (Linux alone has them), in processes that have a parent who watches them, such
    as ranks, and in those that have trained: threads of autograd do not outlive a fork. What the work prints goes to
    stderr, for stdout may be a document.

    Parameters
    ----------
    name
        The network, for messages.
    work
        Runs the user's code; what it returns can be pickled.

    Raises
    ------
    NetworkError
        The process died, waited for ever or took too long.
    MeshwrightError
        As the work raised it.
    """
    if not forks():
        return work()
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(name, work, sending), name=f"capture of {name}")
    child.start()
    sending.close()
    try:
        found, error = _received(name, child, receiving)
    finally:
        child.kill()
        child.join()
        child.close()
        receiving.close()
    if isinstance(error, _NoAutogradError):
        return work()
    if error is not None:
        raise error
    return found  # type: ignore[no-any-return]


def forks() -> bool:
    """Whether `in_child` works in a fork, and not here and now."""
    return sys.platform.startswith("linux") and multiprocessing.parent_process() is None and not _is_rank()


class _NoAutogradError(Exception):
    """The fork cannot differentiate."""


def _is_rank() -> bool:
    """Whether this process trains with others, whose network has been captured before."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _run(name: str, work: Callable[[], Any], sending: Connection) -> None:
    """What the child does; it ends at once, whatever threads and handlers the work has left."""
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the parent, which ends this process
    sys.stdout = sys.stderr
    with suppress(OSError):
        os.dup2(2, 1)
    outcome: tuple[Any, BaseException | None]
    try:
        _one_thread()
        bound_memory()
        outcome = work(), None
    except _NoAutogradError as error:
        outcome = None, error
    except MeshwrightError as error:
        outcome = None, error
    except BaseException as error:  # noqa: BLE001 such as an exit of the user's code
        outcome = None, NetworkError(f"network {name!r}: its code raises {type(error).__name__}: {error}; correct it")
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    try:
        sending.send(outcome)
    except Exception as error:  # noqa: BLE001 what cannot be pickled raises whatever it likes
        sending.send((None, NetworkError(f"network {name!r}: what its code makes cannot be passed on: {error}")))
    os._exit(0)


def _one_thread() -> None:
    """Threads do not outlive a fork: a child that asked OpenMP for them would wait for ever, and autograd refuses."""
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_num_threads(1)
    try:
        torch.zeros(1, requires_grad=True).sum().backward()
    except RuntimeError as error:
        raise _NoAutogradError(str(error)) from error


def _received(name: str, child: ForkProcess, receiving: Connection) -> tuple[Any, BaseException | None]:
    """Wait for the outcome as long as the child is at work."""
    limit_s = _limit_s()
    began = moved = time.monotonic()
    used = -1.0
    while not wait([receiving, child.sentinel], POLL_S):
        now = time.monotonic()
        used, before = _used_s(child.pid), used
        if used != before:
            moved = now
        if now - moved >= IDLE_S:
            raise NetworkError(
                f"network {name!r}: its code has waited for {IDLE_S:g} s without computing, so that it may never end; "
                "take out what it waits for"
            )
        if now - began >= limit_s:
            raise NetworkError(
                f"network {name!r}: its code has not ended within {limit_s:g} s; make a smaller module, or set {LIMIT} "
                "to more seconds"
            )
    with suppress(EOFError, OSError):
        if receiving.poll():
            found: tuple[Any, BaseException | None] = receiving.recv()
            return found
    child.join(GRACE_S)
    raise NetworkError(f"network {name!r}: its code {_end(child.exitcode)}; correct it")


def _end(code: int | None) -> str:
    if code is None:
        return "closes the connection to the process that started it"
    if code >= 0:
        return f"ends the process with exit code {code}"
    name = signal.Signals(-code).name
    hint = " (often the system's way to end a process when memory runs out)" if name == "SIGKILL" else ""
    return f"ends the process with signal {name}{hint}"


def _limit_s() -> float:
    with suppress(ValueError):
        given = float(os.environ.get(LIMIT, ""))
        if given > 0:
            return given
    return LIMIT_S


def _used_s(pid: int | None) -> float:
    """Processor time and pages read by all threads of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return float(sum(map(int, (fields[9], fields[11], fields[12]))))
