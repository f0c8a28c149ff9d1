"""A plan among slow ranks and failures: the step with stragglers, checkpoints of the plan's own size, goodput."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import prod

import numpy as np

from planner.instructions import LoweredPlan
from planner.sharding.placement import REPLICATE
from simulator.errors import InputError
from simulator.hardware import Hardware, Reliability
from simulator.program import BufferKind
from simulator.reliability import (
    CheckpointCost,
    Goodput,
    JobReliability,
    SimulatedGoodput,
    best_interval_s,
    checkpoint_cost,
    daly_interval_s,
    expected_goodput,
    job_mtbf_s,
    simulate_goodput,
    young_interval_s,
)
from simulator.stragglers import compute_factors, slow_level, straggling_step

DAY_S = 86400.0
RUNS = 100
OPTIONS = {
    "device_mtbf_s": "--device-mtbf",
    "restart_s": "--restart",
    "storage_bandwidth_bytes_per_s": "--storage-bandwidth",
    "snapshot_bandwidth_bytes_per_s": "--snapshot-bandwidth",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StraggledStep:
    """A step with slow ranks and links; ``slow_ranks`` are those drawn, by their factors."""

    step_time_s: float
    slow_ranks: Mapping[int, float]
    slow_links: Mapping[str, float]
    largest_factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBytes:
    """What one rank writes and loads.

    Shards that several ranks hold are written by one of them, spread evenly, as PyTorch's distributed
    checkpoint does; every rank loads all it holds.
    """

    written: float
    loaded: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanGoodput:
    """What failures leave of a plan's time: expected, and in simulated jobs of ``days``."""

    reliability: Reliability
    job_mtbf_s: float
    restart_s: float
    checkpoint_bytes: CheckpointBytes
    checkpoint: CheckpointCost
    young_interval_s: float
    daly_interval_s: float
    interval_steps: int
    expected: Goodput
    simulated: SimulatedGoodput
    days: float


def straggle(
    lowered: LoweredPlan,
    hardware: Hardware,
    *,
    slow_ranks: int,
    slowdown: float,
    slow_links: Mapping[str, float],
    seed: int,
) -> StraggledStep:
    """Simulate the step with `slow_ranks` ranks drawn at random and a slow link in each of the levels named."""
    spread = hardware.reliability.compute_spread
    factors = compute_factors(
        lowered.program.devices, seed=seed, slow_ranks=slow_ranks, slowdown=slowdown, spread=spread
    )
    cluster = hardware
    for level, share in slow_links.items():
        cluster = slow_level(cluster, level, share)
    chosen = np.argsort(-factors, kind="stable")[:slow_ranks]
    return StraggledStep(
        step_time_s=straggling_step(lowered.program, cluster, factors).step_time_s,
        slow_ranks={int(rank): float(factors[rank]) for rank in np.sort(chosen)},
        slow_links=dict(slow_links),
        largest_factor=float(factors.max()),
    )


def checkpoint_bytes(lowered: LoweredPlan) -> CheckpointBytes:
    """Parameters and optimizer states of one rank, as the plan shards them."""
    sizes = [axis.size for axis in lowered.mesh.axes]
    copies = {
        parameter.value: prod(
            size for size, place in zip(sizes, parameter.placements, strict=True) if place == REPLICATE
        )
        for parameter in lowered.parameters
    }
    kept = (BufferKind.PARAMETER, BufferKind.OPTIMIZER_STATE)
    held = [buffer for buffer in lowered.program.resident if buffer.kind in kept]
    return CheckpointBytes(
        written=sum(buffer.size_bytes / copies[buffer.name.removesuffix(".states")] for buffer in held),
        loaded=float(sum(buffer.size_bytes for buffer in held)),
    )


def with_given(reliability: Reliability, given: Mapping[str, float | None], *, profile: str) -> Reliability:
    """The profile's numbers with those `given` in their place; InputError where one is still unknown."""
    found = replace(reliability, **{name: value for name, value in given.items() if value is not None})
    stated = {name for name, value in given.items() if value is not None}
    missing = [
        field.name
        for field in fields(found)
        if field.name in given and not getattr(found, field.name) and field.name not in stated
    ]
    if missing:
        raise InputError(
            f"profile {profile} does not say {' or '.join(f'reliability.{name}' for name in missing)}; "
            f"give {' and '.join(OPTIONS[name] for name in missing)} or add it to the profile"
        )
    return found


def plan_goodput(
    lowered: LoweredPlan,
    hardware: Hardware,
    reliability: Reliability,
    *,
    step_time_s: float,
    interval_s: float | None = None,
    asynchronous: bool = False,
    days: float = 30.0,
    seed: int = 0,
) -> PlanGoodput:
    """Goodput of a plan that checkpoints every `interval_s` (Daly's optimum by default), in whole steps."""
    devices = lowered.program.devices
    size = checkpoint_bytes(lowered)
    cost = checkpoint_cost(
        written_bytes_per_rank=size.written,
        loaded_bytes_per_rank=size.loaded,
        ranks_per_node=min(devices, hardware.devices_per_node),
        storage_bandwidth_bytes_per_s=reliability.storage_bandwidth_bytes_per_s,
        snapshot_bandwidth_bytes_per_s=reliability.snapshot_bandwidth_bytes_per_s if asynchronous else 0.0,
    )
    job = JobReliability(
        mtbf_s=job_mtbf_s(reliability.device_mtbf_s, devices),
        restart_s=reliability.restart_s + cost.load_s,
        checkpoint=cost,
    )
    best = best_interval_s(job, step_time_s)
    interval = best if interval_s is None else step_time_s * max(1, round(interval_s / step_time_s))
    expected = expected_goodput(job, interval)
    if expected.useful <= 0:
        raise InputError(
            f"a job of {devices} devices fails every {job.mtbf_s:.3g} s, restarts in {job.restart_s:.3g} s and "
            f"checkpoints every {interval:.3g} s: it never gets on; shorten the interval or use fewer devices"
        )
    return PlanGoodput(
        reliability=reliability,
        job_mtbf_s=job.mtbf_s,
        restart_s=job.restart_s,
        checkpoint_bytes=size,
        checkpoint=cost,
        young_interval_s=young_interval_s(cost.blocking_s, job.mtbf_s),
        daly_interval_s=daly_interval_s(cost.blocking_s, job.mtbf_s),
        interval_steps=round(interval / step_time_s),
        expected=expected,
        simulated=simulate_goodput(job, interval, useful_s=days * DAY_S * expected.useful, seed=seed, runs=RUNS),
        days=days,
    )
