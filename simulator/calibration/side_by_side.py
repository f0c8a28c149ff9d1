"""Work on several tasks at once, in processes of this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from simulator.calibration.process import end_with_parent, stopped_children_killed

Done = TypeVar("Done")


def side_by_side(work: Callable[..., Done], tasks: Iterable[tuple[Any, ...]], jobs: int) -> Generator[Done, None, None]:
    """Call `work` with the arguments of each task, in `jobs` processes.

    Closing the generator, or Ctrl-C in it, ends the processes; so does the end of this process, whatever ends it.

    Yields
    ------
    object
        What `work` returned, in the order in which tasks are done.

    Raises
    ------
    BrokenProcessPool
        A process died, or stayed stopped. Of the tasks that are left some may be done, but nothing tells of them.
    """
    from joblib import Parallel, delayed

    # One task at a time: each is kept as soon as it is done.
    parallel = Parallel(n_jobs=jobs, backend="loky", batch_size=1, return_as="generator_unordered")
    with stopped_children_killed():
        found = parallel(delayed(_attached)(os.getpid(), work, *task) for task in tasks)
        with _ended(found):
            # `yield from` would close joblib's generator before it is told to do so in silence.
            for one in found:  # noqa: UP028
                yield one


def _attached(parent: int, work: Callable[..., Done], *task: Any) -> Done:
    """Work in a process that leaves Ctrl-C to its parent and ends with it, even where that is killed."""
    _end_with(parent)
    return work(*task)


@lru_cache(maxsize=1)
def _end_with(parent: int) -> None:
    end_with_parent()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _ended(found: Generator[Any, None, None]) -> Generator[None, None, None]:
    """Close joblib's generator whatever happens, which ends its processes; it warns of work left undone."""
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.close()
