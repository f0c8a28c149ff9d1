"""`meshwright simulate`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from planner.cli.options import (
    Slowdown,
    SlowLinks,
    Stragglers,
    TrustFile,
    check_out,
    natural_or_zero,
    option,
    rate,
    takes,
)
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from planner.cli.reliability import ReliabilityOptions
    from planner.graph.operator_graph import OperatorGraph
    from planner.planning.goodput import PlanGoodput
    from planner.planning.prediction import SimulatedPlan
    from planner.planning.stragglers import StraggledStep
    from planner.plans.plan import Plan
    from simulator.hardware import Hardware
    from simulator.mixed_cluster import MixedCluster
    from simulator.schedules import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArguments:
    """Arguments and options, None where not given."""

    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")]
    hardware: Annotated[str | None, option("--hw", "Default: the one the plan was made for.", "PROFILE")] = None
    software: Annotated[
        str | None, option("--software", "Default: that of the plan; usual for what is usual.", "NAME")
    ] = None
    engine: Annotated[Literal["fast", "reference"], option("--engine", "Array based, or SimPy.")] = "fast"
    trace: Annotated[Path | None, option("--trace", "Write the step for Perfetto or Chrome.", "FILE")] = None
    schedule_file: Annotated[
        Path | None, option("--schedule-file", "Order of passes, as PyTorch writes it.", "CSV")
    ] = None
    stragglers: Stragglers = None
    slowdown: Slowdown = None
    slow_link: SlowLinks = None
    goodput: Annotated[bool, option("--goodput", "Also what failures and checkpoints leave.")] = False
    checkpoint_interval: Annotated[
        float | None, option("--checkpoint-interval", "Default: Daly's optimum.", "SECONDS", rate)
    ] = None
    asynchronous: Annotated[bool, option("--async-checkpoint", "Checkpoints are written while training goes on.")] = (
        False
    )
    device_mtbf: Annotated[
        float | None, option("--device-mtbf", "Between failures of one device.", "SECONDS", rate)
    ] = None
    restart: Annotated[float | None, option("--restart", "From a failure to a running job.", "SECONDS", rate)] = None
    storage_bandwidth: Annotated[
        float | None, option("--storage-bandwidth", "What one node writes.", "BYTES/S", rate)
    ] = None
    snapshot_bandwidth: Annotated[
        float | None, option("--snapshot-bandwidth", "From a device to its host.", "BYTES/S", rate)
    ] = None
    days: Annotated[float | None, option("--days", "Length of the simulated jobs [30].", "N", rate)] = None
    seed: Annotated[int, option("--seed", "Of slow ranks and failures.", "N", natural_or_zero)] = 0
    trust_file: TrustFile = False

    def reliability(self) -> ReliabilityOptions:
        """Options for slow ranks and failures.

        Raises
        ------
        InputError
            Options are given that mean nothing without another.
        """
        from planner.cli.reliability import JobOptions, ReliabilityOptions, SlowOptions

        given = {
            "device_mtbf_s": self.device_mtbf,
            "restart_s": self.restart,
            "storage_bandwidth_bytes_per_s": self.storage_bandwidth,
            **({"snapshot_bandwidth_bytes_per_s": self.snapshot_bandwidth} if self.asynchronous else {}),
        }
        job = JobOptions(
            given=given,
            interval_s=self.checkpoint_interval,
            asynchronous=self.asynchronous,
            days=self.days,
            seed=self.seed,
        )
        job.check(wanted=self.goodput)
        slow = SlowOptions.read(self.stragglers, self.slowdown, self.slow_link or (), seed=self.seed)
        if self.snapshot_bandwidth is not None and not self.asynchronous:
            raise InputError("--snapshot-bandwidth was given without --async-checkpoint; add it")
        return ReliabilityOptions(
            slow=slow if slow.ranks is not None or slow.links else None, job=job if self.goodput else None
        )


@takes(SimulateArguments)
def simulate(given: SimulateArguments, terminal: Terminal) -> None:
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
    from planner.cli.plan_tables import simulation_report
    from planner.cli.reliability import reliability_document, reliability_report
    from planner.planning.loading import strategy_graph
    from planner.planning.prediction import simulate_plan, write_trace
    from simulator import engine as reference
    from simulator.schedules.exchange import parse_schedule_csv

    extra = given.reliability()
    if given.trace is not None:
        check_out("--trace", given.trace, (given.strategy, given.hardware))
    asked = _simulation(terminal, given, extra)
    plan, hardware = asked.plan, asked.hardware
    if given.schedule_file is not None and plan.pipeline * plan.virtual == 1:
        raise InputError("--schedule-file orders the passes of a pipeline, but the plan has one stage; leave it out")
    schedule = None if given.schedule_file is None else parse_schedule_csv(given.schedule_file)
    with terminal.working(f"simulating {plan.network} on {plan.devices} devices"):
        run = reference.run if asked.engine == "reference" else None
        with strategy_graph(plan, asked.strategy) as graph:
            found = simulate_plan(plan, graph, hardware, schedule, run, asked.cluster)
        if asked.trace is not None:
            write_trace(found, plan, asked.trace)
        straggled, kept = _reliability(asked, found, graph, schedule)
    prediction = found.prediction
    document = _document(asked, found) | reliability_document(prediction, straggled, kept, asked.seed)

    def report() -> Iterator[RenderableType]:
        yield from simulation_report(plan, hardware, found, asked.trace)
        yield from reliability_report(prediction, straggled, kept, asked.seed)

    terminal.result(document, f"{prediction.step_time_s!r}", report)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What is simulated: a plan on a cluster, whose nodes are in ``cluster`` where they are of several types."""

    strategy: Path
    plan: Plan
    hardware: Hardware
    engine: str
    trace: Path | None
    extra: ReliabilityOptions
    seed: int
    cluster: MixedCluster | None


