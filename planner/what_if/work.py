"""What a process beside this one is sent: a point, and the captured network as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

from planner.graph.serialization import graph_from_json, graph_to_json
from planner.what_if.rows import WhatIfRow, plan_point

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.planning import PlanRequest
    from planner.planning.shared_tables import SharedTables

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
