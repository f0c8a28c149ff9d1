"""Machines: how the devices of one node are joined, and which of them share a NIC."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from simulator.errors import ProfileError
from simulator.topology.graph import Links, Topology

# NVLink bricks of a DGX-1 with V100: six a GPU, two of its four neighbours by a double link (`nvidia-smi topo -m`;
# NVIDIA DGX-1 With Tesla V100 System Architecture, WP-08437-002, 2017, figure 4).
HYBRID_CUBE_MESH: Mapping[tuple[int, int], int] = {
    (0, 1): 1, (0, 2): 1, (0, 3): 2, (0, 4): 2, (1, 2): 2, (1, 3): 1, (1, 5): 2, (2, 3): 2, (2, 6): 1, (3, 7): 1,
    (4, 5): 1, (4, 6): 1, (4, 7): 2, (5, 6): 2, (5, 7): 1, (6, 7): 2,
}  # fmt: skip
BRICKS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One machine.

    Attributes
    ----------
    kind
        a key of `NODES`.
    bandwidth_bytes_per_s
        what one device sends over all its links together; a mesh or torus divides it among them.
    latency_s
        device to device over one link or one switch.
    host_bandwidth_bytes_per_s, host_latency_s
        per device through the host processors: between HCCS quads, beside NVLink, or at the top of a PCIe tree; 0
        where there is no such way.
    group
        devices below one first switch: of a PCIe tree, or of a supernode's first tier; or joined by NVLink.
    shape
        of a torus.
    nics, nic_bandwidth_bytes_per_s
        equal runs of devices share one NIC; bandwidth of one NIC.
    """

    kind: str
    devices: int
    bandwidth_bytes_per_s: float
    latency_s: float
    host_bandwidth_bytes_per_s: float = 0.0
    host_latency_s: float = 0.0
    group: int = 4
    shape: tuple[int, ...] = ()
    nics: int = 0
    nic_bandwidth_bytes_per_s: float = 0.0
    profile: str = ""


class MachinePlace:
    """Where one machine is built: its number, its first device, and the names of its vertices."""

    def __init__(self, links: Links, spec: NodeSpec, node: int, first: int) -> None:
        self.links, self.spec, self.node, self.first = links, spec, node, first
        ranks = range(spec.devices)
        self.devices = [links.device(first + rank, node=node, rank=rank, profile=spec.profile) for rank in ranks]

    def name(self, part: str) -> str:
        """Name of a vertex of this machine."""
        return f"node{self.node}/{part}"

    def wire(self, one: int, other: int, capacity_bytes_per_s: float, kind: str) -> None:
        """Join two devices of this machine by their ranks."""
        self.links.join(self.devices[one], self.devices[other], capacity_bytes_per_s, self.spec.latency_s, kind)

    def hosts(self, runs: Sequence[Sequence[int]]) -> None:
        """One host bridge for each run of devices, joined to each other, where the machine has this way."""
        spec = self.spec
        if not spec.host_bandwidth_bytes_per_s:
            return
        bridges = [self.links.vertex(self.name(f"host{place}"), "host", node=self.node) for place in range(len(runs))]
        for bridge, run in zip(bridges, runs, strict=True):
            for device in run:
                # A route through two bridges takes the latency once; the smaller part keeps every link above zero.
                third = spec.host_latency_s / 3
                self.links.join(device, bridge, spec.host_bandwidth_bytes_per_s, third, "PCIe")
        for one, other in itertools.combinations(range(len(runs)), 2):
            capacity = spec.host_bandwidth_bytes_per_s * min(len(runs[one]), len(runs[other]))
            self.links.join(bridges[one], bridges[other], capacity, spec.host_latency_s / 3, "host")


def node_topology(spec: NodeSpec) -> Topology:
    """Graph of one machine.

    >>> dgx1 = node_topology(
    ...     NodeSpec(kind="hybrid-cube-mesh", devices=8, bandwidth_bytes_per_s=150e9, latency_s=1e-6)
    ... )
    >>> dgx1.route(0, 7), dgx1.capacities[dgx1.links_of((0, 4))[0]]
    ((0, 3, 7), 50000000000.0)
    """
    links = Links()
    add_node(links, spec, node=0, first=0)
    return Topology(spec.profile or spec.kind, links)


