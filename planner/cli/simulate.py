"""`meshwright simulate`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.cli.options import DebugFlag, JsonFlag, QuietFlag, check_out, natural_or_zero, rate, read_shares
from planner.cli.terminal import Terminal
from simulator.errors import InputError

if TYPE_CHECKING:
    from planner.cli.reliability import Reliability, SlowOptions
    from planner.goodput import StraggledStep
    from planner.instructions import LoweredPlan
    from planner.planning import Prediction
    from planner.strategy.plan import Plan
    from simulator.hardware import Hardware
    from simulator.mixed_cluster import MixedCluster
    from simulator.program import Program
    from simulator.timeline import Timeline


class Engine(StrEnum):
    """Which engine simulates; both give the same step."""

    FAST = "fast"
    REFERENCE = "reference"


Stragglers = Annotated[
    int | None,
    typer.Option("--stragglers", parser=natural_or_zero, metavar="K", help="Also the step with K slow ranks, drawn."),
]
Slowdown = Annotated[
    float | None,
    typer.Option("--slowdown", parser=rate, metavar="FACTOR", help="How much longer a slow rank computes [1.5]."),
]
SlowLinks = Annotated[
    list[str] | None,
    typer.Option("--slow-link", metavar="LEVEL=SHARE", help="One link of a level at a share of its bandwidth."),
]
GoodputFlag = Annotated[bool, typer.Option("--goodput", help="Also what failures and checkpoints leave.")]
CheckpointInterval = Annotated[
    float | None, typer.Option("--checkpoint-interval", parser=rate, metavar="SECONDS", help="Default: Daly's optimum.")
]
AsynchronousFlag = Annotated[
    bool, typer.Option("--async-checkpoint", help="Checkpoints are written while training goes on.")
]
DeviceMtbf = Annotated[
    float | None, typer.Option("--device-mtbf", parser=rate, metavar="SECONDS", help="Between failures of one device.")
]
Restart = Annotated[
    float | None, typer.Option("--restart", parser=rate, metavar="SECONDS", help="From a failure to a running job.")
]
StorageBandwidth = Annotated[
    float | None, typer.Option("--storage-bandwidth", parser=rate, metavar="BYTES/S", help="What one node writes.")
]
SnapshotBandwidth = Annotated[
    float | None,
    typer.Option("--snapshot-bandwidth", parser=rate, metavar="BYTES/S", help="From a device to its host."),
]
Days = Annotated[
    float | None, typer.Option("--days", parser=rate, metavar="N", help="Length of the simulated jobs [30].")
]
Seed = Annotated[int, typer.Option("--seed", parser=natural_or_zero, metavar="N", help="Of slow ranks and failures.")]


def simulate(
    strategy: Annotated[Path, typer.Argument(metavar="STRATEGY", help="A strategy file.")],
    hardware: Annotated[
        str | None, typer.Option("--hw", metavar="PROFILE", help="Default: the one the plan was made for.")
    ] = None,
    software: Annotated[
        str | None,
        typer.Option("--software", metavar="NAME", help="Default: that of the plan; usual for what is usual."),
    ] = None,
    engine: Annotated[Engine, typer.Option("--engine", help="Array based, or SimPy.")] = Engine.FAST,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the step for Perfetto or Chrome.")
    ] = None,
    schedule_file: Annotated[
        Path | None, typer.Option("--schedule-file", metavar="CSV", help="Order of passes, as PyTorch writes it.")
    ] = None,
    stragglers: Stragglers = None,
    slowdown: Slowdown = None,
    slow_link: SlowLinks = None,
    goodput: GoodputFlag = False,
    checkpoint_interval: CheckpointInterval = None,
    asynchronous: AsynchronousFlag = False,
    device_mtbf: DeviceMtbf = None,
    restart: Restart = None,
    storage_bandwidth: StorageBandwidth = None,
    snapshot_bandwidth: SnapshotBandwidth = None,
    days: Days = None,
    seed: Seed = 0,
    as_json: JsonFlag = False,
    quiet: QuietFlag = False,
    debug: DebugFlag = False,
) -> None:
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
    from planner.cli.reliability import JobOptions, Reliability, SlowOptions
    from simulator.mixed_cluster import cluster_at

    terminal = Terminal.open(as_json=as_json, quiet=quiet)
    given = {
        "device_mtbf_s": device_mtbf,
        "restart_s": restart,
        "storage_bandwidth_bytes_per_s": storage_bandwidth,
        **({"snapshot_bandwidth_bytes_per_s": snapshot_bandwidth} if asynchronous else {}),
    }
    job = JobOptions(given=given, interval_s=checkpoint_interval, asynchronous=asynchronous, days=days, seed=seed)
    job.check(wanted=goodput)
    slow = SlowOptions(ranks=stragglers, slowdown=slowdown, links=read_shares(slow_link or []), seed=seed)
    if slowdown is not None and stragglers is None:
        raise InputError("--slowdown was given without --stragglers; add it")
    if snapshot_bandwidth is not None and not asynchronous:
        raise InputError("--snapshot-bandwidth was given without --async-checkpoint; add it")
    if trace is not None:
        check_out("--trace", trace, (strategy, hardware))
    extra = Reliability(slow=slow if slow.ranks is not None or slow.links else None, job=job if goodput else None)
    plan, profile = _read(terminal, strategy, hardware, software)
    asked = Simulation(
        strategy=strategy,
        plan=plan,
        hardware=profile,
        engine=engine,
        trace=trace,
        extra=extra,
        seed=seed,
        # Slow ranks are simulated at the pace of the slowest type, so the step beside them is, too.
        cluster=cluster_at(hardware or plan.hardware) if extra.slow is None else None,
    )
    if plan.pipeline * plan.virtual > 1:
        from planner.cli.simulate_pipeline import simulate_pipeline_plan

        simulate_pipeline_plan(terminal, asked, schedule_file)
    elif schedule_file is not None:
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


def _read(terminal: Terminal, strategy: Path, hardware: str | None, software: str | None) -> tuple[Plan, Hardware]:
    """The plan, perhaps as other software runs it, and the profile; says what that does not know of its precision."""
    from planner.lowering.checked import precision_dtype
    from planner.prediction import check_products, precision_notes
    from planner.software import USUAL
    from planner.strategy.file import read_plan

    plan = read_plan(strategy)
    if software is not None:
        plan = replace(plan, software="" if software == USUAL else software)
    profile = _profile(terminal, strategy, plan, hardware)
    check_products(profile, precision_dtype(plan.precision))
    for note in precision_notes(profile, precision_dtype(plan.precision)):
        terminal.note(note)
    return plan, profile


def _simulate_stage(terminal: Terminal, asked: Simulation) -> None:
    """Simulate a plan of one stage and print what it does, with what was asked of slow ranks and failures."""
    from planner.cli.reliability import reliability_document, reliability_report
    from planner.goodput import checkpoint_bytes
    from planner.strategy.loading import lower_strategy
    from planner.work import optimizer
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
    if terminal.json:
        terminal.document(found)
    elif terminal.quiet:
        terminal.line(f"{timeline.step_time_s!r}")
    else:
        from planner.cli.tables import simulation_report

        terminal.show(*simulation_report(plan, profile, prediction, timeline, lowered.program, trace))
        terminal.show(*reliability_report(prediction, straggled, kept, asked.seed))


def _predicted(
    engine: Engine, plan: Plan, lowered: LoweredPlan, hardware: Hardware, cluster: MixedCluster | None
) -> tuple[Prediction, Timeline]:
    """Run the step; on a cluster of several device types each task takes as long as the slowest that take part."""
    from planner.prediction import prediction_of
    from simulator import engine as reference
    from simulator import fast_engine
    from simulator.mixed_cluster import mixed_task_times

    times = None if cluster is None else mixed_task_times(lowered.program, cluster)
    simulate_step = fast_engine.simulate if engine is Engine.FAST else reference.simulate
    timeline = simulate_step(lowered.program, hardware, times=times)
    return prediction_of(plan, lowered.graph, hardware, timeline), timeline


def _straggled(lowered: LoweredPlan, hardware: Hardware, slow: SlowOptions) -> StraggledStep:
    from planner.goodput import straggle

    return straggle(
        lowered,
        hardware,
        slow_ranks=slow.ranks or 0,
        slowdown=slow.factor,
        slow_links=slow.links,
        seed=slow.seed,
    )


def _profile(terminal: Terminal, strategy: Path, plan: Plan, name: str | None) -> Hardware:
    from planner.software import as_run
    from simulator.errors import ProfileError
    from simulator.hardware import load_profile

    if name is not None:
        return as_run(load_profile(name), plan.software, plan.attention)
    try:
        profile = load_profile(plan.hardware)
    except ProfileError as error:
        raise ProfileError(f"{strategy}: hardware.profile: {error}, or simulate on another with --hw") from error
    if profile.hash != plan.hardware_hash:
        terminal.note(f"profile {plan.hardware} has changed since the plan was made; the prediction is for the new one")
    return as_run(profile, plan.software, plan.attention)


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
    from planner.documents import plan_document, prediction_document
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
