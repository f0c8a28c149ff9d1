"""Axes that share links: times by hand, both engines, and all ranks on the links of the real graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator import engine, fast_engine
from simulator.contention import Transfers, message_transfers, representative_axes
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Collective, ProgramAxis, Task
from simulator.task_table import FloatArray, StreamKind, TaskTable
from simulator.timing import task_times
from simulator.topology import axis_groups, link_use, topology_graph
from simulator.topology.sharing import ring_gather
from tests.oracles.simulated import contended
from tests.oracles.table_builder import TableBuilder
from tests.simulator.programs import AXES, DEVICES, communication, table_of, task
from tests.simulator.test_engine import waiting_tasks

DGX = replace(load_profile("dgx-a100"), training={}, overlap_compute_speed=1.0)
Run = Callable[[TaskTable], tuple[FloatArray, FloatArray]]
ENGINES = pytest.mark.parametrize("run", [engine.run, fast_engine.run], ids=["reference", "fast"])
NODES: tuple[ProgramAxis, ...] = (
    ProgramAxis(name="data", size=2, stride=16),
    ProgramAxis(name="tensor", size=16, stride=1),
)
"""Four nodes of eight: both axes leave the node over the same network cards."""


class Step:
    """Tasks of a rank, with what each waits for, on axes of a job."""

    def __init__(
        self,
        *tasks: Task,
        after: Sequence[Sequence[int]] = (),
        axes: tuple[ProgramAxis, ...] = NODES,
        devices: int = 32,
    ) -> None:
        self.tasks, self.after, self.axes, self.devices = tasks, after, axes, devices

    def seconds(self, hardware: Hardware) -> FloatArray:
        return task_times(self.tasks, self.axes, hardware, self.devices)

    def transfers(self, hardware: Hardware) -> Transfers | None:
        return message_transfers(self.tasks, self.seconds(hardware), hardware, self.devices, self.axes)

    def ends(self, hardware: Hardware, run: Run = fast_engine.run) -> FloatArray:
        """When tasks end where links are shared."""
        table = table_of(self.tasks, self.seconds(hardware), self.after, hardware, self.axes, self.devices)
        return run(table)[1]

    def alone_s(self, hardware: Hardware) -> float:
        """Seconds with links that are free."""
        return float(fast_engine.run(table_of(self.tasks, self.seconds(hardware), self.after))[1].max())


@ENGINES
@pytest.mark.parametrize(("first", "second"), [(4e9, 1e9), (1e9, 1e9)])
def test_two_axes_share_a_network_card(run: Run, first: float, second: float) -> None:
    """Both begin at 0; until the shorter has ended each has half the card, then the longer has all it can use."""
    strides = {"data": (2, 16), "context": (2, 8), "tensor": (8, 1)}
    axes = tuple(ProgramAxis(name=name, size=size, stride=stride) for name, (size, stride) in strides.items())
    long, other = communication("long", payload_bytes=first), communication("short", "context", payload_bytes=second)
    step = Step(long, other, axes=axes)
    seconds = step.seconds(DGX)
    latency = 2 * DGX.levels[1].latency_s + DGX.collective_overhead_s
    # A ring all-reduce of two sends its whole payload over the card; what takes longer waits between pieces.
    card = DGX.levels[1].bandwidth_bytes_per_s
    rate = [payload / (taken - latency) for payload, taken in zip((first, second), seconds, strict=True)]
    assert 0.9 * card < min(rate) <= card
    short = latency + second / (card / 2)
    ends = step.ends(DGX, run)
    assert ends[1] == pytest.approx(short, rel=1e-9)
    assert ends[0] == pytest.approx(short + (first - second) / rate[0], rel=1e-9)
    assert step.alone_s(DGX) == seconds.max() < ends.max()


@ENGINES
def test_one_after_the_other_they_take_their_own_time(run: Run) -> None:
    tasks = (communication("a", payload_bytes=1e8), communication("b", "tensor", payload_bytes=1e8))
    step = Step(*tasks, task("k", flops=1e12), after=((), (0,), ()))
    assert step.ends(DGX, run).max() == pytest.approx(step.alone_s(DGX), rel=1e-12)


def test_axes_with_links_of_their_own_stay_as_they_are() -> None:
    axes = (ProgramAxis(name="data", size=4, stride=8), ProgramAxis(name="tensor", size=8, stride=1))
    tasks = (communication("a", payload_bytes=1e8), communication("b", "tensor", payload_bytes=1e9))
    step = Step(*tasks, axes=axes)
    assert step.transfers(DGX) is None
    assert step.ends(DGX).max() == step.alone_s(DGX)
    assert Step(*tasks).transfers(replace(DGX, overlaps_communication=False)) is None


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Random tasks whose messages are of several sizes and sorts."""
    tasks, _, after = draw(waiting_tasks())
    sizes = st.sampled_from((0.0, 1e3, 1e7, 1e8))
    kinds = st.sampled_from((Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL))
    found = [
        replace(one, flops=1e11)
        if one.collective is None
        else replace(one, payload_bytes=draw(sizes), collective=draw(kinds))
        for one in tasks
    ]
    return Step(*found, after=after, axes=AXES, devices=DEVICES)


