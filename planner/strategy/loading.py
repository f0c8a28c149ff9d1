"""From a strategy file to what is simulated and executed: what does not fit names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.instructions import LoweredPlan
from planner.networks import load_network
from planner.planning import lower
from planner.strategy.plan import Plan, optimizer_sharding
from simulator.errors import InputError, StrategyError


@contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Let errors about what a strategy file says name the file."""
    try:
        yield
    except InputError as error:
        raise StrategyError(f"{source}: {error}") from error


def lower_strategy(plan: Plan, source: str | Path, *, precision: str | None = None) -> LoweredPlan:
    """Lower a plan that stands in the strategy file `source`.

    Parameters
    ----------
    precision : str, optional
        Another precision than the plan's.

    Raises
    ------
    StrategyError
        The plan is of another network, or says something that is impossible or untrue; names the file.
    """
    with naming(source):
        _check_sequence_length(plan)
        lowered = lower(plan, precision=precision)
        _check_storage(plan, lowered)
    return lowered


def _check_sequence_length(plan: Plan) -> None:
    try:
        load_network(plan.network, sequence_length=plan.sequence_length)
    except InputError as error:
        if plan.sequence_length is not None:
            load_network(plan.network)  # where this fails too, the length is not to blame
            raise StrategyError(
                f"network: the strategy is for another network: {error}; correct network or plan it again"
            ) from error
        raise


def _check_storage(plan: Plan, lowered: LoweredPlan) -> None:
    graph = lowered.graph
    nodes = {parameter.name: parameter.node for parameter in graph.parameters}
    stored = {nodes[parameter.name]: parameter.placements for parameter in lowered.parameters}
    found = optimizer_sharding(plan.mesh, ((graph.nodes[i].outputs[0].elements, p) for i, p in stored.items()))
    if plan.optimizer_sharding != found:
        raise StrategyError(
            f"optimizer_sharding: {plan.optimizer_sharding!r} is wrong: the parameters are placed as {found!r} says; "
            f"correct it, or plan again with --pin optimizer_sharding={plan.optimizer_sharding}"
        )
