"""From a strategy file to what is simulated and executed: what does not fit names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner.graph.folding import unfold
from planner.graph.operator_graph import STORED_BYTES, OperatorGraph
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import LoweredStages
from planner.lowering.stages import lower_stages
from planner.networks import load_network
from planner.planning import summary
from planner.planning.prediction import Prediction, SimulatedPlan, simulate_plan, write_trace
from planner.plans.plan import Plan, expanded_rules, optimizer_sharding
from planner.search.problem.states import SHARING
from simulator.errors import InputError, StrategyError

if TYPE_CHECKING:
    from simulator.hardware import Hardware


@contextmanager
def naming(source: str | Path) -> Iterator[None]:
    """Let errors about what a strategy file says name the file."""
    try:
        yield
    except InputError as error:
        raise StrategyError(f"{source}: {error}") from error


def lower_to_run(plan: Plan, source: str | Path, *, precision: str | None = None) -> LoweredStages:
    """Lower a plan for execution, by this project's own executor; parameters and errors as `strategy_graph`.

    Weights that are stored in few bits are simulated only: raises StrategyError.
    """
    plan = replace(plan, software="")
    with strategy_graph(plan, source, precision=precision, even=True) as graph:
        stored = {graph.nodes[parameter.node].outputs[0].dtype for parameter in graph.parameters} & STORED_BYTES.keys()
        if stored:
            raise StrategyError(
                f"frozen weights are stored as {', '.join(sorted(stored))} and would be whole here; execute the "
                "network without quantization_config"
            )
        return lower_stages(plan, graph)


@contextmanager
def strategy_graph(
    plan: Plan, source: str | Path, *, precision: str | None = None, even: bool = False
) -> Iterator[OperatorGraph]:
    """The network of a plan that stands in the strategy file `source`, folded, as the plan is simulated on it.

    Errors about what the file says name it, and so do those that are raised inside.

    Parameters
    ----------
    precision : str, optional
        Another precision than the plan's.
    even : bool, optional
        Whether uneven shards of parameters are refused, which are simulated only.

    Raises
    ------
    StrategyError
        The plan is of another network, or says something that is impossible or untrue; names the file.
    """
    with naming(source):
        _check_sequence_length(plan)
        graph = checked_graph(plan, precision=precision, even=even)
        _check_storage(plan, graph)
        yield graph


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


def _check_storage(plan: Plan, graph: OperatorGraph) -> None:
    """Check that parameters are stored as the plan says; `graph` is folded."""
    whole, rules = unfold(graph), expanded_rules(plan)
    stored = {p.node: tuple(r.outputs[0] for r in rules[whole.nodes[p.node].name]) for p in whole.parameters}
    specs = {i: whole.nodes[i].outputs[0] for i in stored}
    trained = {i: p for i, p in stored.items() if i in whole.trained}
    found = optimizer_sharding(plan.mesh, ((specs[i].elements, p) for i, p in trained.items()))
    inside = [i for i, axis in enumerate(plan.mesh.axes) if axis.name in SHARING]
    if plan.degree("data") == 1 and plan.optimizer_sharding != "none":
        # Copies on other axes share states then; experts are cut over theirs anyway.
        found = "zero1" if any(p[i] >= 0 for p in trained.values() for i in inside) else "none"
    if (plan.optimizer_sharding == "none") != (found == "none"):
        placed = "whole on the data axis" if found == "none" else "sharded along the data axis"
        raise StrategyError(
            f"optimizer_sharding: {plan.optimizer_sharding!r} is wrong: most parameters are placed {placed}; "
            f"correct it, or plan again with --pin optimizer_sharding={plan.optimizer_sharding}"
        )
    for index, placements in stored.items():
        size = specs[index].size_bytes
        data = [p for p, axis in zip(placements, plan.mesh.axes, strict=True) if axis.name == "data"]
        if size < plan.sharding_threshold_bytes and any(p >= 0 for p in data):
            raise StrategyError(
                f"sharding_threshold_bytes: {whole.nodes[index].name!r} has {size} bytes, less than "
                f"{plan.sharding_threshold_bytes}, but is sharded along the data axis; store it whole or "
                "lower the threshold"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """A simulated step: ``found`` holds what ran."""

    plan: Plan
    hardware: Hardware
    found: SimulatedPlan = field(repr=False)

    def __repr__(self) -> str:
        return f"{summary.heading(self.plan, self.hardware)}: {summary.degrees_text(self.plan)}\n{self.prediction!r}"

    @property
    def prediction(self) -> Prediction:
        """What the simulation predicts."""
        return self.found.prediction

    def write_trace(self, path: str | Path) -> None:
        """Write the step as a trace for https://ui.perfetto.dev."""
        write_trace(self.found, self.plan, path)


def simulated_step(
    plan: Plan, hardware: Hardware, *, graph: OperatorGraph | None = None, source: str = ""
) -> SimulatedStep:
    """Simulate one step of a plan.

    Parameters
    ----------
    hardware
        The cluster, as the plan's software runs on it.
    graph
        The network at any batch; captured where it is not given.
    source
        The strategy file that the plan was read from, which errors name.

    Raises
    ------
    StrategyError
        The plan is of another network, or says what is impossible.
    """
    if source:
        with strategy_graph(plan, source) as checked:
            found = simulate_plan(plan, checked, hardware)
    else:
        found = simulate_plan(plan, checked_graph(plan, graph), hardware)
    return SimulatedStep(plan=plan, hardware=hardware, found=found)
