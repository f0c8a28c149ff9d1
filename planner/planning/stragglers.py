"""The step of a plan with slow ranks and slow links.

Data-parallel replicas of a pipeline meet only where gradients are summed, and what they do until then does not wait
for the sums. In such a step every moment is a maximum of sums of durations (max-plus linear), so the step of all
replicas together is that of the slowest one alone, simulated with the messages that they share. Where replicas meet in
every pass (parameters gathered unit by unit, batch norms over the whole batch) they step together: each pipeline rank
is then as slow as the slowest device of its stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.lowering.pipeline import LoweredPipeline
from planner.planning.prediction import step_overhead_s
from planner.plans.plan import Plan
from simulator.hardware import Hardware
from simulator.pipeline_operators import PLAIN, STREAMS, OperatorCosts, Operators, in_one_stream
from simulator.pipeline_passes import simulate_operators
from simulator.reliability import compute_factors, slow_level, slow_stages
from simulator.schedules import ActionKind
from simulator.task_table import FloatArray, IntArray

Levels = frozenset[str]
Lower = Callable[[Hardware], LoweredPipeline]
"""Lowers the plan for a cluster."""

DATA = "data"
LOSS_BYTES = 8
"""The sum of the loss over replicas is one number at most so large, and nothing waits for it."""
MOST_REPLICAS = 64
"""Replicas that are simulated: those with the slowest ranks. Only as many differ as there are slow ranks, unless every
rank has a speed of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StraggledStep:
    """A step with slow ranks and links.

    ``slow_ranks`` are those drawn, by their factors; ``slow_links`` the shares of bandwidth that are left by level,
    ``link_ranks`` whose link it is.
    """

    step_time_s: float
    slow_ranks: Mapping[int, float]
    slow_links: Mapping[str, float]
    largest_factor: float
    link_ranks: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Places:
    """Pipeline rank and replica of each device, (devices,); replicas that step together count as one."""

    rank: IntArray
    replica: IntArray
    replicas: int


