"""`meshwright simulate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.cli.arguments import takes
from planner.cli.options import check_out
from planner.cli.simulate_options import Engine, SimulateArguments
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from planner.cli.reliability import Reliability, SlowOptions
    from planner.lowering.instructions import LoweredPlan
    from planner.planning.goodput import StraggledStep
    from planner.planning.planning import Prediction
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware
    from simulator.mixed_cluster import MixedCluster
    from simulator.program import Program
    from simulator.timeline import Timeline


@takes(SimulateArguments)
def simulate(given: SimulateArguments) -> None:
    """Simulate one training step of a plan, task by task; with failures, a whole job.

    \b
    Example: where does the time go, and a trace to open at https://ui.perfetto.dev
      meshwright simulate strategy.json --trace timeline.json
    The same plan on other hardware
      meshwright simulate strategy.json --hw dgx-h100
    The same plan run by other software
      meshwright simulate strategy.json --software nemo
    One rank computes 1.3 times as long, one link has half its bandwidth
      meshwright simulate strategy.json --stragglers 1 --slowdown 1.3 --slow-link InfiniBand=0.5
    How often to checkpoint, and how much of a month is useful work
      meshwright simulate strategy.json --goodput --days 30 --seed 1
    What is not given of failures and storage comes from the profile.
    """
    terminal = Terminal.open(as_json=given.as_json, quiet=given.quiet)
    extra = given.reliability()
    if given.trace is not None:
        check_out("--trace", given.trace, (given.strategy, given.hardware))
    asked = _simulation(terminal, given, extra)
    if asked.plan.pipeline * asked.plan.virtual > 1:
        from planner.cli.simulate_pipeline import simulate_pipeline_plan

        simulate_pipeline_plan(terminal, asked, given.schedule_file)
    elif given.schedule_file is not None:
        raise InputError("--schedule-file orders the passes of a pipeline, but the plan has one stage; leave it out")
    else:
        _simulate_stage(terminal, asked)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is simulated: a plan on a cluster, whose nodes are in ``cluster`` where they are of several types."""

    strategy: Path
    plan: Plan
    hardware: Hardware
    engine: Engine
    trace: Path | None
    extra: Reliability
    seed: int
    cluster: MixedCluster | None


def _simulation(terminal: Terminal, given: SimulateArguments, extra: Reliability) -> Simulation:
    """Read plan and profile, the plan perhaps as other software runs it; says what the profile lacks for it."""
    from planner.cost.software import USUAL
    from planner.lowering.checked import precision_dtype
    from planner.planning.prediction import check_products, precision_notes
    from planner.plans.file import read_plan

    plan = read_plan(given.strategy)
    if given.software is not None:
        plan = replace(plan, software="" if given.software == USUAL else given.software)
    profile = _profile(terminal, given.strategy, plan, given.hardware)
    check_products(profile, precision_dtype(plan.precision))
    for note in precision_notes(profile, precision_dtype(plan.precision)):
        terminal.note(note)
    return Simulation(
        strategy=given.strategy,
        plan=plan,
        hardware=profile,
        engine=given.engine,
        trace=given.trace,
        extra=extra,
        seed=given.seed,
        # Slow ranks are simulated at the pace of the slowest type, so the step beside them is, too.
        cluster=_cluster(plan, given.hardware or plan.hardware) if extra.slow is None else None,
    )


def _cluster(plan: Plan, name: str) -> MixedCluster | None:
    """The cluster of several device types that a file describes, as the plan's software runs on it."""
    from planner.cost.software import cluster_as_run
    from simulator.profiles import cluster_at

    cluster = cluster_at(name)
    return cluster and cluster_as_run(cluster, plan)


