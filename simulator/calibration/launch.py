"""Starting worker processes on this machine through torch elastic, and ending them in every case."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.context import BaseContext
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.multiprocessing.spawn import ProcessContext

from simulator.calibration.process import settle_worker, worker_environment, worker_threads
from simulator.errors import ExecutionError

Result = TypeVar("Result")

SHUTDOWN_S = 3
NOISY = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing.spawn")
POLL_S = 0.1
PEER_WAIT_S = 2.0
RENDEZVOUS_S = 60
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_workers(
    function: Callable[..., Result], arguments: tuple[Any, ...], processes: int, *, logs: Path | None = None
) -> list[Result]:
    """Run `function(*arguments)` in `processes` new processes that find themselves in a torch elastic group.

    Parameters
    ----------
    logs : Path, optional
        Where the workers write their logs themselves; what they write before that is kept there if one fails.

    Returns
    -------
    list
        What each rank returned, by rank.

    Raises
    ------
    ExecutionError
        A rank failed; the others are stopped before this is raised. The message holds that rank's
        own error and the folder of all ranks' output, which is kept.
    KeyboardInterrupt
        The user interrupted; all ranks are stopped.
    """
    folder = Path(tempfile.mkdtemp(prefix="meshwright-" if logs is None else "launcher-", dir=logs))
    _forking(function.__module__)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": RENDEZVOUS_S},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=POLL_S,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL),
        shutdown_timeout=SHUTDOWN_S,
    )
    packed = folder / "work.pickle"  # written once: elastic would send it to one process after the other
    packed.write_bytes(pickle.dumps((function, arguments)))
    keep = False
    try:
        with _quiet_elastic(), _own_signals(), _stopped_workers_end_too(), _environment(worker_environment()):
            returned = elastic_launch(config, _work)(packed)
    except ChildFailedError as error:
        if error.get_first_failure()[1].exitcode == -signal.SIGINT:
            raise KeyboardInterrupt from None
        keep = True
        raise ExecutionError(_failure_text(error, logs or folder, processes)) from None
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + int(error.sigval)) from None
    finally:
        packed.unlink(missing_ok=True)
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    return [returned[rank] for rank in range(processes)]


def ask_process(function: Callable[..., Result], arguments: tuple[Any, ...], workers: str) -> Result:
    """Call a function in a process of its own, which ends at once: what it opens on an accelerator goes with it.

    Parameters
    ----------
    workers : str
        The module whose functions `run_workers` will run; both fork their processes from one server.
    """
    with _environment(worker_environment()), ProcessPoolExecutor(1, mp_context=_forking(workers)) as pool:
        return pool.submit(function, *arguments).result()


def _forking(module: str) -> BaseContext:
    """Processes forked from a server that has imported what workers need; only the first call of a process says what.

    A script of the user's is not imported there, for it may start processes itself; what installers write does not.
    """
    context = multiprocessing.get_context("forkserver")
    installed = not str(getattr(sys.modules["__main__"], "__file__", ".py")).endswith(".py")
    context.set_forkserver_preload(["simulator.calibration.preload", module, *["__main__"][: int(installed)]])
    return context


def _work(packed: Path) -> Any:
    settle_worker(owned=True)
    torch.set_num_threads(worker_threads())
    function, arguments = pickle.loads(packed.read_bytes())  # noqa: S301 - written by the launcher, in its own folder
    try:
        return function(*arguments)
    except Exception as error:
        if is_peer_failure(error):
            # Leave the launcher time to see first the rank that failed by itself.
            time.sleep(PEER_WAIT_S)
        raise


def is_peer_failure(error: Exception) -> bool:
    """Whether an error only says that another rank is gone or silent."""
    text = str(error).lower()
    signs = ("connection", "closed by peer", "broken pipe", "timed out", "timeout", "remote process exited")
    return isinstance(error, RuntimeError) and any(sign in text for sign in signs)


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keep elastic's own log lines and tracebacks from the user's terminal; the error raised says it all."""
    loggers = [logging.getLogger(name) for name in (*logging.root.manager.loggerDict, *NOISY) if name.startswith(NOISY)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _stopped_workers_end_too() -> Iterator[None]:
    """Kill workers that do not end when told; torch gives them half a minute, which stopped ones use up."""
    patient = ProcessContext._join_procs_with_timeout

    def join(context: ProcessContext, timeout: float) -> None:
        patient(context, min(timeout, SHUTDOWN_S))

    ProcessContext._join_procs_with_timeout = join  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ProcessContext._join_procs_with_timeout = patient  # type: ignore[method-assign]


@contextmanager
def _own_signals() -> Iterator[None]:
    """Give back the signal handlers that elastic replaces, and end cleanly on signals that come before it does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"signal {number}", signal.Signals(number))

    try:
        before = {number: signal.signal(number, interrupt) for number in HANDLED}
    except ValueError:  # not the main thread, which alone may set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)


def _failure_text(error: ChildFailedError, folder: Path, processes: int) -> str:
    rank, failure = error.get_first_failure()
    return (
        f"rank {rank} of {processes} failed: {_own_words(failure)}; the other ranks were stopped. "
        f"The output of every rank is in {folder}"
    )


def _own_words(failure: ProcessFailure) -> str:
    """Tell the rank's own error: the last line of its traceback, or the signal that ended it."""
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = " (often the system's way to end a process when memory runs out)" if name == "SIGKILL" else ""
        return f"it was ended by signal {name}{hint}"
    try:
        message = json.loads(Path(failure.error_file).read_text())["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return f"it ended with exit code {failure.exitcode}"
    text = message["message"] if isinstance(message, dict) else str(message)
    return str(text).strip().rstrip(".;")
