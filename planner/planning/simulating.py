"""One simulated training step of a plan with any number of stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from planner.lowering.checked import checked_graph, lower
from planner.planning.loading import lower_strategy, predict_pipeline_strategy
from planner.planning.pipeline_prediction import PipelinePrediction, predict_pipeline, write_trace
from planner.planning.prediction import Prediction, predict
from simulator.trace import write_trace as write_stage_trace

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware
    from simulator.program import Program
    from simulator.timeline import Timeline


@dataclass(frozen=True, kw_only=True, eq=False)
class SimulatedStep:
    """A simulated step: ``stage`` holds what ran with one stage, ``pipeline`` with several."""

    plan: Plan
    hardware: Hardware
    prediction: Prediction
    stage: tuple[Timeline, Program] | None = field(default=None, repr=False)
    pipeline: PipelinePrediction | None = field(default=None, repr=False)

    def write_trace(self, path: str | Path) -> None:
        """Write the step as a trace for https://ui.perfetto.dev."""
        if self.pipeline is not None:
            write_trace(self.pipeline, self.plan, path)
        else:
            assert self.stage is not None
            write_stage_trace(*self.stage, path, hardware=self.hardware)


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
    if plan.pipeline * plan.virtual > 1:
        found = (
            predict_pipeline(plan, checked_graph(plan, graph), hardware)
            if not source
            else predict_pipeline_strategy(plan, source, hardware)
        )
        return SimulatedStep(plan=plan, hardware=hardware, prediction=found.prediction, pipeline=found)
    lowered = lower(plan, graph) if not source else lower_strategy(plan, source)
    prediction, timeline = predict(plan, lowered, hardware)
    return SimulatedStep(plan=plan, hardware=hardware, prediction=prediction, stage=(timeline, lowered.program))
