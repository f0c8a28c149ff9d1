"""The rows of a sweep: one point planned, and what is told of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from planner.graph.serialization import graph_from_json, graph_to_json
from planner.planning.documents import Document, candidate_document, search_document
from planner.plans.plan import Status
from planner.what_if.options import point_name
from simulator.errors import InputError, MeshwrightError, UnsupportedError
from simulator.hardware import split_settings
from simulator.profiles import load_profile

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import Candidate, PlanRequest, SearchResult
    from planner.planning.shared_tables import SharedTables


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfRow:
    """The best plan of one cluster, or why there is none.

    ``scaling_efficiency`` is the throughput per device over that of the baseline: the smallest device
    count of the same profile for which a plan exists; None where there is no plan. ``refused`` says that
    the request was wrong for this cluster (a device count that it cannot hold) and nothing was searched. ``settings``
    are the values of this row where the sweep has further axes.
    """

    hardware: str
    devices: int
    global_batch: int
    result: SearchResult
    search_mode: str
    refused: bool = False
    scaling_efficiency: float | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def profile(self) -> str:
        """The profile, without the numbers that are set."""
        return split_settings(self.hardware)[0]

    @property
    def setting(self) -> str:
        """The settings as text; empty without any."""
        return ", ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def label(self) -> str:
        """Profile and settings: rows that differ in the device count alone have one label."""
        return ", ".join(filter(None, (self.profile, self.setting)))

    @property
    def best(self) -> Candidate | None:
        """The plan to take."""
        return self.result.candidates[0] if self.result.candidates else None

    @property
    def reason(self) -> str:
        """Why there is no plan."""
        return self.result.infeasible


def plan_point(request: PlanRequest, shared: SharedTables) -> WhatIfRow:
    """Plan one point; what is wrong for this cluster alone is the reason of a row without a plan.

    Parameters
    ----------
    request
        The point.
    shared
        The captured network and the tables that points before this one have made.

    Raises
    ------
    UnsupportedError
        No search covers what was asked, at this point or any other.
    KeyboardInterrupt
        The user stopped the search, whatever it had found.
    RuntimeError
        A defect; the message names the point.
    """
    from planner.planning.mixed_cluster import plan_on_cluster

    try:
        result, _ = plan_on_cluster(request, shared=shared)
        if result.interrupted:  # the best so far ends the search of one plan; here it is the sweep that is to end
            raise KeyboardInterrupt
        return row_of(request, result)
    except UnsupportedError:
        raise
    except InputError as error:
        return row_of(request, _refusal(str(error)), refused=True)
    except MeshwrightError:
        raise
    except Exception as error:
        raise RuntimeError(f"planning {point_name(request)}: {type(error).__name__}: {error}") from error


def row_of(request: PlanRequest, result: SearchResult, *, refused: bool = False) -> WhatIfRow:
    """The row of a request and what was found for it."""
    return WhatIfRow(
        hardware=request.hardware,
        devices=request.devices,
        global_batch=request.global_batch or 0,
        result=result,
        search_mode=request.search_mode,
        refused=refused,
    )


def _refusal(reason: str) -> SearchResult:
    from planner.planning.planning import SearchResult

    return SearchResult(
        status=Status.INFEASIBLE, candidates=(), elapsed_s=0.0, capture_s=0.0, messages=(), infeasible=reason
    )


def finish_rows(rows: Sequence[WhatIfRow]) -> tuple[WhatIfRow, ...]:
    """Fill in the scaling efficiencies; raise what was wrong if it was wrong for every row."""
    if rows and all(row.refused for row in rows):
        raise InputError(rows[0].reason)
    base: dict[str, tuple[int, float]] = {}
    for row in rows:
        if row.best is not None:
            per_device = row.best.prediction.samples_per_s / row.devices
            base[row.label] = min(base.get(row.label, (row.devices, per_device)), (row.devices, per_device))
    return tuple(
        replace(row, scaling_efficiency=row.best.prediction.samples_per_s / row.devices / base[row.label][1])
        if row.best is not None
        else row
        for row in rows
    )


def row_document(row: WhatIfRow) -> Document:
    """One element of ``rows`` of ``meshwright what-if --json``."""
    common: dict[str, Any] = {"hw": row.profile, "devices": row.devices, "global_batch": row.global_batch}
    if row.settings:
        common["settings"] = dict(row.settings)
    if row.best is None:
        search = search_document(row.result, row.search_mode, None)
        found: Document = {"status": str(row.result.status), "search": search, "prediction": None, "plan": None}
        found["reason"] = row.reason
    else:
        found = candidate_document(row.best, row.result, load_profile(row.hardware))
    return {**common, **found, "scaling_efficiency": row.scaling_efficiency}


Work = Callable[[int, "PlanRequest", str], tuple[int, WhatIfRow]]


def graph_text(graph: OperatorGraph) -> str:
    """Write the graph so that a process that has neither torch nor the capture cache can read it."""
    return json.dumps(graph_to_json(graph), separators=(",", ":"))


@lru_cache(maxsize=1)
def shared_of(text: str) -> SharedTables:
    """Read the graph. A process reads it once and keeps the tables of one sweep: all its points share them."""
    from planner.planning.shared_tables import SharedTables

    return SharedTables(graph_from_json(json.loads(text)))


def plan_numbered(number: int, request: PlanRequest, text: str) -> tuple[int, WhatIfRow]:
    """Plan point `number`; rows come back in any order."""
    return number, plan_point(request, shared_of(text))
