"""Virtual devices: the order and the messages of a plan, with sleep in place of computation."""

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from planner.execution.measuring.recorded import timed_instructions
from planner.execution.virtual import ranks
from planner.execution.virtual.devices import VirtualOptions, run_virtual
from planner.execution.virtual.ranks import VirtualJob, first_stretch
from planner.execution.virtual.script import BeginMessage, Computation, End, Post, Receive, rank_scripts
from planner.lowering.checked import checked_graph
from planner.lowering.pipeline import lower_pipeline
from planner.planning.loading import lower_to_run
from planner.planning.planning import PlanRequest, plan_network
from planner.plans.pins import Pins
from simulator.errors import InfeasibleError, InputError
from simulator.profiles import load_profile
from simulator.reliability import slow_level
from simulator.schedules import make_schedule
from tests.oracles.passes import PipelineCosts, simulate_pipeline

HARDWARE = "dgx-a100"


def make_plan(devices, batch=16, network="zoo:mlp", **pins):
    request = PlanRequest(
        network=network,
        hardware=HARDWARE,
        devices=devices,
        global_batch=batch,
        pins=Pins.read(pins),
        top=1,
    )
    return plan_network(request).candidates[0].plan


def test_a_script_holds_all_work_and_all_messages():
    plan = make_plan(4, dp=2, tp=2, micro_batch=4)
    lowered = lower_to_run(plan, "unused")
    hardware = load_profile(HARDWARE)
    slow = slow_level(hardware, hardware.levels[0].name, 0.5)
    graph = checked_graph(plan)
    timed, slow_timed = (lower_pipeline(plan, graph, one) for one in (hardware, slow))
    (deeds,) = rank_scripts(plan, lowered, timed, slow_timed, hardware, slow)
    begun = [deed for deed in deeds if isinstance(deed, BeginMessage)]
    messages = sum(task.collective is not None and times for _, task, times in timed_instructions(lowered, 0))
    assert len(begun) == messages
    assert sorted(deed.number for deed in begun) == sorted(deed.number for deed in deeds if isinstance(deed, End))
    assert all(deed.slow_seconds >= deed.seconds for deed in begun)
    assert any(deed.slow_seconds > deed.seconds for deed in begun)
    open_now = set()
    for deed in deeds:
        if isinstance(deed, BeginMessage):
            open_now.add(deed.number)
        elif isinstance(deed, End):
            open_now.remove(deed.number)
    assert not open_now


def test_what_one_stage_sends_another_fetches():
    plan = make_plan(2, pp=2, micro_batch=4, schedule="1f1b")
    hardware = load_profile(HARDWARE)
    lowered, timed = lower_to_run(plan, "unused"), lower_pipeline(plan, checked_graph(plan), hardware)
    scripts = rank_scripts(plan, lowered, timed, timed, hardware, hardware)
    posts = {(rank, deed.rank, deed.tag) for rank, s in enumerate(scripts) for deed in s if isinstance(deed, Post)}
    fetches = {(deed.rank, rank, deed.tag) for rank, s in enumerate(scripts) for deed in s if isinstance(deed, Receive)}
    assert posts == fetches
    assert len(posts) == 2 * plan.micro_batches


def test_time_is_stretched_until_messages_do_not_show():
    def job(seconds, step_s):
        script = [
            Computation(seconds=step_s - seconds),
            BeginMessage(number=0, axis=0, collective=None, seconds=seconds, slow_seconds=seconds),
        ]
        return VirtualJob(scripts=[script], groups=[], pipeline_stride=0, factors=[1.0], link_ranks=None, slow=False,
                    steps=1, step_s=step_s, stretch=None)  # fmt: skip

    assert first_stretch(job(1e-6, 1.0), message_s=1e-6) == 1.0
    stretch = first_stretch(job(1e-5, 1e-3), message_s=1e-3)
    assert np.log2(stretch) == int(np.log2(stretch))
    assert stretch > 64
    assert first_stretch(job(1e-5, 12.0), message_s=10.0) == 2.0, "no step is stretched beyond the longest"


