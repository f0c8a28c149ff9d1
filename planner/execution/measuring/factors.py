"""By what gradients are multiplied beside the mean over micro-batches, where a context asks for sums or other means."""

from __future__ import annotations

from planner.lowering.instructions import BeginUpdate, LoweredStages, Update
from planner.plans.plan import Plan
from simulator.errors import UnsupportedError


def gradient_factors(lowered: LoweredStages) -> dict[str, float]:
    """Factor of each trained parameter by its name; 1 for gradients of the mean loss of the whole batch."""
    stored = tuple(entry for rank in lowered.ranks for entry in rank.parameters)
    updates = tuple(one for rank in lowered.ranks for one in rank.update)
    names = {entry.value: entry.name for entry in stored}
    return {
        names[one.parameter]: lowered.micro_batches / one.divisor
        for one in updates
        if isinstance(one, Update | BeginUpdate)
    }


def check_comparable(plan: Plan) -> None:
    """Raise UnsupportedError where one process cannot train as the ranks of a plan do."""
    asked = plan.exchange
    if not asked.cross_batch and not asked.layerwise:
        return
    what = (
        "cross_batch=True: every rank's operators see its own samples alone"
        if asked.cross_batch
        else f"{len(asked.layerwise)} layerwise_parallel parameters, of which every rank has its own"
    )
    raise UnsupportedError(
        f"--verify compares with one process, and the plan has {what}; run it without --verify, or plan without them"
    )
