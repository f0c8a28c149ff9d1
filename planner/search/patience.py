"""What Ctrl-C does to a search: it ends at once where there is a plan to show, and else as soon as there is one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class Patience:
    """Of one search.

    Between the capture and the first plan an interrupt is only noted, for a `KeyboardInterrupt` there would leave
    nothing: the search asks for it between steps, and then goes for the nearest plan. A second one gives up.

    Attributes
    ----------
    asked : bool
        Whether the user wants the search to end.
    found : bool
        Whether there is a plan.
    breaks : bool
        Whether an interrupt is raised where it comes.
    """

    def __init__(self, say: Callable[[], None] = lambda: None) -> None:
        self.asked, self.found, self.breaks = False, False, True
        self._say = say

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the interrupts of this process where that is possible: in its first thread, if nobody else does."""
        first = threading.current_thread() is threading.main_thread()
        if not first or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        signal.signal(signal.SIGINT, self._interrupted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def wait(self) -> None:
        """From here on a plan may be found."""
        self.breaks = False

    def give_up(self) -> None:
        """From here on none will be."""
        self.breaks = True

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Raise interrupts inside if there is a plan, and at once one that came before."""
        if self.asked and self.found:
            raise KeyboardInterrupt
        self.breaks = self.found
        try:
            yield
        finally:
            self.breaks = False

    def _interrupted(self, _number: int, _frame: FrameType | None) -> None:
        if self.breaks or (self.asked and not self.found):
            raise KeyboardInterrupt
        self.asked = True
        if not self.found:
            self._say()