def test_options_are_checked():
    with pytest.raises(InputError, match="must be positive"):
        run_virtual(make_plan(2, dp=2), VirtualOptions(steps=0))


def test_ranks_that_do_not_fit_into_memory_are_not_started(monkeypatch):
    monkeypatch.setattr("planner.execution.virtual.devices.free_memory", lambda *_: 10**6)
    monkeypatch.setattr("planner.execution.virtual.devices.run_workers", lambda *_: pytest.fail("workers were started"))
    with pytest.raises(InfeasibleError, match=r"2 virtual devices take about .* GB, but there are 0.001 GB free"):
        run_virtual(make_plan(2, dp=2), VirtualOptions())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "devices", "pins"),
    [
        ("zoo:mlp", 2, {"dp": 2, "tp": 1, "micro_batch": 4}),
        ("zoo:gpt2-tiny", 16, {"pp": 4, "tp": 4, "micro_batch": 2, "schedule": "1f1b"}),
    ],
)
def test_sleeping_ranks_take_as_long_as_is_simulated(network, devices, pins):
    """By their own clocks, whatever else runs on this machine; sleep never ends early."""
    slow = {"slow_ranks": 1, "slowdown": 2.0, "slow_links": {"NVSwitch": 0.5}}
    plan = make_plan(devices, max(16, 2 * devices), network, **pins)
    report = run_virtual(plan, VirtualOptions(steps=1, stretch=1.0, **slow))
    assert report.processes == devices
    assert report.predicted_step_time_s > 1.1 * report.undisturbed_step_time_s
    assert report.undelayed_error == pytest.approx(0, abs=0.02)
    assert report.measured_step_time_s >= 0.999 * report.undelayed_step_time_s
    assert len(report.step_times_s) == 1
    assert list(report.slow_ranks.values()) == [2.0]


class Mailbox:
    """`torch.distributed` between threads, each of which is a rank: sends and receives alone."""

    def __init__(self):
        self.mine, self.sent = threading.local(), defaultdict(queue.Queue)

    def get_rank(self):
        return self.mine.rank

    def isend(self, stamp, there, tag):
        self.sent[self.mine.rank, there, tag].put(stamp)

    def recv(self, stamp, origin, tag):
        stamp.copy_(self.sent[origin, self.mine.rank, tag].get(timeout=60))


def test_steps_of_ranks_that_end_one_after_the_other_follow_at_the_period(monkeypatch):
    """The first step begins on all ranks together and takes its length; the next follow before the last rank ends."""
    schedule, second = make_schedule("zb_h2", 2, 4), 0.002

    def deeds(rank):
        for i in range(*schedule.offsets[rank : rank + 2].tolist()):
            tag, other = int(2 * schedule.micro_batch[i] + (schedule.kind[i] > 0)), 1 - rank
            if schedule.previous[i] >= 0:
                yield Receive(rank=other, tag=tag)
            yield Computation(seconds=second)
            if i in schedule.previous:
                yield Post(rank=other, tag=tag, seconds=0.0, slow_seconds=0.0, blocking=False)

    job = VirtualJob(
        scripts=[list(deeds(rank)) for rank in range(2)], groups=[], pipeline_stride=1, factors=[1.0, 1.0],
        link_ranks=None, slow=False, steps=3, step_s=12 * second, stretch=1.0,
    )  # fmt: skip
    box, begun = Mailbox(), time.monotonic()
    monkeypatch.setattr(ranks, "dist", box)
    monkeypatch.setattr(ranks._VirtualRank, "_agreed", lambda *_: begun)

    def run(rank):
        box.mine.rank = rank
        return [own for _, own in ranks._VirtualRank(job).steps(1.0, job.steps)]

    with ThreadPoolExecutor(2) as threads:
        steps = np.max(list(threads.map(run, range(2))), axis=0)
    found = simulate_pipeline(schedule, PipelineCosts(forward_s=second, backward_s=2 * second))
    assert (found.length_s, found.step_time_s) == pytest.approx((13 * second, 12 * second))
    np.testing.assert_allclose(steps, [found.length_s, found.step_time_s, found.step_time_s], rtol=1e-6)
