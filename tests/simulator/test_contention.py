"""Axes that share links: times by hand, both engines, and all ranks on the links of the real graph."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.collective_patterns import ring_gather
from simulator.contention import representative_axes, segment_transfers
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Collective, Program, ProgramAxis, Segment, Task
from simulator.table_builder import TableBuilder
from simulator.task_order import streams_of
from simulator.task_table import StreamKind, TaskTable
from simulator.timeline import Timeline
from simulator.timing import group_shapes, task_times
from simulator.topology import axis_groups, contended, link_use, topology_graph
from tests.simulator.programs import communication, program, segment, segments, task

DGX = replace(load_profile("dgx-a100"), training={}, overlap_compute_speed=1.0)
Simulate = Callable[..., Timeline]
ENGINES = pytest.mark.parametrize("simulate", [engine.simulate, fast_engine.simulate], ids=["reference", "fast"])
NODES: tuple[ProgramAxis, ...] = (
    ProgramAxis(name="data", size=2, stride=16),
    ProgramAxis(name="tensor", size=16, stride=1),
)
"""Four nodes of eight: both axes leave the node over the same network cards."""


def on_nodes(*tasks: Task, axes: tuple[ProgramAxis, ...] = NODES, devices: int = 32) -> Program:
    return Program(name="test", devices=devices, axes=axes, segments=(segment(*tasks),))


def alone(subject: Program, hardware: Hardware) -> Timeline:
    return fast_engine.replay(subject, task_times(subject, hardware))


@ENGINES
@pytest.mark.parametrize(("first", "second"), [(4e9, 1e9), (1e9, 1e9)])
def test_two_axes_share_a_network_card(simulate: Simulate, first: float, second: float) -> None:
    """Both begin at 0; until the shorter has ended each has half the card, then the longer has all it can use."""
    strides = {"data": (2, 16), "context": (2, 8), "tensor": (8, 1)}
    axes = tuple(ProgramAxis(name=name, size=size, stride=stride) for name, (size, stride) in strides.items())
    subject = on_nodes(
        communication("long", payload_bytes=first), communication("short", "context", payload_bytes=second), axes=axes
    )
    (seconds,) = task_times(subject, DGX)
    latency = 2 * DGX.levels[1].latency_s + DGX.collective_overhead_s
    # A ring all-reduce of two sends its whole payload over the card; what takes longer waits between pieces.
    card = DGX.levels[1].bandwidth_bytes_per_s
    rate = [payload / (taken - latency) for payload, taken in zip((first, second), seconds, strict=True)]
    assert 0.9 * card < min(rate) <= card
    short = latency + second / (card / 2)
    left = first - second
    timeline = simulate(subject, DGX)
    ends = timeline.segments[0].ends_s
    assert ends[1] == pytest.approx(short, rel=1e-9)
    assert ends[0] == pytest.approx(short + left / rate[0], rel=1e-9)
    assert alone(subject, DGX).step_time_s == seconds.max() < ends.max()
    assert timeline.breakdown["exposed_communication_s"] == pytest.approx(timeline.step_time_s)


@ENGINES
def test_one_after_the_other_they_take_their_own_time(simulate: Simulate) -> None:
    tasks = (communication("a", payload_bytes=1e8), communication("b", "tensor", payload_bytes=1e8, after=(0,)))
    subject = on_nodes(task("k", flops=1e12), *tasks)
    assert simulate(subject, DGX).step_time_s == pytest.approx(alone(subject, DGX).step_time_s, rel=1e-12)


def test_axes_with_links_of_their_own_stay_as_they_are() -> None:
    axes = (ProgramAxis(name="data", size=4, stride=8), ProgramAxis(name="tensor", size=8, stride=1))
    tasks = (communication("a", payload_bytes=1e8), communication("b", "tensor", payload_bytes=1e9))
    subject = on_nodes(*tasks, axes=axes)
    assert segment_transfers(subject, DGX, 0, task_times(subject, DGX)[0]) is None
    assert fast_engine.simulate(subject, DGX).step_time_s == alone(subject, DGX).step_time_s
    serial = replace(DGX, overlaps_communication=False)
    assert segment_transfers(on_nodes(*tasks), serial, 0, task_times(subject, serial)[0]) is None


@st.composite
def messages(draw: st.DrawFn) -> Program:
    """Random segments whose messages are of several sizes and sorts."""
    parts = []
    for number in range(draw(st.integers(1, 2))):
        part = draw(segments(f"s{number}"))
        tasks = [
            one
            if one.collective is None
            else replace(
                one,
                payload_bytes=draw(st.sampled_from((0.0, 1e3, 1e7, 1e8))),
                collective=draw(st.sampled_from((Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL))),
            )
            for one in part.tasks
        ]
        tasks = [replace(one, flops=1e11) if one.collective is None else one for one in tasks]
        parts.append(replace(part, tasks=tuple(tasks)))
    return program(*parts)


@settings(deadline=None, max_examples=60)
@given(subject=messages(), name=st.sampled_from(("dgx-a100", "a100-pcie")), slow=st.booleans())
def test_both_engines_on_programs_that_contend(subject: Program, name: str, slow: bool) -> None:
    speeds = (0.8, 0.7) if slow else (1.0, 1.0)
    hardware = replace(load_profile(name), overlap_compute_speed=speeds[0], overlap_transfer_speed=speeds[1])
    reference, fast = engine.simulate(subject, hardware), fast_engine.simulate(subject, hardware)
    times = task_times(subject, hardware)
    for one, other, seconds in zip(reference.segments, fast.segments, times, strict=True):
        np.testing.assert_allclose(one.starts_s, other.starts_s, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(one.ends_s, other.ends_s, rtol=1e-9, atol=1e-12)
        assert np.all(other.ends_s - other.starts_s >= seconds * (1 - 1e-9) - 1e-12)
        assert other.duration_s <= seconds.sum() / (0.7 if slow else 1) * (1 + 1e-9)
    assert sum(fast.breakdown.values()) == pytest.approx(fast.step_time_s, rel=1e-9, abs=1e-15)
    assert fast.peak_memory_bytes == reference.peak_memory_bytes


def test_the_profile_says_what_overlap_costs(tmp_path: Any) -> None:
    hardware = replace(DGX, overlap_compute_speed=0.8, overlap_transfer_speed=0.5)
    tasks = (task("a", flops=1e13), communication("a.reduce", payload_bytes=1e9))
    subject = on_nodes(*tasks)
    (kernel, message), shape = task_times(subject, hardware)[0], group_shapes(subject, hardware)["data"]
    timeline = fast_engine.simulate(subject, hardware)
    latency = hardware.levels[1].latency_s * 2 + hardware.collective_overhead_s
    assert shape.size == 2
    beside = (message - latency) / 0.5
    assert beside < kernel - latency
    assert timeline.segments[0].ends_s[1] == pytest.approx(latency + beside, rel=1e-9)
    assert timeline.step_time_s == pytest.approx(kernel + 0.2 * (latency + beside), rel=1e-9)
    kept = replace(hardware, overlap_transfer_speed=1.0)
    assert fast_engine.simulate(subject, kept).step_time_s == pytest.approx(kernel + 0.2 * message, rel=1e-9)


@pytest.mark.parametrize("name", ["dgx-a100", "dgx1-v100", "a100-pcie", "gh200x4", "ascend910-atlas800"])
def test_few_nodes_stand_for_many(name: str) -> None:
    hardware = load_profile(name)
    axes = (ProgramAxis(name="data", size=16, stride=16), ProgramAxis(name="tensor", size=16, stride=1))
    few = representative_axes(hardware, 256, axes)
    devices = math.prod(axis.size for axis in few)
    assert devices < 256
    small, large = (
        contended(hardware, count, {axis.name: (axis.size, axis.stride) for axis in mesh})
        for count, mesh in ((devices, few), (256, axes))
    )
    assert small == pytest.approx(large)


def test_an_irregular_mesh_is_left_as_it_is() -> None:
    axes = (ProgramAxis(name="data", size=8, stride=4), ProgramAxis(name="tensor", size=2, stride=1))
    assert representative_axes(DGX, 32, axes) is axes
    # Twelve devices are no whole nodes; twenty-four are.
    axes = (ProgramAxis(name="data", size=16, stride=3), ProgramAxis(name="tensor", size=3, stride=1))
    assert [axis.size for axis in representative_axes(DGX, 48, axes)] == [3, 8]


@pytest.mark.parametrize(
    ("name", "devices", "tensor", "links"),
    [
        ("gb200-nvl72", 76, 4, True),
        ("gb200-nvl72", 128, 8, True),
        ("cloudmatrix384", 1024, 8, False),
        ("deep", 256, 16, True),
    ],
)
def test_racks_and_deep_clusters(name: str, devices: int, tensor: int, links: bool) -> None:
    """Jobs that fill no rack, meshes that nothing small stands for, and more levels than a leaf and a spine."""
    if name == "deep":
        switch, fabric = DGX.levels
        outer = [replace(fabric, name=f"{size}", size=size) for size in (64, 256, 16_384)]
        hardware = replace(DGX, levels=(switch, *outer))
    else:
        hardware = load_profile(name)
    axes = (
        ProgramAxis(name="data", size=devices // tensor, stride=tensor),
        ProgramAxis(name="tensor", size=tensor, stride=1),
    )
    subject = on_nodes(communication("a"), communication("b", "tensor"), axes=axes, devices=devices)
    found = segment_transfers(subject, hardware, 0, task_times(subject, hardware)[0])
    assert (found is not None) == links
    shared, alone_s = fast_engine.simulate(subject, hardware).step_time_s, alone(subject, hardware).step_time_s
    assert shared >= alone_s * (1 - 1e-12)


def every_rank(subject: Program, hardware: Hardware, part: Segment) -> TaskTable:
    """All ranks with the messages of each on the links of the graph, groups meeting; only rings, and long messages."""
    (seconds,) = task_times(subject, hardware)
    topology = topology_graph(hardware, subject.devices)
    axes = {axis.name: axis_groups(subject.devices, axis.size, axis.stride) for axis in subject.axes}
    uses = {name: link_use(topology, groups, ring_gather) for name, groups in axes.items()}
    capacities = np.asarray(topology.capacities)
    narrow = {name: int(np.argmax(use / capacities)) for name, use in uses.items()}
    transfers = segment_transfers(subject, hardware, 0, seconds)
    assert transfers is not None
    latency = dict(zip(transfers.tasks.tolist(), transfers.latency_s.tolist(), strict=True))
    rate = dict(zip(transfers.tasks.tolist(), transfers.rate_bytes_per_s.tolist(), strict=True))
    builder = TableBuilder()
    links = [builder.link(capacity) for capacity in topology.capacities]
    streams = {
        (rank, name): builder.stream(rank, StreamKind.COMPUTE if name == "compute" else StreamKind.COMMUNICATION)
        for rank in range(subject.devices)
        for name in streams_of(part, overlaps_communication=True)
    }
    number: dict[tuple[int, int], int] = {}
    for index, one in enumerate(part.tasks):
        groups = axes[one.axis] if one.collective else [range(rank, rank + 1) for rank in range(subject.devices)]
        for group in groups:
            meeting = builder.meeting(len(group))
            # The first member stands for the messages of its group on the links.
            use = link_use(topology, [group], ring_gather) if one.collective else np.zeros(len(links))
            crossed = np.flatnonzero(use)
            for rank in group:
                fields: dict[str, Any] = {"work": seconds[index]}
                if one.collective:
                    work = (seconds[index] - latency[index]) * rate[index]
                    fields = {"work": work, "latency_s": latency[index], "rate": rate[index]}
                    if rank == group[0]:
                        weights = use[crossed] / uses[one.axis][narrow[one.axis]]
                        fields |= {"links": crossed.tolist(), "weights": weights.tolist()}
                after = [number[rank, before] for before in one.after]
                stream = streams[rank, one.stream]
                number[rank, index] = builder.task(stream, meeting=meeting, after=after, **fields)
    return builder.build(compute_speed=hardware.overlap_compute_speed)


@pytest.mark.parametrize(
    ("name", "devices", "tensor"),
    [("dgx-a100", 8, 4), ("dgx-a100", 16, 4), ("dgx-a100", 16, 2), ("a100-pcie", 8, 4), ("dgx2-v100", 16, 8)],
)
def test_a_rank_stands_for_all(name: str, devices: int, tensor: int) -> None:
    """A few layers of a backward pass, gradients all-reduced beside it: every rank on the graph takes as long."""
    hardware = load_profile(name)
    axes = (
        ProgramAxis(name="data", size=devices // tensor, stride=tensor),
        ProgramAxis(name="tensor", size=tensor, stride=1),
    )
    tasks: list[Task] = []
    for layer in range(4):
        before = (len(tasks) - 2,) if layer else ()
        tasks.append(task(f"{layer}", flops=(0.2 + 0.1 * layer) * 1e12, bytes_moved=1e6, after=before))
        tasks.append(communication(f"{layer}.sum", "tensor", payload_bytes=4e8, after=(len(tasks) - 1,)))
        tasks.append(communication(f"{layer}.gradients", payload_bytes=3e8, after=(len(tasks) - 2,)))
    for index, one in enumerate(tasks):
        if one.name.isdigit() and index:
            tasks[index] = replace(one, after=(index - 2,))
    subject = on_nodes(*tasks, axes=axes, devices=devices)
    timeline = fast_engine.simulate(subject, hardware)
    calm = replace(hardware, overlap_compute_speed=1.0)
    assert timeline.step_time_s >= fast_engine.simulate(subject, calm).step_time_s
    assert timeline.step_time_s > alone(subject, calm).step_time_s * 1.001
    _, ends = fast_engine.run(every_rank(subject, hardware, subject.segments[0]))
    assert ends.max() == pytest.approx(timeline.step_time_s, rel=1e-9)
    everyone = ends.reshape(len(tasks), devices)
    np.testing.assert_allclose(everyone, np.broadcast_to(timeline.segments[0].ends_s[:, None], everyone.shape))
