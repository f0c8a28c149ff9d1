"""Starts worker processes on this machine, watches them, and ends them in every case.

Workers share a store that this process keeps. It listens on the loopback alone, and what it holds are bytes that nobody
unpickles. Results come through a folder that only this user reads.
"""

from __future__ import annotations

import atexit
import json
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch._C._distributed_c10d import TCPStore

from simulator.calibration.process import STOPPED_S, process_state, settle_worker, worker_environment, worker_threads
from simulator.errors import ExecutionError

Result = TypeVar("Result")

LOOPBACK = "127.0.0.1"
STORE_TIMEOUT_S = 60
SHUTDOWN_S = 3.0
"""How long a worker may take to end when told."""
POLL_S = 0.1
LOOK_S = 1.0
"""How often this process looks whether a worker is stopped."""
PEER_WAIT_S = 2.0
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LONGEST_MESSAGE = 2000
WORK = "work.pickle"


def run_workers(
    function: Callable[..., Result],
    arguments: tuple[Any, ...],
    processes: int,
    *,
    logs: Path | None = None,
    module: str | None = None,
) -> list[Result]:
    """Run `function(*arguments)` in `processes` new processes that find themselves in one job.

    They have the variables of torchrun, so that `torch.distributed.init_process_group` needs no more.

    Parameters
    ----------
    logs : Path, optional
        Where the workers write their logs themselves; what they write before that is kept there if one fails.
    module : str, optional
        What the server that workers are forked from imports first; the module of `function` by default.

    Returns
    -------
    list
        What each rank returned, by rank.

    Raises
    ------
    ExecutionError
        A rank failed or was stopped; the others are ended before this is raised. The message holds that rank's
        own error and the folder of all ranks' output, which is kept.
    KeyboardInterrupt
        The user interrupted; all ranks are ended.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix="meshwright-" if logs is None else "launcher-", dir=logs))
    except OSError as error:
        raise _no_room(error) from error
    keep = False
    try:
        (folder / WORK).write_bytes(pickle.dumps((function, arguments)))  # once, not for every process
        with _noted_signals() as noted, _environment(worker_environment()), _loopback_store(processes) as port:
            workers = _Workers(_forking(module or function.__module__), folder, processes, port)
            try:
                workers.run(noted)
            finally:
                workers.end()
            noted.check()
        return [pickle.loads(_result(folder, rank).read_bytes()) for rank in range(processes)]  # noqa: S301 - our own
    except _WorkerFailed as failed:
        keep = True
        raise ExecutionError(f"{failed}. The output of every rank is in {logs or folder}") from None
    except OSError as error:
        raise _no_room(error) from error
    finally:
        (folder / WORK).unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def ask_process(function: Callable[..., Result], arguments: tuple[Any, ...], workers: str) -> Result:
    """Call a function in a process of its own, which ends at once: what it opens on an accelerator goes with it.

    Parameters
    ----------
    workers : str
        The module whose functions `run_workers` will run; both fork their processes from one server.
    """
    return run_workers(function, arguments, 1, module=workers)[0]


def _no_room(error: OSError) -> ExecutionError:
    where = error.filename or tempfile.gettempdir()
    return ExecutionError(
        f"workers cannot be started: {where}: {error.strerror or error}; free some space, or set TMPDIR to another "
        "folder"
    )


def _forking(module: str) -> ForkServerContext:
    """Processes forked from a server that has imported what workers need; only the first call of a process says what.

    A script of the user's is not imported there, for it may start processes itself; what installers write does not.
    """
    context = multiprocessing.get_context("forkserver")
    installed = not str(getattr(sys.modules["__main__"], "__file__", ".py")).endswith(".py")
    context.set_forkserver_preload(["torch.distributed", module, *["__main__"][: int(installed)]])
    return context


@contextmanager
def _loopback_store(processes: int) -> Iterator[int]:
    """Keep a store for the workers on a free port of the loopback, and give the port."""
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with listening:
        listening.bind((LOOPBACK, 0))
        listening.listen(socket.SOMAXCONN)
        port = listening.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            processes,
            is_master=True,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
    try:
        yield port
    finally:
        del store


# The launching process


class _WorkerFailed(Exception):  # noqa: N818 - not an error of its own: it becomes one with the folder of logs
    pass


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why a rank ended: in order of `peer` and `at`, the first is the cause of the others."""

    peer: bool
    at: float
    rank: int
    text: str
    interrupted: bool = False


