"""A sweep in local processes, through joblib."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from planner.what_if.options import point_name
from planner.what_if.rows import WhatIfRow, Work, graph_text, plan_numbered
from simulator.calibration.process import end_with_parent, stopped_children_killed
from simulator.errors import MeshwrightError

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import PlanRequest

Numbered = Generator[tuple[int, WhatIfRow], None, None]


def usable_cores() -> int:
    """Cores that this process may use: affinity and container limits count."""
    import joblib

    return int(joblib.cpu_count())


def in_processes(
    graph: OperatorGraph,
    waiting: Mapping[int, PlanRequest],
    jobs: int,
    note: Callable[[str], None],
    work: Work = plan_numbered,
) -> Numbered:
    """Plan points side by side; closing the generator, or Ctrl-C in it, ends the processes.

    When a process dies (most often for want of memory) or stays stopped, the points that are left are planned one at a
    time.

    Parameters
    ----------
    graph
        The captured network.
    waiting
        Points by number, in the order in which to begin them.
    jobs
        Processes.
    note
        Told of a process that died.
    work
        Plans one point in a process.

    Yields
    ------
    tuple of int and WhatIfRow
        In the order in which they are done.

    Raises
    ------
    MeshwrightError
        A process died while it planned one point alone.
    """
    text = graph_text(graph)
    left = dict(waiting)
    tasks = [(number, request, text) for number, request in waiting.items()]
    try:
        for number, row in _parallel(work, tasks, min(jobs, len(tasks))):
            del left[number]
            yield number, row
        return
    except BrokenProcessPool as error:
        note(f"a process of the sweep died ({_first_line(error)}); the points that are left are planned one at a time")
    for number, request in left.items():
        try:
            yield from _parallel(work, [(number, request, text)], 2)
        except BrokenProcessPool as error:
            raise MeshwrightError(
                f"{point_name(request)}: the process that planned it died, twice ({_first_line(error)}); free some "
                "memory, or leave this point out of --devices and --hw"
            ) from error


def _parallel(work: Work, tasks: Iterable[tuple[Any, ...]], jobs: int) -> Numbered:
    from joblib import Parallel, delayed

    # One point a task: each is kept as soon as it is done.
    parallel = Parallel(n_jobs=jobs, backend="loky", batch_size=1, return_as="generator_unordered")
    with stopped_children_killed():
        rows = parallel(delayed(_attached)(os.getpid(), work, *task) for task in tasks)
        with _ended(rows):
            # `yield from` would close joblib's generator before it is told to do so in silence.
            for row in rows:  # noqa: UP028
                yield row


def _attached(parent: int, work: Work, *task: Any) -> tuple[int, WhatIfRow]:
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
def _ended(rows: Generator[Any, None, None]) -> Generator[None, None, None]:
    """Close joblib's generator whatever happens, which ends its processes; it warns of work left undone."""
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.close()


def _first_line(error: BaseException) -> str:
    """What loky says of the death, without its advice: the exit codes."""
    text = " ".join(str(error).split())
    return text.partition("exit codes of the workers are ")[2].strip(" .") or text.partition(". ")[0]
