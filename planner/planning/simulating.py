"""One simulated training step of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from planner.lowering.checked import checked_graph
from planner.planning import summary
from planner.planning.loading import strategy_graph
from planner.planning.prediction import Prediction, SimulatedPlan, simulate_plan, write_trace

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware


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