class _Workers:
    """The worker processes of one call.

    A thread starts them, because a start waits for the server that they are forked from, which may be stopped as any
    process may.
    """

    def __init__(self, context: ForkServerContext, folder: Path, processes: int, port: int) -> None:
        self._context, self._folder, self._size, self._port = context, folder, processes, port
        self._started: list[tuple[BaseProcess, Connection]] = []
        self._ending = threading.Event()
        self._problem: Exception | None = None
        self._starter = threading.Thread(target=self._start, daemon=True, name="worker-start")
        self._stopped_for: dict[int, float] = {}

    def run(self, noted: _NotedSignals) -> None:
        """Start the workers and wait until all have ended well."""
        self._starter.start()
        looked = time.monotonic()
        while True:
            noted.check()
            starting = self._starter.is_alive()  # before the workers are counted
            running = [process.sentinel for process, _ in self._started if process.exitcode is None]
            self._check_ended()
            if not starting and not running:
                return
            if time.monotonic() - looked >= LOOK_S:
                looked = time.monotonic()
                self._check_stopped(starting)
            if not wait(running, POLL_S) and not running:
                time.sleep(POLL_S)

    def end(self) -> None:
        """End all that still run, and a stopped server. Those that do not end when told are killed."""
        self._ending.set()
        self._starter.join(POLL_S)
        server = _server_pid()
        if server is not None and process_state(server) == "T":
            self._kill_server()
        while self._starter.is_alive():  # it may not have started the server yet
            self._kill_server()
            self._starter.join(POLL_S)
        running = [process for process, _ in self._started if process.exitcode is None]
        for process in running:
            process.terminate()
        end = time.monotonic() + SHUTDOWN_S
        while running and time.monotonic() < end:
            wait([process.sentinel for process in running], max(0.0, end - time.monotonic()))
            running = [process for process in running if process.exitcode is None]
        for process in running:
            process.kill()
        for process, told in self._started:
            process.join()
            process.close()
            told.close()

    def _start(self) -> None:
        # The server inherits this: an interrupt in the midst of its imports would end it with a traceback. The tracker
        # comes first, because its start unblocks the signal.
        resource_tracker.ensure_running()
        _leave_none_stopped()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for rank in range(self._size):
                if self._ending.is_set():
                    return
                told, telling = self._context.Pipe(duplex=False)
                with telling:
                    orders = (self._folder, rank, self._size, self._port, telling, dict(os.environ))
                    process = self._context.Process(target=_work, args=orders, name=f"rank {rank}")
                    process.start()
                self._started.append((process, told))
        except Exception as error:  # noqa: BLE001 raised in the main thread
            self._problem = error

    def _check_ended(self) -> None:
        """Raise for what was the first to fail."""
        found = [
            self._failure(rank, process.exitcode, told)
            for rank, (process, told) in enumerate(self._started)
            if process.exitcode
        ]
        if found:
            first = min(found, key=lambda failure: (failure.peer, failure.at))
            if first.interrupted:
                raise KeyboardInterrupt
            raise _WorkerFailed(f"rank {first.rank} of {self._size} failed: {first.text}; the other ranks were stopped")
        if self._problem is not None and not self._ending.is_set():
            raise _WorkerFailed(
                f"the server that starts the ranks has ended ({type(self._problem).__name__}: {self._problem}); "
                "see its output above, and whether memory has run out"
            ) from self._problem

    def _failure(self, rank: int, code: int, told: Connection) -> _Failure:
        """What a rank has told of its error, or the signal that ended it."""
        with suppress(OSError, EOFError, ValueError, KeyError):
            if told.poll():
                said = json.loads(told.recv_bytes())
                return _Failure(said["peer"], said["at"], rank, said["text"].strip().rstrip(".;"))
        if code > 0:
            return _Failure(False, time.time(), rank, f"it ended with exit code {code}")
        name = signal.Signals(-code).name
        hint = " (often the system's way to end a process when memory runs out)" if name == "SIGKILL" else ""
        text = f"it was ended by signal {name}{hint}"
        return _Failure(False, time.time(), rank, text, interrupted=code == -signal.SIGINT)

    def _check_stopped(self, starting: bool) -> None:
        """Raise where a worker, or the server that starts them, has been stopped for long.

        Only looks of this process count: after Ctrl-Z all of them go on together.
        """
        server = _server_pid() if starting else None
        watched = {process.pid: f"rank {rank} of {self._size}" for rank, (process, _) in enumerate(self._started)}
        for pid, who in (*watched.items(), (server, "the server that starts the ranks")):
            if pid is None:
                continue
            stopped = process_state(pid) == "T"
            self._stopped_for[pid] = self._stopped_for.get(pid, 0.0) + LOOK_S if stopped else 0.0
            if self._stopped_for[pid] >= STOPPED_S:
                raise _WorkerFailed(
                    f"{who} failed: it has been stopped (SIGSTOP) for {STOPPED_S:g} s; the other ranks were stopped"
                )

    def _kill_server(self) -> None:
        """End the server that a start waits for; the next start has a new one."""
        pid = _server_pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while process_state(pid) not in ("", "Z", "X"):  # multiprocessing takes its exit code itself
                time.sleep(POLL_S / 10)


