"""One stage that computes again, or shards gradients and parameters: what is sent, when, and what it costs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.graph.chain import chain
from planner.graph.folding import unfold
from planner.graph.recompute import recomputed
from planner.graph.scaling import at_batch
from planner.lowering import lower_graph, lowering_options
from planner.lowering.checked import lower
from planner.lowering.instructions import Communicate, Compute, LoweredPlan
from planner.lowering.replicas import REPLICAS
from planner.plans.plan import Plan, RecomputeRange, expanded_rules
from simulator import fast_engine
from simulator.corrections import kernel_factor
from simulator.errors import InputError
from simulator.hardware import Hardware, Reliability
from simulator.profiles import load_profile
from simulator.program import DISK, HOST, BufferKind, Collective, Kernel, Phase
from simulator.timing import task_times
from tests.planner.execution.made import make_plan
from tests.planner.execution.small import place
from tests.planner.lowering.plans import one_stage, recomputing
from tests.planner.search.problems import captured
from tests.planner.test_lowering import Rank, steps

HARDWARE = load_profile("dgx-a100")
LAYERS = 4
GRAPH = captured("gpt2-tiny", LAYERS)
NAMES = chain(GRAPH).names()


def lowered_of(plan: Plan) -> LoweredPlan:
    """The plan lowered on one stage."""
    graph = unfold(at_batch(GRAPH, plan.micro_batch * plan.degree("data")))
    return lower_graph(graph, expanded_rules(plan), lowering_options(plan, GRAPH))


def sharded(**changes: Any) -> Plan:
    """A plan on 4 data-parallel ranks that store shards; messages are not fused."""
    plan = one_stage("gpt2-tiny", LAYERS, (("data", 4),), storage="sharded", micro_batches=3)
    return replace(plan, bucket_bytes=0, **changes)


def counted(lowered: LoweredPlan, collective: Collective) -> Counter[str]:
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
    lowered = lowered_of(plan)
    rank = Rank(lowered)
    for task, instruction in steps(lowered):
        rank.follow(task, instruction)
    stored = {entry.value for entry in (*lowered.parameters, *lowered.inputs)}
    assert set(rank.placed) == stored | {lowered.loss}
    memory = fast_engine.simulate(lowered.program, HARDWARE).memory
    assert memory.unreleased == (lowered.loss,)


@pytest.mark.parametrize(("level", "gathers", "scatters"), [("zero1", 1, 1), ("zero2", 1, 3), ("zero3", 6, 3)])
def test_what_each_level_sends_in_three_micro_batches(level: str, gathers: int, scatters: int) -> None:
    lowered = lowered_of(sharded(optimizer_sharding=level))
    stored = [entry.value for entry in lowered.parameters if entry.placements[0] >= 0]
    inside = [value for value in stored if value.startswith("blocks.")]
    assert len(inside) > 8 * LAYERS
    sent = counted(lowered, Collective.ALL_GATHER)
    # A bias is not read on the way back.
    weights = [value for value in inside if value.endswith("weight") and "norm" not in value]
    assert {sent[value] for value in weights} == {gathers}
    scattered = sum(counted(lowered, Collective.REDUCE_SCATTER).values())
    assert scattered == scatters * len(stored)


def test_each_level_holds_less_and_parts_of_the_data_axis_hold_more() -> None:
    held = {
        level: fast_engine.simulate(lowered_of(sharded(optimizer_sharding=level)).program, HARDWARE)
        for level in ("zero1", "zero2", "zero3")
    }
    peaks = [held[level].peak_memory_bytes for level in ("zero1", "zero2", "zero3")]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3
    whole = 4 * GRAPH.parameter_count
    gathered = held["zero3"].memory_at_peak[BufferKind.GATHERED_PARAMETER]
    assert gathered < 0.6 * whole, "at most two units at once"
    halves = lowered_of(sharded(shard_size=2)).program
    assert [axis.name for axis in halves.axes] == ["data_replica", "data"]
    assert [(axis.size, axis.stride) for axis in halves.axes] == [(2, 2), (2, 1)]
    quarter = lowered_of(sharded()).program
    states = [
        sum(b.size_bytes for b in program.resident if b.kind is BufferKind.OPTIMIZER_STATE)
        for program in (quarter, halves)
    ]
    assert states[1] == pytest.approx(2 * states[0], rel=0.01)


def test_offloaded_states_are_not_in_device_memory_and_pass_the_host_link() -> None:
    plain, offloaded = lowered_of(sharded()), lowered_of(sharded(offload_optimizer=True))
    kinds = {buffer.kind for buffer in offloaded.program.resident}
    assert BufferKind.OPTIMIZER_STATE not in kinds
    parameters = sum(b.size_bytes for b in plain.program.resident if b.kind is BufferKind.PARAMETER)
    more = [fast_engine.simulate(one.program, HARDWARE).step_time_s for one in (plain, offloaded)]
    # A gradient there and a parameter back are a copy each.
    copies = 2 * len(offloaded.graph.parameters)
    seconds = copies * HARDWARE.kernels[Kernel.COPY].overhead_s
    seconds += 2 * parameters / HARDWARE.reliability.snapshot_bandwidth_bytes_per_s
    seconds += updating(offloaded, HARDWARE) - updating(plain, HARDWARE)
    # All gradients are there before any goes to the host, so the last messages hide behind no update.
    assert seconds <= more[1] - more[0] < seconds + 1e-4


def updating(lowered: LoweredPlan, hardware: Hardware) -> float:
    """Seconds of the updates of a step."""
    found = 0.0
    for segment, times in zip(lowered.program.segments, task_times(lowered.program, hardware), strict=True):
        found += sum(t for task, t in zip(segment.tasks, times, strict=True) if task.kernel is Kernel.OPTIMIZER)
    return found


def test_the_host_updates_at_its_own_speed() -> None:
    plain, offloaded = lowered_of(sharded()), lowered_of(sharded(offload_optimizer=True))
    updates = [task for s in plain.program.segments for task in s.tasks if task.kernel is Kernel.OPTIMIZER]
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


def test_norms_that_the_host_needs_stand_in_its_memory() -> None:
    plain, offloaded = (lowered_of(sharded(optimizer="lamb", offload_optimizer=on)) for on in (False, True))
    sizes = [
        sum(
            b.size_bytes
            for s in one.program.segments
            for task in s.tasks
            for b in task.allocates
            if "direction" in b.name
        )
        for one in (plain, offloaded)
    ]
    assert sizes[0] > sizes[1] == 0


def test_states_on_disk_are_read_and_written_once_a_step() -> None:
    away = {"offload_optimizer": True}
    host, disk = lowered_of(sharded(**away)), lowered_of(sharded(**away, offload_to="disk"))
    resident = lowered_of(sharded()).program.resident
    states = sum(buffer.size_bytes for buffer in resident if buffer.kind is BufferKind.OPTIMIZER_STATE)
    assert disk.program.resident == host.program.resident
    steps = [fast_engine.simulate(one.program, HARDWARE).step_time_s for one in (host, disk)]
    seconds = 2 * states * HARDWARE.devices_per_node / HARDWARE.disk_bandwidth
    assert steps[1] - steps[0] == pytest.approx(seconds, rel=0.01)
    faster = fast_engine.simulate(disk.program, replace(HARDWARE, disk_bandwidth=2 * HARDWARE.disk_bandwidth))
    assert faster.step_time_s - steps[0] == pytest.approx(seconds / 2, rel=0.01)


def test_parameters_on_the_host_come_for_each_pass_of_a_unit() -> None:
    away = {"offload_optimizer": True}
    states, both = (lowered_of(sharded(**away, offload_parameters=on_host)) for on_host in (False, True))
    assert {buffer.kind for buffer in states.program.resident} == {BufferKind.PARAMETER, BufferKind.ACTIVATION}
    assert {buffer.kind for buffer in both.program.resident} == {BufferKind.ACTIVATION}
    assert set(both.host_parameters) == {parameter.value for parameter in both.parameters}
    parameters = sum(b.size_bytes for b in states.program.resident if b.kind is BufferKind.PARAMETER)
    assert copied(states) == pytest.approx(2 * parameters)
    # Gradients go there once; parameters come for both passes of every micro-batch, the tied table to two units.
    came = copied(both) - parameters
    assert both.micro_batches * parameters < came < 2.1 * both.micro_batches * parameters
    peaks = [fast_engine.simulate(one.program, HARDWARE).memory_at_peak for one in (states, both)]
    assert 0 < peaks[1][BufferKind.GATHERED_PARAMETER] < 0.6 * 4 * GRAPH.parameter_count, "one unit at once"
    assert peaks[1].get(BufferKind.PARAMETER, 0) == 0 < peaks[0][BufferKind.PARAMETER]


def test_parameters_on_disk_are_read_for_each_pass_and_written_once_a_step() -> None:
    away = {"offload_optimizer": True, "offload_parameters": True}
    host, disk = lowered_of(sharded(**away)), lowered_of(sharded(**away, offload_to="disk"))
    assert set(disk.disk_parameters) == set(disk.host_parameters) == {entry.value for entry in disk.parameters}
    assert not host.disk_parameters
    tasks = [task for segment in disk.program.segments for task in segment.tasks * segment.count]
    read = sum(task.bytes_moved for task in tasks if task.axis == DISK and task.phase is not Phase.UPDATE)
    came = sum(task.bytes_moved for task in tasks if task.axis == HOST and task.phase is not Phase.UPDATE)
    assert read == came > 0
    resident = lowered_of(sharded()).program.resident
    held = sum(b.size_bytes for b in resident if b.kind in (BufferKind.OPTIMIZER_STATE, BufferKind.PARAMETER))
    seconds = (read + 2 * held) * HARDWARE.devices_per_node / HARDWARE.disk_bandwidth
    steps = [fast_engine.simulate(one.program, HARDWARE).step_time_s for one in (host, disk)]
    # Some of it hides behind the launches of kernels.
    assert 0.9 * seconds < steps[1] - steps[0] <= seconds * (1 + 1e-9)


def copied(lowered: LoweredPlan) -> float:
    """Bytes of a step between a device and its host."""
    tasks = [task for segment in lowered.program.segments for task in segment.tasks * segment.count]
    return sum(task.bytes_moved for task in tasks if task.axis == HOST)


def test_full_recomputation_costs_the_forward_pass_and_selective_the_cheap_part_of_it() -> None:
    plan = one_stage("gpt2-tiny", LAYERS, (("tensor", 2),))
    steps_of = {
        mode: fast_engine.simulate(
            lowered_of(plan if mode == "none" else recomputing(plan, GRAPH, mode)).program, HARDWARE
        )
        for mode in ("none", "selective", "full")
    }
    forward = 0.0
    lowered = lowered_of(plan)
    for segment, times in zip(lowered.program.segments, steps_of["none"].segments, strict=True):
        for task, start, end in zip(segment.tasks, times.starts_s, times.ends_s, strict=True):
            if task.phase is Phase.FORWARD and task.collective is None:
                forward += segment.count * (end - start)
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
    lowered = lowered_of(again)
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
    lowered = lower(make_plan(place("wide_and_deep"), 8, batch=16, **pins))
    assert {axis.name: axis.size for axis in lowered.mesh.axes} == {REPLICAS: 4, "data": 2}
