"""Virtual devices: computation sleeps for its predicted time, order and messages between processes are real.

A message is a real collective of the plan's kind in the plan's group, which carries no more than the moment at which
each rank came to it; it is over its predicted time after the last of them. So a step shows whether the order of a plan
works, what overlaps, and how far one slow rank or link holds back the others, for more ranks than there are cores.
All processes must be on one machine, whose clock they share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.software import machine_of
from planner.execution.communication import Groups, members
from planner.execution.memory import free_memory
from planner.execution.virtual.ranks import VirtualJob, run_rank
from planner.execution.virtual.script import messages, rank_scripts
from planner.lowering.checked import checked_graph
from planner.lowering.instructions import LoweredStages
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.loading import lower_to_run
from planner.planning.prediction import predict_plan
from planner.planning.stragglers import slow_cluster, straggle
from planner.plans.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.errors import InfeasibleError, InputError
from simulator.hardware import Hardware
from simulator.launches import without_fixed_time
from simulator.reliability import compute_factors

RANK_BYTES = 40 << 20
"""Memory that a virtual device takes of this machine, about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualOptions:
    """How a virtual run is disturbed, as `meshwright simulate` takes it; ``stretch`` is chosen where it is None."""

    steps: int = 3
    slow_ranks: int = 0
    slowdown: float = 1.5
    slow_links: Mapping[str, float] | None = None
    seed: int = 0
    stretch: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualReport:
    """A virtual run: seconds are those of the devices, the stretching taken off.

    Attributes
    ----------
    undisturbed_step_time_s : predicted without slow ranks and links
    predicted_step_time_s : by the simulator, with them
    measured_step_time_s : median of the slowest rank's
    undelayed_step_time_s : the same by clocks of the ranks that stand still while the machine makes a rank late
    error, undelayed_error : predicted over measured and over undelayed, less one
    stretch : seconds that passed for one of the devices
    message_s : seconds that a message of the step really takes, about
    messages : of the rank that has most
    """

    processes: int
    steps: int
    undisturbed_step_time_s: float
    predicted_step_time_s: float
    measured_step_time_s: float
    step_times_s: tuple[float, ...]
    error: float
    undelayed_step_time_s: float
    undelayed_error: float
    slow_ranks: Mapping[int, float]
    slow_links: Mapping[str, float]
    stretch: float
    message_s: float
    messages: int


def run_virtual(plan: Plan, options: VirtualOptions) -> VirtualReport:
    """Run a plan on as many sleeping processes as it has devices, and hold the step against the simulator's.

    Raises
    ------
    InputError
        An option is wrong.
    InfeasibleError
        The processes would not fit into the memory of this machine.
    ExecutionError
        A rank failed.
    """
    if options.steps < 1 or (options.stretch is not None and not options.stretch > 0):
        raise InputError(f"{options.steps} steps stretched {options.stretch} times: both must be positive")
    _check_memory(plan.devices)
    # Devices that sleep lose nothing to messages beside them, nor to their host.
    hardware = replace(without_fixed_time(machine_of(plan)), overlap_compute_speed=1.0)
    links = dict(options.slow_links or {})
    slow = slow_cluster(hardware, links)
    lowered = lower_to_run(plan, plan.network)
    graph = checked_graph(plan)
    calm = predict_plan(plan, graph, hardware).step_time_s

    def lower(cluster: Hardware) -> LoweredPipeline:
        return lower_pipeline(plan, graph, cluster)

    predicted = straggle(
        plan,
        hardware,
        lower,
        slow_ranks=options.slow_ranks,
        slowdown=options.slowdown,
        slow_links=links,
        seed=options.seed,
    )
    scripts = rank_scripts(plan, lowered, lower(hardware), lower(slow), hardware, slow)
    spread = hardware.reliability.compute_spread
    factors = compute_factors(
        plan.devices, seed=options.seed, slow_ranks=options.slow_ranks, slowdown=options.slowdown, spread=spread
    )
    job = VirtualJob(
        scripts=scripts,
        groups=_meeting(lowered),
        pipeline_stride=lowered.pipeline_stride,
        factors=factors.tolist(),
        link_ranks=frozenset(predicted.link_ranks.values()) if predicted.link_ranks else None,
        slow=bool(links),
        steps=options.steps,
        step_s=predicted.step_time_s,
        stretch=options.stretch,
    )
    results = run_workers(run_rank, (job,), plan.devices)
    times = np.max([result.seconds for result in results], axis=0)
    measured = float(np.median(times))
    undelayed = float(np.median(np.max([result.undelayed for result in results], axis=0)))
    return VirtualReport(
        processes=plan.devices,
        steps=options.steps,
        undisturbed_step_time_s=calm,
        predicted_step_time_s=predicted.step_time_s,
        measured_step_time_s=measured,
        step_times_s=tuple(times.tolist()),
        error=predicted.step_time_s / measured - 1,
        undelayed_step_time_s=undelayed,
        undelayed_error=predicted.step_time_s / undelayed - 1,
        slow_ranks=dict(predicted.slow_ranks),
        slow_links=dict(predicted.slow_links),
        stretch=results[0].stretch,
        message_s=results[0].message_s,
        messages=max(sum(1 for _ in messages(script)) for script in scripts),
    )


def _meeting(lowered: LoweredStages) -> list[Groups]:
    """Groups of ranks that meet; none of an axis of one rank, on which there are no messages."""
    return [groups if len(groups[0]) > 1 else () for groups in members(lowered)]


def _check_memory(processes: int) -> None:
    free = free_memory("cpu", 0)
    if free is not None and processes * RANK_BYTES > free:
        raise InfeasibleError(
            f"{processes} virtual devices take about {processes * RANK_BYTES / 1e9:.3g} GB, but there are "
            f"{free / 1e9:.3g} GB free on this machine; plan for fewer devices or free memory"
        )