@cache
def _leave_none_stopped() -> None:
    """At exit, kill helpers of multiprocessing that are stopped: they end with this process only while they run."""

    def kill() -> None:
        tracker: int | None = getattr(getattr(resource_tracker, "_resource_tracker", None), "_pid", None)
        for pid in (_server_pid(), tracker):
            if pid is not None and process_state(pid) == "T":
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    atexit.register(kill)


def _server_pid() -> int | None:
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    return getattr(server, "_forkserver_pid", None)


class _NotedSignals:
    """Signals that came; an exception out of their handler could lose a process that is being started."""

    def __init__(self) -> None:
        self.received: int | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """Keep the first."""
        self.received = self.received or number

    def check(self) -> None:
        """Raise what the signal that came stands for."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(128 + self.received)


@contextmanager
def _noted_signals() -> Iterator[_NotedSignals]:
    """Note signals that would end this process; those that it ignores, as under nohup, stay ignored."""
    noted = _NotedSignals()
    wanted = [number for number in HANDLED if signal.getsignal(number) is not signal.SIG_IGN]
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        wanted = []
    before = {number: signal.signal(number, noted.note) for number in wanted}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# A worker

_telling: list[Connection] = []
"""Where this process, if it is a worker, tells why it ends; empty once it has."""


def _work(folder: Path, rank: int, size: int, port: int, telling: Connection, environment: dict[str, str]) -> None:
    """What a worker process does; it ends at once, whatever threads it has left."""
    _telling.append(telling)
    settle_worker(_tell_stopped_launcher)
    os.environ.clear()
    os.environ.update(environment)
    os.environ.update(_place(rank, size, port))
    try:
        _write_to(folder / f"rank{rank}.log")
        torch.set_num_threads(worker_threads())
        function, arguments = pickle.loads((folder / WORK).read_bytes())  # noqa: S301 - written by the launcher
        _result(folder, rank).write_bytes(pickle.dumps(function(*arguments)))
        code = 0
    except BaseException as error:  # noqa: BLE001 the process ends with it
        traceback.print_exc()
        code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code else 1
        if isinstance(error, Exception):
            record_failure(error)
        if isinstance(error, Exception) and is_peer_failure(error):
            # Leave the launcher time to see first the rank that failed by itself.
            time.sleep(PEER_WAIT_S)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def record_failure(error: Exception) -> None:
    """Tell the process that started this worker why it will end; the first time counts."""
    if not _telling:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun shows what stands there
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        return
    text = f"{type(error).__name__}: {error}"[:LONGEST_MESSAGE]
    said = {"text": text, "at": time.time(), "peer": is_peer_failure(error)}
    with suppress(OSError, ValueError):
        _telling.pop().send_bytes(json.dumps(said).encode())


def _tell_stopped_launcher() -> None:
    record_failure(ExecutionError(f"the process that started the ranks was stopped (SIGSTOP) for {STOPPED_S:g} s"))


def _result(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pickle"


def _place(rank: int, size: int, port: int) -> dict[str, str]:
    """A worker's place in the job, as torchrun tells it; the store is there already."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _write_to(file: Path) -> None:
    number = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(number, stream)
    os.close(number)


def is_peer_failure(error: Exception) -> bool:
    """Whether an error only says that another rank is gone or silent."""
    text = str(error).lower()
    signs = ("connection", "closed by peer", "broken pipe", "timed out", "timeout", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)
