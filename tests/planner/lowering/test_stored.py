"""One stage that computes again, or shards gradients and parameters: what is sent, when, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.chain import chain
from planner.graph.recompute import recomputed
from planner.lowering.instructions import Communicate, Compute, LoweredStages
from planner.lowering.loaded import REPLICAS
from planner.lowering.pipeline import LoweredPipeline, lower_pipeline
from planner.planning.prediction import Prediction, predict_plan
from planner.plans.plan import Plan, RecomputeRange
from simulator.corrections import kernel_factor
from simulator.errors import InputError
from simulator.hardware import Hardware, Reliability
from simulator.profiles import load_profile
from simulator.program import DISK, HOST, BufferKind, Collective, Kernel, Phase, Task
from tests.planner.execution.made import make_plan
from tests.planner.execution.small import place
from tests.planner.lowering.plans import one_stage, recomputing
from tests.planner.lowering.steps import Rank, lowered_of, steps
from tests.planner.search.problems import captured

HARDWARE = load_profile("dgx-a100")
LAYERS = 4
GRAPH = captured("gpt2-tiny", LAYERS)
NAMES = chain(GRAPH).names()


def predicted(plan: Plan, hardware: Hardware = HARDWARE) -> Prediction:
    return predict_plan(plan, GRAPH, hardware)


def timed(plan: Plan, hardware: Hardware = HARDWARE) -> LoweredPipeline:
    return lower_pipeline(plan, GRAPH, hardware)


def resident(plan: Plan, kind: BufferKind) -> float:
    """Bytes of a kind that stand on the rank all the time."""
    (size,) = timed(plan).sizes.resident[kind]
    return float(size)


def sharded(**changes: Any) -> Plan:
    """A plan on 4 data-parallel ranks that store shards; messages are not fused."""
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 4),), storage="sharded", micro_batches=3)
    return replace(plan, bucket_bytes=0, **changes)


def counted(lowered: LoweredStages, collective: Collective) -> Counter[str]:
    """How often each value is sent by a collective in a step."""
    sent = (i for _, i in steps(lowered) if isinstance(i, Communicate) and i.collective is collective)
    return Counter(source for message in sent for source in message.sources)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_every_value_is_there_when_it_is_read(data: st.DataObject) -> None:
    axes = data.draw(st.sampled_from([(("data", 4),), (("data", 2), ("tensor", 2)), (("tensor", 2),)]))
    storage = "sharded" if axes[0][0] == "data" else "replicated"
    plan = one_stage("gpt2-tiny", LAYERS, axes, storage=storage, micro_batches=data.draw(st.integers(1, 3)))
    plan = replace(plan, bucket_bytes=data.draw(st.sampled_from([0, 2**18, 2**25])))
    if storage == "sharded":
        level = data.draw(st.sampled_from(["zero1", "zero2", "zero3"]))
        size = data.draw(st.sampled_from([0, 2]))
        plan = replace(plan, optimizer_sharding=level, shard_size=size if plan.degree("data") == 4 else 0)
    first = data.draw(st.integers(0, len(NAMES) - 1))
    last = data.draw(st.integers(first, len(NAMES) - 1))
    mode = data.draw(st.sampled_from(["none", "selective", "full"]))
    if mode != "none":
        ranges = (RecomputeRange(first=NAMES[first], last=NAMES[last], mode=mode),)
        plan = replace(plan, recompute=mode, recompute_ranges=ranges)
    Rank(lowered_of(plan, GRAPH)).step()


@pytest.mark.parametrize(("level", "gathers", "scatters"), [("zero1", 1, 1), ("zero2", 1, 3), ("zero3", 6, 3)])
def test_what_each_level_sends_in_three_micro_batches(level: str, gathers: int, scatters: int) -> None:
    lowered = lowered_of(sharded(optimizer_sharding=level), GRAPH)
    stored = [entry.value for entry in lowered.ranks[0].parameters if entry.placements[0] >= 0]
    inside = [value for value in stored if value.startswith("blocks.")]
    assert len(inside) > 8 * LAYERS
    sent = counted(lowered, Collective.ALL_GATHER)
    # A bias is not read on the way back.
    weights = [value for value in inside if value.endswith("weight") and "norm" not in value]
    assert {sent[value] for value in weights} == {gathers}
    scattered = sum(counted(lowered, Collective.REDUCE_SCATTER).values())
    assert scattered == scatters * len(stored)


def test_each_level_holds_less_and_parts_of_the_data_axis_hold_more() -> None:
    held = {level: predicted(sharded(optimizer_sharding=level)) for level in ("zero1", "zero2", "zero3")}
    peaks = [held[level].peak_memory_bytes for level in ("zero1", "zero2", "zero3")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    whole = 4 * GRAPH.parameter_count
    gathered = held["zero3"].memory_at_peak[BufferKind.GATHERED_PARAMETER]
    assert gathered < 0.6 * whole, "at most two units at once"
    mesh = lowered_of(sharded(shard_size=2), GRAPH).mesh
    assert [(axis.name, axis.size, mesh.stride(i)) for i, axis in enumerate(mesh.axes)] == [
        ("data_replica", 2, 2),
        ("data", 2, 1),
    ]
    states = [resident(plan, BufferKind.OPTIMIZER_STATE) for plan in (sharded(), sharded(shard_size=2))]
    assert states[1] == pytest.approx(2 * states[0], rel=0.01)


def test_offloaded_states_are_not_in_device_memory_and_pass_the_host_link() -> None:
    plain, offloaded = sharded(), sharded(offload_optimizer=True)
    assert resident(offloaded, BufferKind.OPTIMIZER_STATE) == 0 < resident(plain, BufferKind.OPTIMIZER_STATE)
    parameters = resident(plain, BufferKind.PARAMETER)
    more = [predicted(one).step_time_s for one in (plain, offloaded)]
    # A gradient there and a parameter back are a copy each.
    copies = 2 * len(lowered_of(offloaded, GRAPH).graph.parameters)
    seconds = copies * HARDWARE.kernels[Kernel.COPY].overhead_s
    seconds += 2 * parameters / HARDWARE.reliability.snapshot_bandwidth_bytes_per_s
    seconds += updating(offloaded, HARDWARE) - updating(plain, HARDWARE)
    # All gradients are there before any goes to the host, so the last messages hide behind no update.
    assert seconds * (1 - 1e-9) <= more[1] - more[0] < seconds + 1e-4


def updating(plan: Plan, hardware: Hardware) -> float:
    """Seconds of the updates of a step."""
    work = timed(plan, hardware).work
    ran = [(number, times) for number, times in work.updates[0] if work.tasks[number].kernel is Kernel.OPTIMIZER]
    return float(sum(times * work.seconds[number] for number, times in ran))


def test_the_host_updates_at_its_own_speed() -> None:
    plain, offloaded = sharded(), sharded(offload_optimizer=True)
    work = timed(plain).work
    updates = [work.tasks[n] for n, times in work.updates[0] for _ in range(times)]
    updates = [task for task in updates if task.kernel is Kernel.OPTIMIZER]
    moved = sum(task.bytes_moved for task in updates)
    # Software launches an update alike on both.
    overhead = kernel_factor(HARDWARE, Kernel.OPTIMIZER, "", 8) * HARDWARE.kernels[Kernel.OPTIMIZER].overhead_s
    share = HARDWARE.host_memory_bandwidth / HARDWARE.devices_per_node
    assert updating(offloaded, HARDWARE) == pytest.approx(len(updates) * overhead + moved / share, rel=1e-9)
    slower = replace(HARDWARE, host_memory_bandwidth=HARDWARE.host_memory_bandwidth / 2)
    assert updating(offloaded, slower) - updating(offloaded, HARDWARE) == pytest.approx(moved / share, rel=1e-9)
    assert updating(plain, slower) == updating(plain, HARDWARE)
    # What no profile says a way to is the device itself, as a CPU is its own host.
    alone = replace(HARDWARE, node=None, reliability=Reliability())
    assert updating(offloaded, alone) == pytest.approx(updating(plain, alone))


def test_states_on_disk_are_read_and_written_once_a_step() -> None:
    away = {"offload_optimizer": True}
    host, disk = sharded(**away), sharded(**away, offload_to="disk")
    states = resident(sharded(), BufferKind.OPTIMIZER_STATE)
    for kind in BufferKind:
        assert timed(disk).sizes.resident.get(kind, 0) == timed(host).sizes.resident.get(kind, 0)
    steps = [predicted(one).step_time_s for one in (host, disk)]
    seconds = 2 * states * HARDWARE.devices_per_node / HARDWARE.disk_bandwidth
    assert steps[1] - steps[0] == pytest.approx(seconds, rel=0.01)
    faster = predicted(disk, replace(HARDWARE, disk_bandwidth=2 * HARDWARE.disk_bandwidth))
    assert faster.step_time_s - steps[0] == pytest.approx(seconds / 2, rel=0.01)


def test_parameters_on_the_host_come_for_each_pass_of_a_unit() -> None:
    away = {"offload_optimizer": True}
    states, both = (sharded(**away, offload_parameters=on_host) for on_host in (False, True))
    lowered = lowered_of(both, GRAPH)
    assert set(lowered.host_parameters) == {parameter.value for parameter in lowered.ranks[0].parameters}
    parameters = resident(states, BufferKind.PARAMETER)
    assert resident(both, BufferKind.PARAMETER) == 0 < parameters
    assert copied(states) == pytest.approx(2 * parameters)
    # Gradients go there once; parameters come for both passes of every micro-batch, the tied table to two units.
    came = copied(both) - parameters
    assert both.micro_batches * parameters < came < 2.1 * both.micro_batches * parameters
    # Instead of whole parameters for the step, those of one unit at once.
    peaks = [predicted(plan).peak_memory_bytes for plan in (states, both)]
    assert peaks[1] < peaks[0] - 0.4 * 4 * GRAPH.parameter_count
    assert (timed(both).sizes.recomputed > timed(states).sizes.recomputed).all()


def test_parameters_on_disk_are_read_for_each_pass_and_written_once_a_step() -> None:
    away = {"offload_optimizer": True, "offload_parameters": True}
    host, disk = sharded(**away), sharded(**away, offload_to="disk")
    lowered = lowered_of(disk, GRAPH)
    parameters = {entry.value for entry in lowered.ranks[0].parameters}
    assert set(lowered.disk_parameters) == set(lowered.host_parameters) == parameters
    assert not lowered_of(host, GRAPH).disk_parameters
    tasks = ran(disk)
    read = sum(task.bytes_moved for task in tasks if task.axis == DISK and task.phase is not Phase.UPDATE)
    came = sum(task.bytes_moved for task in tasks if task.axis == HOST and task.phase is not Phase.UPDATE)
    assert read == came > 0
    held = sum(resident(sharded(), kind) for kind in (BufferKind.OPTIMIZER_STATE, BufferKind.PARAMETER))
    seconds = (read + 2 * held) * HARDWARE.devices_per_node / HARDWARE.disk_bandwidth
    steps = [predicted(one).step_time_s for one in (host, disk)]
    # Some of it hides behind the launches of kernels.
    assert 0.9 * seconds < steps[1] - steps[0] <= seconds * (1 + 1e-9)


def ran(plan: Plan) -> list[Task]:
    """Tasks of a step, once for each time they run."""
    found = timed(plan)
    counts = found.work.counts(found.schedule).astype(int).tolist()
    return [task for task, count in zip(found.work.tasks, counts, strict=True) for _ in range(count)]


def copied(plan: Plan) -> float:
    """Bytes of a step between a device and its host."""
    return sum(task.bytes_moved for task in ran(plan) if task.axis == HOST)


def test_full_recomputation_costs_the_forward_pass_and_selective_the_cheap_part_of_it() -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("tensor", 2),))
    plans = {mode: plan if mode == "none" else recomputing(plan, GRAPH, mode) for mode in ("none", "selective", "full")}
    steps_of = {mode: predicted(one) for mode, one in plans.items()}
    work, schedule = timed(plan).work, timed(plan).schedule
    forward = sum(
        float(times * seconds)
        for task, times, seconds in zip(work.tasks, work.in_passes(schedule), work.seconds, strict=True)
        if task.phase is Phase.FORWARD and task.collective is None
    )
    more = {mode: t.breakdown["compute_s"] - steps_of["none"].breakdown["compute_s"] for mode, t in steps_of.items()}
    assert 0.75 * forward < more["full"] <= forward * (1 + 1e-9)
    assert 0 < more["selective"] < 0.5 * forward
    peaks = [steps_of[mode].peak_memory_bytes for mode in ("full", "selective", "none")]
    assert peaks == sorted(peaks)


def test_recomputation_repeats_forward_operators_of_its_units_and_their_collectives() -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("tensor", 2),), micro_batches=1)
    again = replace(
        plan, recompute="full", recompute_ranges=(RecomputeRange(first="blocks.1", last="blocks.2", mode="full"),)
    )
    lowered = lowered_of(again, GRAPH)
    ran = Counter(i.node for _, i in steps(lowered) if isinstance(i, Compute))
    twice = {lowered.graph.nodes[node].module.split(".")[1] for node, times in ran.items() if times == 2}
    assert twice == {"1", "2"}
    assert set(ran.values()) == {1, 2}
    names = [task.name for task, _ in steps(lowered)]
    assert sum(name.startswith("recompute ") for name in names) == sum(times == 2 for times in ran.values())


def test_selective_recomputation_keeps_products_and_attention() -> None:
    units = chain(GRAPH).units
    block = units[1]
    full, selective = (recomputed(GRAPH, block.nodes, mode) for mode in ("full", "selective"))
    kernels = {GRAPH.nodes[i].kernel for i in selective}
    assert set(selective) < set(full)
    assert not kernels & {Kernel.MATMUL, Kernel.ATTENTION, Kernel.EMBEDDING, Kernel.CONVOLUTION}
    assert Kernel.MATMUL in {GRAPH.nodes[i].kernel for i in full}
    assert recomputed(GRAPH, block.nodes, "none") == ()
    with pytest.raises(InputError, match="'some' is not one of none, selective, full"):
        recomputed(GRAPH, block.nodes, "some")


def test_states_shared_by_some_ranks_need_not_divide_by_all() -> None:
    """A layer of 36 inputs, whose states pairs of eight data-parallel ranks share."""
    pins = {"dp": 8, "tp": 1, "pp": 1, "optimizer_sharding": "zero1", "shard_size": 2, "sharding_threshold_kb": 1}
    lowered = lowered_of(make_plan(place("wide_and_deep"), 8, batch=16, **pins))
    assert {axis.name: axis.size for axis in lowered.mesh.axes} == {REPLICAS: 4, "data": 2}