def add_node(links: Links, spec: NodeSpec, *, node: int, first: int) -> list[str]:
    """Add machine `node` with devices from number `first`; returns the names of its NICs."""
    check_spec(spec)
    place = MachinePlace(links, spec, node, first)
    NODES[spec.kind](place)
    nics = [place.name(f"nic{number}") for number in range(spec.nics)]
    for nic in nics:
        links.vertex(nic, "nic", node=node)
    return nics


def devices_of_nic(spec: NodeSpec, number: int) -> range:
    """Ranks of the devices that share NIC `number`."""
    run = spec.devices // spec.nics
    return range(number * run, (number + 1) * run)


def nvswitch(place: MachinePlace) -> None:
    """All devices on one switch that never blocks; it stands for all NVSwitch planes, over which packets spread."""
    switch = place.links.vertex(place.name("nvswitch"), "switch", node=place.node)
    for device in place.devices:
        place.links.join(device, switch, place.spec.bandwidth_bytes_per_s, place.spec.latency_s / 2, "NVLink")


def hybrid_cube_mesh(place: MachinePlace) -> None:
    """Two NVLink quads and the edges of a cube between them (DGX-1); two host bridges beside it."""
    for (one, other), bricks in HYBRID_CUBE_MESH.items():
        place.wire(one, other, place.spec.bandwidth_bytes_per_s * bricks / BRICKS, "NVLink")
    place.hosts((place.devices[:4], place.devices[4:]))


def ring(place: MachinePlace) -> None:
    """Every device linked to the next and the last to the first."""
    count = place.spec.devices
    for rank in range(count if count > 2 else count - 1):
        place.wire(rank, (rank + 1) % count, place.spec.bandwidth_bytes_per_s / min(2, count - 1), "NVLink")


def full_mesh(place: MachinePlace) -> None:
    """A link between every two devices (Atlas 800T A2: 7 HCCS links a device)."""
    for one, other in itertools.combinations(range(place.spec.devices), 2):
        place.wire(one, other, place.spec.bandwidth_bytes_per_s / (place.spec.devices - 1), "HCCS")


def hccs_quads(place: MachinePlace) -> None:
    """Full meshes of four that meet in the host (Atlas 800: devices 0-3 and 4-7)."""
    _islands(place, 4, "HCCS")


def nvlink_islands(place: MachinePlace) -> None:
    """Full meshes of `group` that meet in the host: pairs of cards with NVLink bridges."""
    _islands(place, place.spec.group, "NVLink")


def _islands(place: MachinePlace, size: int, kind: str) -> None:
    starts = range(0, place.spec.devices, size)
    for start in starts:
        for one, other in itertools.combinations(range(start, start + size), 2):
            place.wire(one, other, place.spec.bandwidth_bytes_per_s / (size - 1), kind)
    place.hosts([place.devices[start : start + size] for start in starts])


