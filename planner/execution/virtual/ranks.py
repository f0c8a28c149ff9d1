"""One virtual device: a process that sleeps in place of computing and meets the others in real messages."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist

from planner.execution.communication import Groups, make_groups
from planner.execution.virtual.script import BeginMessage, Computation, Deed, End, Post, messages
from simulator.program import Collective

DISTURBANCE = 0.005
"""Time is stretched until what really delays ranks makes up at most this part of a step."""
LONGEST_S = 30.0
"""Longest step, stretched."""
TIMEOUT = timedelta(seconds=300)
CONNECT_LATE = {"TORCH_GLOO_LAZY_INIT": "1"}
"""Gloo connects two ranks when they first speak to each other, not each with all others."""
SPARE = 2.0
"""Steps begin so many times as far ahead as it takes to agree on when."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VirtualJob:
    """What every rank is told: scripts by pipeline rank, groups by axis, and who is slow."""

    scripts: Sequence[Sequence[Deed]]
    groups: Sequence[Groups]
    pipeline_stride: int
    factors: Sequence[float]
    link_ranks: frozenset[int] | None
    """Ranks with a slow link; None where every group has one."""
    slow: bool
    steps: int
    step_s: float
    stretch: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredSteps:
    """What one rank measured, in seconds of the devices: its steps by the machine's clock and by its own."""

    seconds: tuple[float, ...]
    undelayed: tuple[float, ...]
    stretch: float
    message_s: float


def run_rank(job: VirtualJob) -> MeasuredSteps:
    """Run a job's steps as one of its ranks."""
    os.environ.update(CONNECT_LATE)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        rank = _VirtualRank(job)
        message_s = rank.message_seconds()
        stretch = job.stretch or first_stretch(job, message_s)
        while job.stretch is None and 2 * stretch * job.step_s <= LONGEST_S and rank.is_delayed(stretch):
            stretch *= 2
        found = rank.steps(stretch, job.steps)
        dist.barrier()
        seconds, undelayed = (tuple(one / stretch for one in row) for row in zip(*found, strict=True))
        return MeasuredSteps(seconds=seconds, undelayed=undelayed, stretch=stretch, message_s=message_s)
    finally:
        dist.destroy_process_group()


def first_stretch(job: VirtualJob, message_s: float) -> float:
    """The smallest power of two at which messages should hold a step up by little, within the longest step."""
    seconds = [np.array(list(messages(script))) for script in job.scripts]
    stretch = 1.0
    while stretch * job.step_s * 2 <= LONGEST_S:
        late = max(float(np.clip(message_s - stretch * row, 0, None).sum()) for row in seconds)
        if late + message_s <= DISTURBANCE * stretch * job.step_s:
            break
        stretch *= 2
    return stretch


@dataclass(frozen=True, slots=True)
class _EndTime:
    """When something is over: by the machine's clock, and by one that stands still while the machine is late."""

    real: float
    own: float

    def later(self, seconds: float) -> _EndTime:
        return _EndTime(self.real + seconds, self.own + seconds)

    def reached(self) -> _EndTime:
        """Sleep until it; where that has passed it is now."""
        return _EndTime(_sleep_until(self.real), self.own)

    def stamp(self, times: int = 1) -> torch.Tensor:
        return torch.tensor([self.real, self.own] * times, dtype=torch.float64)


NEVER = _EndTime(0.0, 0.0)


def _last(stamps: torch.Tensor) -> _EndTime:
    real, own = stamps.view(-1, 2).amax(0).tolist()
    return _EndTime(real, own)


def _latest(one: _EndTime, other: _EndTime) -> _EndTime:
    return _EndTime(max(one.real, other.real), max(one.own, other.own))