def _simulation(terminal: Terminal, given: SimulateArguments, extra: ReliabilityOptions) -> Simulation:
    """Read plan and profile, the plan perhaps as other software runs it; says what the profile lacks for it."""
    from planner.cost.software import USUAL
    from planner.lowering.checked import precision_dtype
    from planner.planning.prediction import check_products, hardware_notes
    from planner.plans.file import read_plan

    plan = read_plan(given.strategy)
    if given.software is not None:
        plan = replace(plan, software="" if given.software == USUAL else given.software)
    profile = _profile(terminal, given.strategy, plan, given.hardware)
    check_products(profile, precision_dtype(plan.precision))
    for note in hardware_notes(profile, precision_dtype(plan.precision)):
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


def _reliability(
    asked: Simulation, found: SimulatedPlan, graph: OperatorGraph, schedule: Schedule | None
) -> tuple[StraggledStep | None, PlanGoodput | None]:
    """What was asked of slow ranks and of failures."""
    from planner.lowering.pipeline import lower_pipeline
    from planner.planning.goodput import checkpoint_bytes
    from planner.planning.stragglers import straggle

    plan, hardware, extra = asked.plan, asked.hardware, asked.extra
    straggled = kept = None
    if extra.slow is not None:
        straggled = straggle(
            plan,
            hardware,
            lambda cluster: lower_pipeline(plan, graph, cluster, schedule),
            slow_ranks=extra.slow.ranks or 0,
            slowdown=extra.slow.factor,
            slow_links=extra.slow.links,
            seed=extra.slow.seed,
        )
    if extra.job is not None:
        size = checkpoint_bytes(plan, graph, hardware.devices_per_node)
        kept = extra.job.goodput(size, plan.devices, hardware, found.prediction.step_time_s)
    return straggled, kept


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


def _document(asked: Simulation, found: SimulatedPlan) -> dict[str, Any]:
    from planner.planning.documents import plan_document, prediction_document

    return {
        "strategy_file": str(asked.strategy),
        "network": asked.plan.network,
        "hw": asked.hardware.name,
        "engine": str(asked.engine),
        "step_time_s": found.prediction.step_time_s,
        "prediction": prediction_document(found.prediction),
        "plan": plan_document(asked.plan, asked.hardware),
        "ranks": [
            {
                "rank": rank,
                "peak_memory_bytes": int(memory.peak_bytes),
                "compute_s": float(found.result.compute_s[rank]),
                "idle_s": float(found.result.bubble_s[rank]),
            }
            for rank, memory in enumerate(found.memory)
        ],
        "collectives": [asdict(total) | {"collective": str(total.collective)} for total in found.collectives],
        "operators": [asdict(total) for total in found.operators],
        "trace": None if asked.trace is None else str(asked.trace),
    }
