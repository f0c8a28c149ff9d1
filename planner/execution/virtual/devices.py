"""Virtual devices: computation sleeps for its predicted time, order and messages between processes are real.

A message is a real collective of the plan's kind in the plan's group, which carries no more than the moment at which
each rank came to it; it is over its predicted time after the last of them. So a step shows whether the order of a plan
works, what overlaps, and how far one slow rank or link holds back the others, for more ranks than there are cores.
All processes must be on one machine, whose clock they share.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from planner.execution.virtual.script import (
    Begin,
    Deed,
    End,
    Post,
    Work,
    messages,
    one_stage_script,
    pipeline_scripts,
)
from planner.goodput import slow_cluster, straggle
from planner.instructions import LoweredPlan, LoweredStages
from planner.lowering.checked import checked_graph
from planner.lowering.pipeline import lower_pipeline
from planner.prediction import predict_plan
from planner.software import machine_of
from planner.strategy.loading import lower_to_run
from planner.strategy.plan import Plan
from simulator.calibration.launch import run_workers
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.program import Collective
from simulator.stragglers import compute_factors

DISTURBANCE = 0.005
"""Time is stretched until messages that take longer in reality than predicted make up at most this part of a step."""
LONGEST_S = 10.0
"""Longest step, stretched."""
TRIALS = 7
TIMEOUT = timedelta(seconds=300)


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
    stretch : seconds that passed for one of the devices
    message_s : seconds that a message among all processes really takes, about
    messages : of the rank that has most
    """

    processes: int
    steps: int
    undisturbed_step_time_s: float
    predicted_step_time_s: float
    measured_step_time_s: float
    step_times_s: tuple[float, ...]
    error: float
    slow_ranks: Mapping[int, float]
    slow_links: Mapping[str, float]
    stretch: float
    message_s: float
    messages: int


@dataclass(frozen=True, kw_only=True, eq=False)
class _Job:
    """What every rank is told: scripts by pipeline rank, groups by axis, and who is slow."""

    scripts: Sequence[Sequence[Deed]]
    groups: Sequence[Sequence[Sequence[int]]]
    pipeline_stride: int
    factors: Sequence[float]
    link_ranks: frozenset[int] | None
    """Ranks with a slow link; None where every group has one."""
    slow: bool
    steps: int
    step_s: float
    stretch: float | None


def run_virtual(plan: Plan, options: VirtualOptions) -> VirtualReport:
    """Run a plan on as many sleeping processes as it has devices, and hold the step against the simulator's.

    Raises
    ------
    InputError
        An option is wrong.
    ExecutionError
        A rank failed.
    """
    if options.steps < 1 or (options.stretch is not None and not options.stretch > 0):
        raise InputError(f"{options.steps} steps stretched {options.stretch} times: both must be positive")
    # Devices that sleep lose nothing to messages beside them.
    hardware = replace(machine_of(plan), overlap_compute_speed=1.0)
    links = dict(options.slow_links or {})
    slow = slow_cluster(hardware, links)
    lowered = lower_to_run(plan, plan.network)
    graph = checked_graph(plan)
    calm = predict_plan(plan, graph, hardware).step_time_s
    given = {"slow_ranks": options.slow_ranks, "slowdown": options.slowdown, "slow_links": links, "seed": options.seed}
    if isinstance(lowered, LoweredPlan):
        predicted = straggle(lowered, hardware, **given)  # type: ignore[arg-type]
        scripts = [one_stage_script(plan, lowered, hardware, slow)]
    else:
        from planner.pipeline_stragglers import straggle_pipeline

        def lower(cluster: Hardware) -> object:
            return lower_pipeline(plan, graph, cluster)

        predicted = straggle_pipeline(plan, hardware, lower, **given)  # type: ignore[arg-type]
        timed, slow_timed = (lower_pipeline(plan, graph, one) for one in (hardware, slow))
        scripts = pipeline_scripts(plan, lowered, timed, slow_timed, hardware, slow)
    spread = hardware.reliability.compute_spread
    factors = compute_factors(
        plan.devices, seed=options.seed, slow_ranks=options.slow_ranks, slowdown=options.slowdown, spread=spread
    )
    job = _Job(
        scripts=scripts,
        groups=_groups(lowered),
        pipeline_stride=0 if isinstance(lowered, LoweredPlan) else lowered.pipeline_stride,
        factors=factors.tolist(),
        link_ranks=frozenset(predicted.link_ranks.values()) if predicted.link_ranks else None,
        slow=bool(links),
        steps=options.steps,
        step_s=predicted.step_time_s,
        stretch=options.stretch,
    )
    results = run_workers(_run_rank, (job,), plan.devices)
    times = np.max([result[0] for result in results], axis=0)
    measured = float(np.median(times))
    return VirtualReport(
        processes=plan.devices,
        steps=options.steps,
        undisturbed_step_time_s=calm,
        predicted_step_time_s=predicted.step_time_s,
        measured_step_time_s=measured,
        step_times_s=tuple(times.tolist()),
        error=predicted.step_time_s / measured - 1,
        slow_ranks=dict(predicted.slow_ranks),
        slow_links=dict(predicted.slow_links),
        stretch=results[0][1],
        message_s=results[0][2],
        messages=max(sum(1 for _ in messages(script)) for script in scripts),
    )


def _groups(lowered: LoweredPlan | LoweredStages) -> list[list[list[int]]]:
    """Ranks of every group of each mesh axis, then of each set of stages that hold a parameter together."""
    mesh = lowered.mesh
    if isinstance(lowered, LoweredPlan):
        return [mesh.groups(axis) for axis in range(len(mesh.axes))]
    shifts = [stage * lowered.pipeline_stride for stage in range(lowered.schedule.ranks)]
    found = [
        [[rank + shift for rank in ranks] for shift in shifts for ranks in mesh.groups(axis)]
        for axis in range(len(mesh.axes))
    ]
    return [
        *found,
        *([[rank + shifts[m] for m in members] for rank in mesh.ranks()] for members in lowered.ranks[0].ties),
    ]