class _VirtualRank:
    """A virtual device: until when its streams are busy."""

    def __init__(self, job: VirtualJob) -> None:
        self.rank = dist.get_rank()
        place = self.rank // job.pipeline_stride % len(job.scripts) if job.pipeline_stride else 0
        self.base = self.rank - place * job.pipeline_stride
        self.stride = job.pipeline_stride
        self.script = job.scripts[place]
        self.factor = job.factors[self.rank]
        self.job = job
        self.members = [next((ranks for ranks in row if self.rank in ranks), ()) for row in job.groups]
        self.groups = make_groups(job.groups, TIMEOUT)
        self.ahead_s = 0.0

    def message_seconds(self) -> float:
        """What a message of the step really takes, while all ranks send theirs; agreed on by all.

        The first step connects the ranks.
        """
        self.steps(0.0, 1)
        begun = time.monotonic()
        self._agreed(begun)
        self.ahead_s = SPARE * self._agreed(time.monotonic() - begun)
        sent = max(sum(1 for _ in messages(script)) for script in self.job.scripts)
        return self._agreed(self.steps(0.0, 1)[0][0]) / max(1, sent)

    def is_delayed(self, stretch: float) -> bool:
        """Whether the machine delays a step more than it may."""
        real, own = map(self._agreed, self.steps(stretch, 1)[0])
        return real > (1 + DISTURBANCE) * own

    def steps(self, stretch: float, count: int) -> list[tuple[float, float]]:
        """Run steps that follow one another; returns the seconds each took by the machine's clock and the rank's own.

        All ranks begin the first one together, and each goes on with the next where it has ended the one before.
        """
        begun = self._agreed(time.monotonic() + self.ahead_s)
        moments = [_EndTime(begun, begun)]
        for _ in range(count):
            moments.append(self._step(stretch, moments[-1]))
        return [(after.real - before.real, after.own - before.own) for before, after in pairwise(moments)]

    def _step(self, stretch: float, busy: _EndTime) -> _EndTime:
        """Run one step of a rank that is busy until then; returns until when it is after it."""
        links: dict[int, _EndTime] = {}
        under_way: dict[int, tuple[BeginMessage, dist.Work | None, torch.Tensor]] = {}
        posted: list[tuple[dist.Work | None, torch.Tensor]] = []
        for deed in self.script:
            if isinstance(deed, Computation):
                busy = busy.later(deed.seconds * self.factor * stretch)
                continue
            if isinstance(deed, End):
                begin, work, stamps = under_way.pop(deed.number)
                if work is not None:
                    work.wait()
                last = _latest(_last(stamps), links.get(begin.axis, NEVER))
                over = last.later(self._seconds(begin, self.members[begin.axis]) * stretch)
                links[begin.axis] = over
                busy = _latest(busy, over).reached()
                continue
            busy = busy.reached()
            if isinstance(deed, BeginMessage):
                under_way[deed.number] = (deed, *self._send(deed, busy))
            elif isinstance(deed, Post):
                there = self.base + deed.rank * self.stride
                over = busy.later(self._seconds(deed, [self.rank, there]) * stretch)
                if deed.blocking:
                    busy = over.reached()
                stamp = over.stamp()
                posted.append((dist.isend(stamp, there, tag=deed.tag), stamp))
            else:
                stamp = torch.zeros(2, dtype=torch.float64)
                dist.recv(stamp, self.base + deed.rank * self.stride, tag=deed.tag)
                busy = _latest(busy, _last(stamp)).reached()
        busy = busy.reached()
        for work, _ in posted:
            if work is not None:
                work.wait()
        return busy

    def _agreed(self, value: float) -> float:
        """The largest of all ranks' values."""
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)

    def _seconds(self, deed: BeginMessage | Post, members: Sequence[int]) -> float:
        ranks = self.job.link_ranks
        slow = self.job.slow and (ranks is None or any(rank in ranks for rank in members))
        return deed.slow_seconds if slow else deed.seconds

    def _send(self, deed: BeginMessage, now: _EndTime) -> tuple[dist.Work | None, torch.Tensor]:
        """Start the collective; moments at which ranks sent their parts come back, the last among them."""
        group, size = self.groups[deed.axis], len(self.members[deed.axis])
        mine = now.stamp()
        if deed.collective is Collective.ALL_GATHER:
            received = torch.empty(2 * size, dtype=torch.float64)
            return dist.all_gather_into_tensor(received, mine, group=group, async_op=True), received
        if deed.collective is Collective.ALL_TO_ALL:
            received = torch.empty(2 * size, dtype=torch.float64)
            return dist.all_to_all_single(received, now.stamp(size), group=group, async_op=True), received
        if deed.collective is Collective.REDUCE_SCATTER:
            sent, largest = now.stamp(size), dist.ReduceOp.MAX
            return dist.reduce_scatter_tensor(mine, sent, op=largest, group=group, async_op=True), mine
        return dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=group, async_op=True), mine


def _sleep_until(moment: float) -> float:
    """Sleep until a moment of the machine's clock; returns it, or now where it has passed."""
    now = time.monotonic()
    if moment > now:
        time.sleep(moment - now)
        return moment
    return now
