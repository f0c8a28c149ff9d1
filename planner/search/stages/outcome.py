"""What a stage partition is."""

from __future__ import annotations

from dataclasses import dataclass

from planner.search.stages.fragments import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Cuts and labels.

    Attributes
    ----------
    ends : (chunks,) number of units up to the end of each chunk
    labels : (units,) label of every unit
    objective_s, lower_bound_s : seconds; the bound holds for every partition of the task
    fill_s, busy_s : (chunks,) both terms of the objective
    memory_bytes : (ranks,)
    exact : whether no way of a fragment was left out: then more of them find nothing else
    """

    ends: tuple[int, ...]
    labels: tuple[int, ...]
    objective_s: float
    lower_bound_s: float
    fill_s: FloatArray
    busy_s: FloatArray
    memory_bytes: FloatArray
    exact: bool = False