@settings(deadline=None, max_examples=60)
@given(step=steps(), name=st.sampled_from(("dgx-a100", "a100-pcie")), slow=st.booleans())
def test_both_engines_on_messages_that_contend(step: Step, name: str, slow: bool) -> None:
    speeds = (0.8, 0.7) if slow else (1.0, 1.0)
    hardware = replace(load_profile(name), overlap_compute_speed=speeds[0], overlap_transfer_speed=speeds[1])
    seconds = step.seconds(hardware)
    table = table_of(step.tasks, seconds, step.after, hardware, step.axes, step.devices)
    (starts, ends), reference = fast_engine.run(table), engine.run(table)
    np.testing.assert_allclose(starts, reference[0], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(ends, reference[1], rtol=1e-9, atol=1e-12)
    assert np.all(ends - starts >= seconds * (1 - 1e-9) - 1e-12)
    assert ends.max(initial=0.0) <= seconds.sum() / (0.7 if slow else 1) * (1 + 1e-9)


def test_the_profile_says_what_overlap_costs() -> None:
    hardware = replace(DGX, overlap_compute_speed=0.8, overlap_transfer_speed=0.5)
    step = Step(task("a", flops=1e13), communication("a.reduce", payload_bytes=1e9))
    kernel, message = step.seconds(hardware)
    ends = step.ends(hardware)
    latency = hardware.levels[1].latency_s * 2 + hardware.collective_overhead_s
    beside = (message - latency) / 0.5
    assert beside < kernel - latency
    assert ends[1] == pytest.approx(latency + beside, rel=1e-9)
    assert ends[0] == pytest.approx(kernel + 0.2 * (latency + beside), rel=1e-9)
    kept = replace(hardware, overlap_transfer_speed=1.0)
    assert step.ends(kept).max() == pytest.approx(kernel + 0.2 * message, rel=1e-9)


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
    step = Step(communication("a"), communication("b", "tensor"), axes=axes, devices=devices)
    assert (step.transfers(hardware) is not None) == links
    assert step.ends(hardware).max() >= step.alone_s(hardware) * (1 - 1e-12)


def every_rank(subject: Step, hardware: Hardware) -> TaskTable:
    """All ranks with the messages of each on the links of the graph, groups meeting; only rings, and long messages."""
    seconds = subject.seconds(hardware)
    topology = topology_graph(hardware, subject.devices)
    axes = {axis.name: axis_groups(subject.devices, axis.size, axis.stride) for axis in subject.axes}
    uses = {name: link_use(topology, groups, ring_gather) for name, groups in axes.items()}
    capacities = np.asarray(topology.capacities)
    narrow = {name: int(np.argmax(use / capacities)) for name, use in uses.items()}
    transfers = subject.transfers(hardware)
    assert transfers is not None
    latency = dict(zip(transfers.tasks.tolist(), transfers.latency_s.tolist(), strict=True))
    rate = dict(zip(transfers.tasks.tolist(), transfers.rate_bytes_per_s.tolist(), strict=True))
    builder = TableBuilder()
    links = [builder.link(capacity) for capacity in topology.capacities]
    streams = {
        (rank, name): builder.stream(rank, StreamKind.COMPUTE if name == "compute" else StreamKind.COMMUNICATION)
        for rank in range(subject.devices)
        for name in dict.fromkeys(one.stream for one in subject.tasks)
    }
    number: dict[tuple[int, int], int] = {}
    for index, one in enumerate(subject.tasks):
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
                after = [number[rank, before] for before in subject.after[index]]
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
    after: list[tuple[int, ...]] = []
    for layer in range(4):
        tasks.append(task(f"{layer}", flops=(0.2 + 0.1 * layer) * 1e12, bytes_moved=1e6))
        tasks.append(communication(f"{layer}.sum", "tensor", payload_bytes=4e8))
        tasks.append(communication(f"{layer}.gradients", payload_bytes=3e8))
        kernel = 3 * layer
        after += [(kernel - 2,) if layer else (), (kernel,), (kernel,)]
    step = Step(*tasks, after=after, axes=axes, devices=devices)
    alone = step.ends(hardware)
    calm = replace(hardware, overlap_compute_speed=1.0)
    assert alone.max() >= step.ends(calm).max()
    assert alone.max() > step.alone_s(calm) * 1.001
    _, ends = fast_engine.run(every_rank(step, hardware))
    everyone = ends.reshape(len(tasks), devices)
    np.testing.assert_allclose(everyone, np.broadcast_to(alone[:, None], everyone.shape), rtol=1e-9)
