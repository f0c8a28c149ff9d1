"""Work shared with a fork of this process, which sees without a copy all that was found before."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from simulator.calibration.process import end_with_parent, process_state

LOOK_S = 1.0
"""How often a process that waits for the fork looks whether it is stopped."""


class Beside:
    """Values of functions, worked out by a fork of this process and by this process, whichever comes first to each.

    The fork begins at once, with the first. Whoever asks for a value that the fork is at works out the next of them
    meanwhile. What the fork cannot do is done here; with fewer than two cores, or where forks are not safe, so is
    everything, and only when asked for.

    Parameters
    ----------
    works
        The functions by name, in the order in which they are begun. They change nothing that another one reads, and
        their values can be pickled.
    cores
        Cores that may be used.
    """

    def __init__(self, works: Mapping[Hashable, Callable[[], Any]], cores: int) -> None:
        self._works = works
        self._values: dict[Hashable, Any] = {}
        self._fork: _Fork | None = None
        # Linux alone: system libraries of others do not outlive a fork.
        if cores > 1 and len(works) > 1 and sys.platform == "linux":
            # Where there is no memory for another process, or there may be no more of them, this one does it all.
            with suppress(OSError):
                self._fork = _Fork(works)

    def value(self, name: Hashable, *, last: bool = False) -> Any:
        """Return what one of the functions returns; the `last` to be asked for is waited for with nothing else done."""
        while name not in self._values:
            self._receive(wait=False)
            if name not in self._values:
                self._go_on(name, [*self._works] if not last else [name])
        return self._values[name]

    def close(self) -> None:
        """End the fork; what it has not sent is worked out here if it is asked for."""
        if self._fork is not None:
            self._fork.end()
            self._fork = None

    def _go_on(self, name: Hashable, names: list[Hashable]) -> None:
        """Do this piece of work or the next of `names` that nobody has begun; wait where there is none."""
        mine = name
        if self._fork is not None:
            free = next((n for n in names[names.index(name) :] if self._fork.claim(n)), None)
            if free is None:
                self._receive(wait=True)
                return
            mine = free
        try:
            self._values[mine] = self._works[mine]()
        except Exception:
            # Perhaps nobody will ask for the others.
            if mine == name:
                raise

    def _receive(self, *, wait: bool) -> None:
        """Take what the fork has sent; a value at least if it is to `wait`, unless the fork is stopped."""
        while self._fork is not None and (wait or self._fork.values.poll()):
            if not self._fork.values.poll(LOOK_S):
                if self._fork.stopped:
                    self.close()
                continue
            try:
                name, value = self._fork.values.recv()
            except EOFError:
                self.close()
            except BaseException:
                # Interrupted in the midst of a value: what follows cannot be read.
                self.close()
                raise
            else:
                self._values[name] = value
                wait = False


class _Fork:
    """The other process, what it sends, and which functions either of both has begun with."""

    values: Connection

    def __init__(self, works: Mapping[Hashable, Callable[[], Any]]) -> None:
        self._places = {name: place for place, name in enumerate(works)}
        self._begun = mmap.mmap(-1, len(works))
        context = multiprocessing.get_context("fork")
        self.values, sending = context.Pipe(duplex=False)
        self._process: BaseProcess = context.Process(target=self._run, args=(works, sending), daemon=True)
        self._process.start()
        sending.close()

    def claim(self, name: Hashable) -> bool:
        """Begin with a function if nobody has; where both do so at once, both find the same."""
        place = self._places[name]
        begun = bool(self._begun[place])
        self._begun[place] = 1
        return not begun

    @property
    def stopped(self) -> bool:
        """Whether a signal has stopped it, so that it sends nothing."""
        return process_state(self._process.pid or 0) == "T"

    def end(self) -> None:
        """Leave nothing of it."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self.values.close()
        self._begun.close()

    def _run(self, works: Mapping[Hashable, Callable[[], Any]], sending: Connection) -> None:
        end_with_parent()
        # An interrupt of both is for the other process, which ends this one.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for name, work in works.items():
                if self.claim(name):
                    sending.send((name, work()))
        finally:
            # Whoever asks for what is missing meets the error. Nothing else is said or done at the end of the copy.
            os._exit(0)