# One rank


def _run_rank(job: _Job) -> tuple[list[float], float, float]:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        rank = _Rank(job)
        message_s = rank.message_seconds()
        stretch = job.stretch or _stretch(job, message_s)
        times = []
        for _ in range(job.steps):
            dist.barrier()
            times.append(rank.step(stretch) / stretch)
        return times, stretch, message_s
    finally:
        dist.destroy_process_group()


def _stretch(job: _Job, message_s: float) -> float:
    """The smallest power of two at which messages hold a step up by little, within the longest step."""
    seconds = [np.array(list(messages(script))) for script in job.scripts]
    stretch = 1.0
    while stretch * job.step_s * 2 <= LONGEST_S:
        late = max(float(np.clip(message_s - stretch * row, 0, None).sum()) for row in seconds)
        if late + message_s <= DISTURBANCE * stretch * job.step_s:
            break
        stretch *= 2
    return stretch


class _Rank:
    """A virtual device: until when its streams are busy, in seconds of the machine's clock."""

    def __init__(self, job: _Job) -> None:
        self.rank = dist.get_rank()
        place = self.rank // job.pipeline_stride % len(job.scripts) if job.pipeline_stride else 0
        self.base = self.rank - place * job.pipeline_stride
        self.stride = job.pipeline_stride
        self.script = job.scripts[place]
        self.factor = job.factors[self.rank]
        self.job = job
        self.members: list[list[int]] = []
        self.groups: list[dist.ProcessGroup | None] = []
        for axis in job.groups:
            mine, members = None, list[int]()
            for ranks in axis:
                group = dist.new_group(list(ranks), timeout=TIMEOUT)
                if self.rank in ranks:
                    mine, members = group, list(ranks)
            self.groups.append(mine)
            self.members.append(members)

    def message_seconds(self) -> float:
        """What a message among all processes takes, the median of some, agreed on by all."""
        found = []
        for _ in range(TRIALS):
            begun = time.monotonic()
            dist.all_reduce(torch.zeros(1, dtype=torch.float64))
            found.append(time.monotonic() - begun)
        agreed = torch.tensor([float(np.median(found))], dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return float(agreed)

    def step(self, stretch: float) -> float:
        """Run one step; returns the seconds it took."""
        begun = time.monotonic()
        busy = begun
        links: dict[int, float] = {}
        under_way: dict[int, tuple[Begin, dist.Work | None, torch.Tensor]] = {}
        posted: list[tuple[dist.Work | None, torch.Tensor]] = []
        for deed in self.script:
            if isinstance(deed, Work):
                busy += deed.seconds * self.factor * stretch
            elif isinstance(deed, Begin):
                busy = _sleep_until(busy)
                under_way[deed.number] = (deed, *self._send(deed, busy))
            elif isinstance(deed, End):
                begin, work, stamps = under_way.pop(deed.number)
                if work is not None:
                    work.wait()
                last = max(float(stamps.max()), links.get(begin.axis, 0.0))
                over = last + self._seconds(begin, self.members[begin.axis]) * stretch
                links[begin.axis] = over
                busy = _sleep_until(max(busy, over))
            elif isinstance(deed, Post):
                busy = _sleep_until(busy)
                there = self.base + deed.rank * self.stride
                over = busy + self._seconds(deed, [self.rank, there]) * stretch
                if deed.blocking:
                    busy = _sleep_until(over)
                stamp = torch.tensor([over], dtype=torch.float64)
                posted.append((dist.isend(stamp, there, tag=deed.tag), stamp))
            else:
                busy = _sleep_until(busy)
                stamp = torch.zeros(1, dtype=torch.float64)
                dist.recv(stamp, self.base + deed.rank * self.stride, tag=deed.tag)
                busy = _sleep_until(max(busy, float(stamp)))
        took = _sleep_until(busy) - begun
        for work, _ in posted:
            if work is not None:
                work.wait()
        return took

    def _seconds(self, deed: Begin | Post, members: Sequence[int]) -> float:
        ranks = self.job.link_ranks
        slow = self.job.slow and (ranks is None or any(rank in ranks for rank in members))
        return deed.slow_seconds if slow else deed.seconds

    def _send(self, deed: Begin, now: float) -> tuple[dist.Work | None, torch.Tensor]:
        """Start the collective; of what comes back the largest number is when the last rank sent its part."""
        group, size = self.groups[deed.axis], len(self.members[deed.axis])
        mine = torch.full((1,), now, dtype=torch.float64)
        if deed.collective is Collective.ALL_GATHER:
            received = torch.empty(size, dtype=torch.float64)
            return dist.all_gather_into_tensor(received, mine, group=group, async_op=True), received
        if deed.collective is Collective.ALL_TO_ALL:
            received = torch.empty(size, dtype=torch.float64)
            return dist.all_to_all_single(received, mine.repeat(size), group=group, async_op=True), received
        if deed.collective is Collective.REDUCE_SCATTER:
            work = dist.reduce_scatter_tensor(mine, mine.repeat(size), op=dist.ReduceOp.MAX, group=group, async_op=True)
            return work, mine
        return dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group, async_op=True), mine


def _sleep_until(moment: float) -> float:
    """Sleep until a moment of the machine's clock; returns it, or now where it has passed."""
    now = time.monotonic()
    if moment > now:
        time.sleep(moment - now)
        return moment
    return now
