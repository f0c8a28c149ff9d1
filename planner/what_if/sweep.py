"""Planning all points of a sweep: here, in local processes or on a cluster, each one once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.what_if import journal as journals
from planner.what_if.options import WhatIfOptions, points_of
from planner.what_if.rows import WhatIfRow, finish_rows, plan_point

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The points of a sweep in the order of its rows, the captured network of each, and what is planned already.

    ``settings`` are those of each point, ``graphs`` its network: one object for all points that capture alike. ``kept``
    are rows by number that an interrupted run left in ``journal``; ``notes`` tell the user of them. Without a
    ``journal`` nothing is written.
    """

    requests: tuple[PlanRequest, ...]
    settings: tuple[Mapping[str, str], ...]
    graphs: tuple[OperatorGraph, ...]
    journal: Path | None = None
    kept: Mapping[int, WhatIfRow] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def prepare(options: WhatIfOptions, *, journal: Path | None = None, fresh: bool = False) -> Sweep:
    """Capture the network once for all points that have it alike, and read what an interrupted run has left.

    Parameters
    ----------
    options
        What to plan.
    journal
        File that takes each point as it is planned; points already in it are not planned again.
    fresh
        Forget what the journal holds.

    Raises
    ------
    InputError
        Wrong for every point: an unknown network or profile, a journal that cannot be written.
    """
    from planner.planning import planning

    points = points_of(options)
    requests = tuple(request for _, request in points)
    settings = tuple(chosen for chosen, _ in points)
    captured: dict[tuple[object, ...], OperatorGraph] = {}
    for request in requests:
        key = planning.capture_key(request)
        if key not in captured:
            captured[key] = planning.capture_for(request)
    graphs = tuple(captured[planning.capture_key(request)] for request in requests)
    sweep = Sweep(requests=requests, settings=settings, graphs=graphs, journal=journal)
    if journal is None:
        return sweep
    if fresh:
        journals.discard(journal)
    found = journals.read(journal, requests, graphs)
    return replace(sweep, kept=found.rows, notes=found.notes)


def run(
    sweep: Sweep,
    *,
    jobs: int = 1,
    cluster: str | None = None,
    advance: Callable[[], None] = lambda: None,
    note: Callable[[str], None] = lambda text: None,
) -> tuple[WhatIfRow, ...]:
    """Plan the points that are not yet planned.

    Parameters
    ----------
    sweep
        From `prepare`.
    jobs
        Local processes that plan side by side; with 1 this process plans. The rows do not depend on it.
    cluster
        Address ``dask://HOST:PORT`` of a Dask scheduler whose workers plan instead.
    advance
        Called after each point.
    note
        Told what the user should know of the run.

    Returns
    -------
    tuple of WhatIfRow
        By profile in the order given, then by device count.

    Raises
    ------
    InputError
        Wrong for every row (what is wrong for some rows only is the reason of those rows), or a
        cluster that cannot be used.
    MeshwrightError
        A process died at a point, twice; the message names the point.
    """
    rows = dict(sweep.kept)
    for _ in rows:
        advance()
    waiting = {number: request for number, request in _in_turn(sweep.requests) if number not in rows}
    with journals.writer(sweep.journal) as write:
        for graph in {id(one): one for one in sweep.graphs}.values():
            of_graph = {number: request for number, request in waiting.items() if sweep.graphs[number] is graph}
            with closing(_planned(graph, of_graph, jobs, cluster, note)) as planned:
                for number, row in planned:
                    write(sweep.requests[number], graph, row)
                    rows[number] = row
                    advance()
    return finish_rows([replace(rows[number], settings=sweep.settings[number]) for number in sorted(rows)])


def what_if(
    options: WhatIfOptions, *, jobs: int = 1, cluster: str | None = None, journal: Path | None = None
) -> tuple[WhatIfRow, ...]:
    """Plan every profile at every device count: `prepare` and `run` in one."""
    return run(prepare(options, journal=journal), jobs=jobs, cluster=cluster)


def _in_turn(requests: tuple[PlanRequest, ...]) -> Iterator[tuple[int, PlanRequest]]:
    """The order of the work: one profile after the other, so that a process finds its tables again.

    Large counts take longest and come first, so that the last points to finish are short.
    """
    profiles = list(dict.fromkeys(request.hardware for request in requests))
    numbered = list(enumerate(requests))
    yield from sorted(numbered, key=lambda item: (profiles.index(item[1].hardware), -item[1].devices))


def _planned(
    graph: OperatorGraph,
    waiting: Mapping[int, PlanRequest],
    jobs: int,
    cluster: str | None,
    note: Callable[[str], None],
) -> Generator[tuple[int, WhatIfRow], None, None]:
    """Rows by number, in the order in which they are done."""
    if cluster is not None:
        from planner.what_if.cluster import on_cluster

        yield from on_cluster(graph, waiting, cluster) if waiting else ()
    elif min(jobs, len(waiting)) <= 1:
        from planner.planning.shared_tables import SharedTables

        shared = SharedTables(graph)
        yield from ((number, plan_point(request, shared)) for number, request in waiting.items())
    else:
        from planner.what_if.processes import in_processes

        yield from in_processes(graph, waiting, jobs, note)
