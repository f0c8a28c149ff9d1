"""From a strategy file to what is simulated and executed: what does not fit names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from planner.lowering.checked import checked_graph, lower
from planner.lowering.instructions import LoweredPlan, LoweredStages
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.planning.pipeline_prediction import PipelinePrediction, predict_pipeline
from planner.plans.plan import Plan, optimizer_sharding
from simulator.errors import InputError, StrategyError
from simulator.hardware import Hardware
from simulator.mixed_cluster import MixedCluster
from simulator.schedules import Schedule
from simulator.timeline import Engine


@contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Let errors about what a strategy file says name the file."""
    try:
        yield
    except InputError as error:
        raise StrategyError(f"{source}: {error}") from error


def lower_strategy(plan: Plan, source: str | Path, *, precision: str | None = None) -> LoweredPlan:
    """Lower a plan on one stage that stands in the strategy file `source`.

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


def lower_to_run(plan: Plan, source: str | Path, *, precision: str | None = None) -> LoweredPlan | LoweredStages:
    """Lower a plan with any number of stages for execution, by this project's own executor.

    Parameters and errors are those of `lower_strategy`.
    """
    plan = replace(plan, software="")
    if plan.pipeline * plan.virtual == 1:
        return lower_strategy(plan, source, precision=precision)
    with naming(source):
        _check_sequence_length(plan)
        return lower_stages(plan, checked_graph(plan, precision=precision))


def predict_pipeline_strategy(
    plan: Plan,
    source: str | Path,
    hardware: Hardware,
    schedule: Schedule | None = None,
    engine: Engine | None = None,
    cluster: MixedCluster | None = None,
) -> PipelinePrediction:
    """Simulate a plan with pipeline stages that stands in the strategy file `source`.

    Parameters
    ----------
    schedule : Schedule, optional
        Another order of the passes than the plan's schedule has.
    engine : Engine, optional
        Runs the step operator by operator instead of pass by pass.
    cluster : MixedCluster, optional
        Nodes of several device types that `hardware` stands for.

    Raises
    ------
    StrategyError
        As `lower_strategy`.
    """
    with naming(source):
        _check_sequence_length(plan)
        return predict_pipeline(plan, checked_graph(plan), hardware, schedule, engine, cluster)


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
    specs = {i: graph.nodes[i].outputs[0] for i in stored}
    trained = {i: p for i, p in stored.items() if i in graph.trained}
    found = optimizer_sharding(lowered.mesh, ((specs[i].elements, p) for i, p in trained.items()))
    if (plan.optimizer_sharding == "none") != (found == "none"):
        placed = "whole on the data axis" if found == "none" else "sharded along the data axis"
        raise StrategyError(
            f"optimizer_sharding: {plan.optimizer_sharding!r} is wrong: most parameters are placed {placed}; "
            f"correct it, or plan again with --pin optimizer_sharding={plan.optimizer_sharding}"
        )
    for index, placements in stored.items():
        size = specs[index].size_bytes
        data = [p for p, axis in zip(placements, lowered.mesh.axes, strict=True) if axis.name == "data"]
        if size < plan.sharding_threshold_bytes and any(p >= 0 for p in data):
            raise StrategyError(
                f"sharding_threshold_bytes: {graph.nodes[index].name!r} has {size} bytes, less than "
                f"{plan.sharding_threshold_bytes}, but is sharded along the data axis; store it whole or "
                "lower the threshold"
            )
