"""A folder for each rank with all it said, as launch scripts of accelerator clusters make them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from simulator.errors import ExecutionError, InputError

TOLD = ("RANK", "LOCAL_", "WORLD_", "MASTER_", "SLURM_", "MS_", "DEVICE_", "GLOO_", "NCCL_", "HCCL_", "TORCH", "OMP_")
TOLD_TOO = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables that say how a rank was started; others may be secret."""


def rank_folder(logs: Path, rank: int) -> Path:
    """The folder of a rank, with ``env.log`` and ``train.log``."""
    return logs / f"device{rank}"


@contextmanager
def rank_log(logs: Path | None, rank: int) -> Iterator[None]:
    """Send all that this process writes, libraries included, to its rank's ``train.log``; None leaves it where it goes.

    Raises
    ------
    InputError
        The folder cannot be made.
    """
    if logs is None:
        yield
        return
    folder = rank_folder(logs, rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        told = {name: value for name, value in os.environ.items() if name.startswith(TOLD) or name in TOLD_TOO}
        (folder / "env.log").write_text("".join(f"{name}={told[name]}\n" for name in sorted(told)))
        number = os.open(folder / "train.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    except OSError as error:
        raise InputError(f"logs cannot be written to {folder}: {error.strerror}; choose another --log-dir") from None
    _flush()
    before = [os.dup(stream) for stream in (1, 2)]
    for stream in (1, 2):
        os.dup2(number, stream)
    os.close(number)
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        _flush()
        for stream, kept in zip((1, 2), before, strict=True):
            os.dup2(kept, stream)
            os.close(kept)


@contextmanager
def kept_on_failure(logs: Path | None) -> Iterator[Path]:
    """Give the folder of logs; where the user named none it is a temporary one, kept when the run fails."""
    if logs is not None:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--log-dir {logs} cannot be made: {error.strerror}; choose another") from None
        yield logs
        return
    folder = Path(tempfile.mkdtemp(prefix="meshwright-"))
    try:
        yield folder
    except ExecutionError:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


POLL_S = 0.2
LINE = re.compile(rb"^step: (\d+), loss: (\S+), seconds:", re.MULTILINE)

Monitor = Callable[[int, float], None]
"""Told the number of a step, from 0, and its loss, in order and once."""


def loss_monitor(write: Callable[[str], None], steps: int, every: int = 1) -> Monitor:
    """A monitor that writes a line every so many steps, and after the last.

    >>> monitor = loss_monitor(print, steps=4, every=2)
    >>> for step in range(4):
    ...     monitor(step, 1 / (step + 1))
    step: 2 of 4, loss is 0.5
    step: 4 of 4, loss is 0.25
    """

    def monitor(step: int, loss: float) -> None:
        done = step + 1
        if done % every == 0 or done == steps:
            write(f"step: {done} of {steps}, loss is {loss:.6g}")

    return monitor


@contextmanager
def monitored(logs: Path, ranks: int, monitor: Monitor | None) -> Iterator[None]:
    """Tell a monitor the losses that ranks write to their logs, until the block ends; what is left then comes at once.

    Parameters
    ----------
    logs
        Folder of the logs (`planner.execution.launch.rank_log`).
    ranks
        Processes of the run; the first that knows the loss of a step counts.
    """
    if monitor is None:
        yield
        return
    reader = _LogReader(logs, ranks, monitor)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            reader.read()

    thread = threading.Thread(target=watch, name="loss monitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        reader.read()


class _LogReader:
    """Lines of logs that have not been read yet."""

    def __init__(self, logs: Path, ranks: int, monitor: Monitor) -> None:
        self._files = [rank_folder(logs, rank) / "train.log" for rank in range(ranks)]
        self._read = [0] * ranks
        self._monitor = monitor
        self._last = -1

    def read(self) -> None:
        found: dict[int, float] = {}
        for rank, file in enumerate(self._files):
            for step, loss in self._new_lines(rank, file):
                found.setdefault(step, loss)
        for step in sorted(found):
            if step > self._last:
                self._last = step
                self._monitor(step, found[step])

    def _new_lines(self, rank: int, file: Path) -> Iterator[tuple[int, float]]:
        try:
            with file.open("rb") as log:
                log.seek(self._read[rank])
                text = log.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._read[rank] += len(whole)
        for match in LINE.finditer(whole):
            yield int(match[1]), float(match[2])