def _simulate_stage(terminal: Terminal, asked: Simulation) -> None:
    """Simulate a plan of one stage and print what it does, with what was asked of slow ranks and failures."""
    from planner.cli.reliability import reliability_document, reliability_report
    from planner.cli.simulation_tables import simulation_report
    from planner.cost.work import optimizer
    from planner.planning.goodput import checkpoint_bytes
    from planner.planning.loading import lower_strategy
    from simulator.trace import write_trace

    plan, profile, extra, trace = asked.plan, asked.hardware, asked.extra, asked.trace
    with terminal.working(f"simulating {plan.network} on {plan.devices} devices"):
        lowered = lower_strategy(plan, asked.strategy)
        prediction, timeline = _predicted(asked.engine, plan, lowered, profile, asked.cluster)
        if trace is not None:
            write_trace(timeline, lowered.program, trace, hardware=profile)
        straggled = None if extra.slow is None else _straggled(lowered, profile, extra.slow)
        size = checkpoint_bytes(lowered, optimizer(plan.optimizer))
        kept = None if extra.job is None else extra.job.goodput(size, plan.devices, profile, timeline.step_time_s)
    found = _document(asked.strategy, plan, profile, asked.engine, prediction, timeline, lowered.program, trace)
    found |= reliability_document(prediction, straggled, kept, asked.seed)

    def report() -> Iterator[RenderableType]:
        yield from simulation_report(plan, profile, prediction, timeline, lowered.program, trace)
        yield from reliability_report(prediction, straggled, kept, asked.seed)

    terminal.result(found, f"{timeline.step_time_s!r}", report)


def _predicted(
    engine: Engine, plan: Plan, lowered: LoweredPlan, hardware: Hardware, cluster: MixedCluster | None
) -> tuple[Prediction, Timeline]:
    """Run the step; on a cluster of several device types each task takes as long as the slowest that take part."""
    from planner.planning.prediction import prediction_of
    from simulator import engine as reference
    from simulator import fast_engine
    from simulator.mixed_cluster import mixed_task_times

    times = None if cluster is None else mixed_task_times(lowered.program, cluster)
    simulate_step = fast_engine.simulate if engine is Engine.FAST else reference.simulate
    timeline = simulate_step(lowered.program, hardware, times=times)
    return prediction_of(plan, lowered.graph, hardware, timeline), timeline


def _straggled(lowered: LoweredPlan, hardware: Hardware, slow: SlowOptions) -> StraggledStep:
    from planner.planning.goodput import straggle

    return straggle(
        lowered,
        hardware,
        slow_ranks=slow.ranks or 0,
        slowdown=slow.factor,
        slow_links=slow.links,
        seed=slow.seed,
    )


def _profile(terminal: Terminal, strategy: Path, plan: Plan, name: str | None) -> Hardware:
    from planner.cost.software import run_for
    from simulator.errors import ProfileError
    from simulator.profiles import load_profile

    if name is not None:
        return run_for(plan, load_profile(name))
    try:
        profile = load_profile(plan.hardware)
    except ProfileError as error:
        raise ProfileError(f"{strategy}: hardware.profile: {error}, or simulate on another with --hw") from error
    if profile.hash != plan.hardware_hash:
        terminal.note(f"profile {plan.hardware} has changed since the plan was made; the prediction is for the new one")
    return run_for(plan, profile)


def _document(
    strategy: Path,
    plan: Plan,
    hardware: Hardware,
    engine: Engine,
    prediction: Prediction,
    timeline: Timeline,
    program: Program,
    trace: Path | None,
) -> dict[str, Any]:
    from planner.planning.documents import plan_document, prediction_document
    from simulator.timeline import top_operators

    return {
        "strategy_file": str(strategy),
        "network": plan.network,
        "hw": hardware.name,
        "engine": str(engine),
        "step_time_s": timeline.step_time_s,
        "prediction": prediction_document(prediction),
        "plan": plan_document(plan, hardware),
        "collectives": [
            {
                "collective": str(total.collective),
                "axis": total.axis,
                "calls": total.calls,
                "payload_bytes": total.payload_bytes,
                "seconds": total.seconds,
            }
            for total in timeline.collectives
        ],
        "operators": [
            {"name": total.name, "kernel": total.kernel, "calls": total.calls, "seconds": total.seconds}
            for total in top_operators(timeline, program)
        ],
        "trace": None if trace is None else str(trace),
    }