def pcie_tree(place: MachinePlace) -> None:
    """PCIe switches of `group` devices; half of the switches below each of two host bridges.

    A switch has one link of a device's speed upwards; the bridges are joined by ``host_bandwidth_bytes_per_s``.
    """
    links, spec = place.links, place.spec
    switches = []
    for number, start in enumerate(range(0, spec.devices, spec.group)):
        switch = links.vertex(place.name(f"pcie{number}"), "switch", node=place.node)
        switches.append(switch)
        for device in place.devices[start : start + spec.group]:
            links.join(device, switch, spec.bandwidth_bytes_per_s, spec.latency_s / 2, "PCIe")
    if len(switches) == 1:
        return
    bridges = [links.vertex(place.name(f"host{side}"), "host", node=place.node) for side in range(2)]
    for number, switch in enumerate(switches):
        bridge = bridges[2 * number // len(switches)]
        links.join(switch, bridge, spec.bandwidth_bytes_per_s, spec.latency_s / 2, "PCIe")
    between = spec.host_bandwidth_bytes_per_s or spec.bandwidth_bytes_per_s
    links.join(bridges[0], bridges[1], between, spec.host_latency_s, "host")


def supernode(place: MachinePlace) -> None:
    """Two tiers of switches: `group` devices on a first, all first ones on a second that never blocks (CloudMatrix)."""
    links, spec = place.links, place.spec
    top = links.vertex(place.name("l2"), "switch", node=place.node)
    for number, start in enumerate(range(0, spec.devices, spec.group)):
        below = place.devices[start : start + spec.group]
        switch = links.vertex(place.name(f"l1-{number}"), "switch", node=place.node)
        for device in below:
            links.join(device, switch, spec.bandwidth_bytes_per_s, spec.latency_s / 2, "UB")
        # The second tier costs what host_latency_s says beyond the first.
        links.join(switch, top, spec.bandwidth_bytes_per_s * len(below), spec.host_latency_s / 2, "UB")


def torus(place: MachinePlace) -> None:
    """Rings along every dimension of `shape`; a device's bandwidth divides evenly among its links."""
    shape = place.spec.shape
    degree = sum(min(2, size - 1) for size in shape)
    capacity = place.spec.bandwidth_bytes_per_s / degree
    for one, other in torus_edges(shape):
        place.wire(one, other, capacity, "torus")


def torus_edges(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Neighbours in a torus, the last dimension running fastest; a dimension of two has one link, not two."""
    edges = []
    for place in itertools.product(*map(range, shape)):
        for dimension, size in enumerate(shape):
            step = list(place)
            step[dimension] = (place[dimension] + 1) % size
            if size > 2 or step[dimension] > place[dimension]:
                edges.append((_number(place, shape), _number(step, shape)))
    return edges


NODES: Mapping[str, Callable[[MachinePlace], None]] = {
    "nvswitch": nvswitch,
    "hybrid-cube-mesh": hybrid_cube_mesh,
    "ring": ring,
    "full-mesh": full_mesh,
    "hccs-quads": hccs_quads,
    "nvlink-islands": nvlink_islands,
    "pcie-tree": pcie_tree,
    "supernode": supernode,
    "torus": torus,
}
# Machines whose devices are joined directly: a group of some of them reaches only a part of a device's links.
ISLANDS = frozenset({"hccs-quads", "nvlink-islands"})
MESHES = ISLANDS | {"hybrid-cube-mesh", "ring", "full-mesh", "torus"}


def _number(place: Sequence[int], shape: Sequence[int]) -> int:
    number = 0
    for step, size in zip(place, shape, strict=True):
        number = number * size + step
    return number


def check_spec(spec: NodeSpec) -> None:
    """Raise ProfileError where counts, kind and shape do not make a machine."""
    where = f"node of {spec.profile or spec.kind}"
    if spec.kind not in NODES:
        raise ProfileError(f"{where}: kind {spec.kind!r} is not known; use one of {', '.join(NODES)}")
    if spec.devices < 1 or spec.group < 1 or spec.nics < 0 or (spec.nics and spec.devices % spec.nics):
        raise ProfileError(
            f"{where}: {spec.devices} devices, groups of {spec.group}, {spec.nics} NICs; give positive counts and NICs "
            f"that divide the devices evenly"
        )
    needs = {
        "hybrid-cube-mesh": spec.devices == 8,
        "hccs-quads": spec.devices % 4 == 0,
        "nvlink-islands": spec.group > 1 and spec.devices % spec.group == 0,
    }
    if not needs.get(spec.kind, True):
        raise ProfileError(
            f"{where}: {spec.devices} devices; a hybrid cube mesh has 8, quads a multiple of 4, NVLink islands one of "
            "their group of two or more"
        )
    if spec.kind == "torus" and (not spec.shape or math.prod(spec.shape) != spec.devices or min(spec.shape) < 2):
        raise ProfileError(
            f"{where}: torus shape {spec.shape} does not hold {spec.devices} devices; give dimensions of 2 or more "
            f"whose product is the number of devices"
        )