def places(plan: Plan, lowered: LoweredPipeline) -> Places:
    """Where the devices of a plan stand."""
    device = np.arange(plan.devices)
    rank = device // max(plan.pipeline_stride, 1) % plan.pipeline
    number = next((i for i, axis in enumerate(plan.mesh.axes) if axis.name == DATA), None)
    if number is None or steps_together(lowered):
        return Places(rank=rank, replica=np.zeros_like(device), replicas=1)
    size = plan.mesh.axes[number].size
    return Places(rank=rank, replica=device // plan.mesh.stride(number) % size, replicas=size)


def steps_together(lowered: LoweredPipeline) -> bool:
    """Whether data-parallel replicas meet in every forward pass, so that none runs ahead of another."""
    work = lowered.work
    tasks = (work.tasks[number] for passes in work.passes for number in passes[ActionKind.FORWARD, PLAIN].numbers)
    return any(
        task.collective is not None and task.axis.startswith(DATA) and task.payload_bytes > LOSS_BYTES for task in tasks
    )


def straggle(
    plan: Plan,
    hardware: Hardware,
    lower: Lower,
    *,
    slow_ranks: int,
    slowdown: float,
    slow_links: Mapping[str, float],
    seed: int,
) -> StraggledStep:
    """Simulate the step with `slow_ranks` devices drawn at random and one slow link, of a device drawn, in each level.

    Parameters
    ----------
    lower : callable
        Lowers the plan for hardware that is the same or slower.
    slow_links : mapping of str to float
        Share of the bandwidth that is left, by level.
    """
    factors = compute_factors(
        plan.devices, seed=seed, slow_ranks=slow_ranks, slowdown=slowdown, spread=hardware.reliability.compute_spread
    )
    device_of = {
        level: int(np.random.default_rng([seed, number]).integers(plan.devices))
        for number, level in enumerate(sorted(slow_links))
    }
    step = slow_step_s(plan, hardware, lower, factors, slow_links, device_of)
    return StraggledStep(
        step_time_s=step + step_overhead_s(plan, hardware, step),
        slow_ranks=slowest_devices(factors, slow_ranks),
        slow_links=dict(slow_links),
        link_ranks=device_of,
        largest_factor=float(factors.max()),
    )


def slow_cluster(hardware: Hardware, shares: Mapping[str, float]) -> Hardware:
    """The cluster with a slow link in each level named."""
    for level, share in shares.items():
        hardware = slow_level(hardware, level, share)
    return hardware


def slowest_devices(factors: FloatArray, count: int) -> dict[int, float]:
    """The given number of ranks that compute longest, with their factors."""
    chosen = np.argsort(-factors, kind="stable")[:count]
    return {int(rank): float(factors[rank]) for rank in np.sort(chosen)}


def slow_step_s(
    plan: Plan,
    hardware: Hardware,
    lower: Lower,
    factors: FloatArray,
    slow_links: Mapping[str, float],
    device_of: Mapping[str, int],
) -> float:
    """Seconds of the step where the kernels of device d take ``factors[d]`` times as long.

    Parameters
    ----------
    factors : array, shape (devices,)
    slow_links, device_of : mappings by level
        Share of the bandwidth that is left to the link of a device, and which device that is.
    """
    cluster = _Cluster(hardware, lower, slow_links)
    where = places(plan, cluster.lowered(frozenset()))
    speeds = np.zeros((where.replicas, plan.pipeline))
    np.maximum.at(speeds, (where.replica, where.rank), factors)

    def at(rank: int, replica: int | None) -> Levels:
        """Levels with a slow link at a pipeline rank, of one replica or of any."""
        return frozenset(
            level
            for level, device in device_of.items()
            if where.rank[device] == rank and replica in (None, where.replica[device])
        )

    ranks = range(plan.pipeline)
    shared = [at(rank, None) for rank in ranks]
    updates = cluster.updates_s(speeds.max(axis=0))
    tried = _candidates(speeds, {int(where.replica[device]) for device in device_of.values()})
    return max(cluster.step_s(speeds[r], updates, [at(rank, r) for rank in ranks], shared) for r in tried)


def _candidates(speeds: FloatArray, always: set[int]) -> list[int]:
    """Replicas of which none is as slow as another in every rank, and those with slow links."""
    order = sorted(range(len(speeds)), key=lambda r: (-float(speeds[r].max()), -float(speeds[r].sum()), r))
    chosen: list[int] = []
    for replica in order:
        if len(chosen) < MOST_REPLICAS and not any((speeds[other] >= speeds[replica]).all() for other in chosen):
            chosen.append(replica)
    return sorted({*chosen, *always})


class _Cluster:
    """Passes of the plan where links of some levels are slow."""

    def __init__(self, hardware: Hardware, lower: Lower, shares: Mapping[str, float]) -> None:
        self.hardware, self.lower, self.shares = hardware, lower, shares
        self._lowered: dict[Levels, LoweredPipeline] = {}

    def lowered(self, levels: Levels) -> LoweredPipeline:
        """The plan where all links of `levels` are slow; every operator on the stream of its kind."""
        if levels not in self._lowered:
            slow = slow_cluster(self.hardware, {level: self.shares[level] for level in sorted(levels)})
            speed = self.hardware.overlap_compute_speed if self.hardware.overlaps_communication else 1.0
            apart = replace(slow, overlaps_communication=True, overlap_compute_speed=speed)
            self._lowered[levels] = self.lower(apart)
        return self._lowered[levels]

    def step_s(
        self, factors: FloatArray, updates_s: FloatArray, own: Sequence[Levels], shared: Sequence[Levels]
    ) -> float:
        """Seconds of a step.

        Parameters
        ----------
        factors, updates_s : arrays, shape (ranks,)
            How much longer the kernels of each pipeline rank take, and seconds of its update.
        own, shared : sequences of sets of levels
            Those that are slow in the messages of each rank's own replica, and in those of all replicas.
        """
        calm = self.lowered(frozenset())
        schedule = calm.schedule
        costs = slow_stages(schedule, self._passes(own, shared), factors)
        costs = replace(
            costs,
            send_s=self._sends(own),
            epilogue_s=updates_s,
            meetings=self._meetings(shared),
        )
        if not self.hardware.overlaps_communication:
            costs = in_one_stream(schedule, costs)
        return simulate_operators(schedule, costs).step_time_s

    def _passes(self, own: Sequence[Levels], shared: Sequence[Levels]) -> OperatorCosts:
        """Operators of each stage, with the messages of its rank's links."""
        calm = self.lowered(frozenset())
        stages = [int(rank) for rank in calm.schedule.stage_rank]
        made: dict[tuple[int, int], Operators] = {}

        def mixed(one: Operators, other: Operators) -> Operators:
            key = (id(one), id(other))
            if key not in made:
                beside = one.communication == STREAMS - 1
                made[key] = one if one is other else replace(one, seconds=np.where(beside, other.seconds, one.seconds))
            return made[key]

        def rows(kind: str) -> dict[ActionKind, list[Operators]]:
            given = {levels: getattr(self.lowered(levels).costs, kind) for levels in {*own, *shared}}
            return {
                action: [
                    mixed(given[own[rank]][action][stage], given[shared[rank]][action][stage])
                    for stage, rank in enumerate(stages)
                ]
                for action in getattr(calm.costs, kind)
            }

        return replace(calm.costs, passes=rows("passes"), first=rows("first"), last=rows("last"))

    def _sends(self, own: Sequence[Levels]) -> FloatArray:
        """A message between two ranks crosses the links of both."""
        calm = self.lowered(frozenset())
        rank_of = calm.schedule.stage_rank
        found = np.array(np.broadcast_to(np.asarray(calm.costs.send_s, dtype=np.float64), len(rank_of)))
        for stage in range(len(rank_of) - 1):
            levels = own[rank_of[stage]] | own[rank_of[stage + 1]]
            found[stage] = np.broadcast_to(np.asarray(self.lowered(levels).costs.send_s), len(rank_of))[stage]
        return found

    def _meetings(self, shared: Sequence[Levels]) -> list[tuple[tuple[int, ...], float]]:
        calm = self.lowered(frozenset()).costs.meetings
        levels = [frozenset[str]().union(*(shared[rank] for rank in ranks)) for ranks, _ in calm]
        return [self.lowered(found).costs.meetings[number] for number, found in enumerate(levels)]

    def updates_s(self, factors: FloatArray) -> FloatArray:
        """(ranks,) seconds of the update on each rank; copies to the host and messages are not slowed."""
        work = self.lowered(frozenset()).work
        return np.array(
            [
                sum(
                    times * float(work.seconds[number]) * (1.0 if work.tasks[number].axis else factor)
                    for number, times in rank
                )
                for rank, factor in zip(work.updates, factors.tolist(), strict=True)
            ]
        )
