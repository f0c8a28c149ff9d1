"""Losses while a run goes on: read from the logs of its ranks, so that training waits for nobody who watches."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.execution.launch.rank_log import rank_folder

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
