"""The best plan of one network on many clusters: one row for each profile and device count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from planner.documents import Document, candidate_document, search_document
from planner.strategy.plan import Status
from simulator.errors import InputError, UnsupportedError
from simulator.hardware import load_profile

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning import Candidate, PlanRequest, PlanResult


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfOptions:
    """What a sweep plans.

    With `global_batch` every device count trains the same batch (strong scaling). Without, the batch
    grows with the devices (weak scaling) from the network's default at the smallest count.
    """

    network: str
    hardware: tuple[str, ...]
    device_counts: tuple[int, ...]
    global_batch: int | None = None
    sequence_length: int | None = None
    precision: str | None = None
    optimizer: str | None = None
    search_mode: str = "dynamic_programming"
    parallel_mode: str = "auto_parallel"
    pins: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow:
    """The best plan of one cluster, or why there is none.

    ``scaling_efficiency`` is the throughput per device over that of the smallest device count of the
    same profile for which a plan exists; None where there is no plan. ``refused`` says that the request
    was wrong for this cluster (a device count that it cannot hold) and nothing was searched.
    """

    hardware: str
    devices: int
    global_batch: int
    result: PlanResult
    search_mode: str
    refused: bool = False
    scaling_efficiency: float | None = None

    @property
    def best(self) -> Candidate | None:
        """The plan to take."""
        return self.result.candidates[0] if self.result.candidates else None

    @property
    def reason(self) -> str:
        """Why there is no plan."""
        return self.result.infeasible


def batch_rule(options: WhatIfOptions) -> tuple[str, dict[int, int]]:
    """How the global batch follows the device count.

    Returns
    -------
    tuple of str and dict
        The rule in words, and the batch of each device count.
    """
    counts = options.device_counts
    if options.global_batch is not None:
        words = f"strong scaling: a global batch of {options.global_batch} at every device count"
        return words, dict.fromkeys(counts, options.global_batch)
    from planner.networks import load_network

    default = load_network(options.network, sequence_length=options.sequence_length).default_global_batch
    each = max(1, math.ceil(default / min(counts)))
    words = f"weak scaling: the global batch is {each} × devices (give --global-batch to keep it fixed)"
    return words, {count: each * count for count in counts}


def what_if(options: WhatIfOptions, *, processes: int = 1) -> tuple[WhatIfRow, ...]:
    """Plan every profile at every device count.

    Parameters
    ----------
    options
        What to plan.
    processes
        Local processes that plan side by side; the result does not depend on it.

    Returns
    -------
    tuple of WhatIfRow
        By profile in the order given, then by device count.

    Raises
    ------
    InputError
        Wrong for every row; what is wrong for some rows only is the reason of those rows.
    """
    return finish_rows(list(plan_rows(options, processes=processes)))


def plan_rows(options: WhatIfOptions, *, processes: int = 1) -> Iterator[WhatIfRow]:
    """Yield the rows one by one as they are planned, in order, without their efficiencies."""
    from planner.planning import capture_for

    requests = _requests(options)
    graph = capture_for(requests[0])
    if processes <= 1:
        yield from (_row(request, graph) for request in requests)
        return
    from joblib import Parallel, delayed

    yield from Parallel(n_jobs=processes, return_as="generator")(delayed(_row)(request, graph) for request in requests)


def finish_rows(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """Fill in the scaling efficiencies; raise what was wrong if it was wrong for every row."""
    if rows and all(row.refused for row in rows):
        raise InputError(rows[0].reason)
    base: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row.best is not None:
            per_device = row.best.prediction.samples_per_s / row.devices
            base[row.hardware] = min(base.get(row.hardware, (row.devices, per_device)), (row.devices, per_device))
    return tuple(
        replace(row, scaling_efficiency=row.best.prediction.samples_per_s / row.devices / base[row.hardware][1])
        if row.best is not None
        else row
        for row in rows
    )


def row_document(row: WhatIfRow) -> Document:
    """One element of ``rows`` of ``meshwright what-if --json``."""
    common: dict[str, Any] = {"hw": row.hardware, "devices": row.devices, "global_batch": row.global_batch}
    if row.best is None:
        search = search_document(row.result, row.search_mode, None)
        found: Document = {"status": str(row.result.status), "search": search, "prediction": None, "plan": None}
        found["reason"] = row.reason
    else:
        found = candidate_document(row.best, row.result, load_profile(row.hardware))
    return {**common, **found, "scaling_efficiency": row.scaling_efficiency}


def _requests(options: WhatIfOptions) -> list[PlanRequest]:
    from planner.planning import PlanRequest

    profiles = {name: load_profile(name) for name in options.hardware}
    _, batches = batch_rule(options)
    return [
        PlanRequest(
            network=options.network,
            hardware=name,
            devices=devices,
            global_batch=batches[devices],
            sequence_length=options.sequence_length,
            precision=options.precision,
            optimizer=options.optimizer,
            search_mode=options.search_mode,
            parallel_mode=options.parallel_mode,
            pins=dict(options.pins),
            top=1,
        )
        for name in profiles
        for devices in sorted(set(options.device_counts))
    ]


def _row(request: PlanRequest, graph: OperatorGraph) -> WhatIfRow:
    from planner.planning import PlanResult, plan_network

    refused = False
    try:
        result = plan_network(request, graph=graph)
    except UnsupportedError:
        raise
    except InputError as error:
        refused = True
        result = PlanResult(
            status=Status.INFEASIBLE,
            candidates=(),
            elapsed_s=0.0,
            capture_s=0.0,
            messages=(),
            infeasible=str(error),
        )
    return WhatIfRow(
        hardware=request.hardware,
        devices=request.devices,
        global_batch=request.global_batch or 0,
        result=result,
        search_mode=request.search_mode,
        refused=refused,
    )
