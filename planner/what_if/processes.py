"""A sweep in local processes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from planner.what_if.options import point_name
from planner.what_if.rows import WhatIfRow
from planner.what_if.work import Work, graph_text, plan_numbered
from simulator.calibration.side_by_side import side_by_side
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
        for number, row in side_by_side(work, tasks, min(jobs, len(tasks))):
            del left[number]
            yield number, row
        return
    except BrokenProcessPool as error:
        note(f"a process of the sweep died ({_first_line(error)}); the points that are left are planned one at a time")
    for number, request in left.items():
        try:
            yield from side_by_side(work, [(number, request, text)], 2)
        except BrokenProcessPool as error:
            raise MeshwrightError(
                f"{point_name(request)}: the process that planned it died, twice ({_first_line(error)}); free some "
                "memory, or leave this point out of --devices and --hw"
            ) from error


def _first_line(error: BaseException) -> str:
    """What loky says of the death, without its advice: the exit codes."""
    text = " ".join(str(error).split())
    return text.partition("exit codes of the workers are ")[2].strip(" .") or text.partition(". ")[0]
