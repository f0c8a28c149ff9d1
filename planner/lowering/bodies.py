"""What passes run, lowered once for plans that differ in the size of their messages alone."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from planner.graph.operator_graph import OperatorGraph
from planner.lowering.representatives import Representatives, representatives
from planner.lowering.unit_work import Kinds, UnitWork, units_work
from planner.lowering.work import Work
from planner.plans.plan import Plan

KEPT = 8
"""Plans whose passes are kept: as many as are usually simulated before the best is tried with other sizes."""


@dataclass(frozen=True, kw_only=True)
class UnitBodies:
    """The units of a plan, and the tasks of their operators, to which others may be added."""

    found: Representatives
    units: tuple[UnitWork, ...]
    work: Work


def unit_bodies(plan: Plan, graph: OperatorGraph, kinds: Kinds, *, counts_fresh: bool) -> UnitBodies:
    """The units of a plan; for `kinds` and `counts_fresh` see `units_work`.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    """
    kept = _unit_bodies(_Asked(plan, graph), kinds, counts_fresh)
    source = kept.found.source.with_messages(plan.bucket_bytes)
    return UnitBodies(found=replace(kept.found, source=source), units=kept.units, work=kept.work.copy())


_BESIDE = {
    "bucket_bytes", "certificate", "global_batch", "schedule", "pipeline", "pipeline_stride", "virtual", "chunks",
    "sharding_threshold_bytes",
}  # fmt: skip
"""Fields of a plan beside its passes: how large messages are, when and where passes run, and what chose strategies."""
_SAID = tuple(field.name for field in fields(Plan) if field.name not in _BESIDE)


class _Asked:
    """A plan for a network, but for what its passes have nothing to do with; networks are compared by identity."""

    __slots__ = ("graph", "plan", "said")

    def __init__(self, plan: Plan, graph: OperatorGraph) -> None:
        self.plan, self.graph = replace(plan, bucket_bytes=0), graph
        self.said = [getattr(plan, name) for name in _SAID], plan.pipeline * plan.virtual > 1

    def __hash__(self) -> int:
        return hash((id(self.graph), self.plan.mesh, self.plan.samples, self.plan.micro_batches))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Asked) and other.graph is self.graph and other.said == self.said


@lru_cache(maxsize=KEPT)
def _unit_bodies(asked: _Asked, kinds: Kinds, counts_fresh: bool) -> UnitBodies:
    found, work = representatives(asked.plan, asked.graph), Work()
    units = units_work(found.source, found.chain, work, kinds, counts_fresh=counts_fresh)
    return UnitBodies(found=found, units=units, work=work)
