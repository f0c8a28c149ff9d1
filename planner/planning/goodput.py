"""A plan among failures: checkpoints of the plan's own size, and the share of time that is useful work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from planner.cost.work import Optimizer, state_bytes
from planner.graph.operator_graph import DTYPE_BYTES, OperatorGraph, Role, TensorSpec
from planner.lowering.pipeline import chunk_units, plan_schedule
from planner.lowering.placed import local_share
from planner.lowering.representatives import representatives
from planner.plans.plan import Plan
from planner.sharding.placement import REPLICATE, Placements
from simulator.errors import InputError
from simulator.hardware import Hardware, Reliability
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
from simulator.task_table import FloatArray

DAY_S = 86400.0
RUNS = 100
FOR_EVER_S = 1e12
OPTIONS = {
    "device_mtbf_s": "--device-mtbf",
    "restart_s": "--restart",
    "storage_bandwidth_bytes_per_s": "--storage-bandwidth",
    "snapshot_bandwidth_bytes_per_s": "--snapshot-bandwidth",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBytes:
    """What one rank writes and loads, the mean over the ranks of the node that has most.

    Shards that several ranks hold are written by one of them, spread evenly, as PyTorch's distributed
    checkpoint does; every rank loads all it holds. ``most`` is what the rank with most to write writes.
    """

    written: float
    loaded: float
    most: float


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


def checkpoint_bytes(plan: Plan, graph: OperatorGraph, devices_per_node: int) -> CheckpointBytes:
    """Parameters and optimizer states of a rank, as the plan shards them; states in host memory count as well.

    Pipeline ranks hold different chunks: the node that has most makes the others wait.

    Parameters
    ----------
    graph : OperatorGraph
        The network, folded, at the plan's precision and any batch.
    """
    ranks, ranks_per_node = _rank_checkpoints(plan, graph), min(plan.devices, devices_per_node)
    rank_of = np.arange(plan.devices) // max(plan.pipeline_stride, 1) % plan.pipeline
    nodes = [ranks[rank_of[first : first + ranks_per_node]] for first in range(0, plan.devices, ranks_per_node)]
    written, loaded = (max(float(node[:, way].sum()) / ranks_per_node for node in nodes) for way in range(2))
    return CheckpointBytes(written=written, loaded=loaded, most=float(ranks[:, 0].max()))


def _rank_checkpoints(plan: Plan, graph: OperatorGraph) -> FloatArray:
    """(ranks, 2) bytes that each pipeline rank writes and loads; what several hold is written by one, by turns."""
    found = representatives(plan, graph)
    source = found.source
    parameters = [[i for i in unit.nodes if source.graph.nodes[i].role is Role.PARAMETER] for unit in found.chain.units]
    users = Counter(index for unit in parameters for index in unit)
    holders: dict[tuple[int, int], list[int]] = {}
    schedule = plan_schedule(plan)
    for rank, chunk in zip(schedule.stage_rank.tolist(), chunk_units(plan, found.names, schedule), strict=True):
        for place in chunk:
            for index in parameters[found.of_unit[place]]:
                # Layers that are alike have parameters of their own; one that several units read is the same in all.
                key = (index, -1 if users[index] > 1 else place)
                ranks = holders.setdefault(key, [])
                if rank not in ranks:
                    ranks.append(rank)
    total = np.zeros((plan.pipeline, 2))
    for (index, _), ranks in holders.items():
        spec = source.graph.nodes[index].outputs[0]
        written, loaded = _stored_bytes(spec, source.stored[index], source.sizes, source.options.optimizer)
        total[ranks] += (written / len(ranks), loaded)
    return total


def _stored_bytes(
    spec: TensorSpec, placements: Placements, sizes: Sequence[int], update: Optimizer
) -> tuple[float, float]:
    """Bytes that a rank writes and loads of a parameter and its states."""
    held = local_share(placements, tuple(sizes)) * spec.elements
    held *= DTYPE_BYTES[spec.dtype] + state_bytes(update, spec.dtype)
    return held / math.prod(size for size, place in zip(sizes, placements, strict=True) if place == REPLICATE), held


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
    size: CheckpointBytes,
    devices: int,
    hardware: Hardware,
    reliability: Reliability,
    *,
    step_time_s: float,
    interval_s: float | None = None,
    asynchronous: bool = False,
    days: float = 30.0,
    seed: int = 0,
) -> PlanGoodput:
    """Goodput of a plan that checkpoints every `interval_s` (Daly's optimum by default), in whole steps.

    `size` is what its ranks write, from `checkpoint_bytes`.
    """
    cost = checkpoint_cost(
        written_bytes_per_rank=size.written,
        copied_bytes_per_rank=size.most,
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
    if not cost.blocking_s + cost.background_s + cost.load_s <= FOR_EVER_S:
        raise InputError(
            f"a checkpoint of {size.most:.3g} bytes a rank takes for ever at "
            f"{reliability.storage_bandwidth_bytes_per_s:.3g} bytes/s; correct --storage-bandwidth or "
            "--snapshot-bandwidth"
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
