"""The topology of a hardware profile: the graph of its nodes and fabric with the profile's own numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level
from simulator.topology.graph import Links, Topology, Vertex
from simulator.topology.nodes import NodeSpec, add_node, check_spec, devices_of_nic, node_topology, torus_edges


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricSpec:
    """What joins the NICs.

    Attributes
    ----------
    kind
        ``fat-tree``: all NICs of `nodes_per_leaf` machines on one leaf switch; ``rail-optimised``: NIC number ``r`` of
        `nodes_per_leaf` machines on the leaf of rail ``r``; ``torus``: one router a machine.
    latency_s
        device to device through one leaf, or through one router and the next.
    nodes_per_leaf
        0: all of them.
    oversubscription
        bandwidth of a leaf's NICs over that of its links to the spine; infinity: there is no spine. The spine is one
        vertex and stands for all spine switches, over which traffic spreads evenly.
    spine_latency_s
        one hop between leaf and spine.
    rails
        0: as many as a machine has NICs; otherwise NIC ``r`` is on rail ``r`` modulo this.
    shape
        of a torus.
    """

    kind: str = "fat-tree"
    latency_s: float
    nodes_per_leaf: int = 0
    oversubscription: float = 1.0
    spine_latency_s: float = 0.0
    rails: int = 0
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nic:
    name: str
    node: int
    number: int
    bandwidth_bytes_per_s: float


def cluster_topology(name: str, nodes: Sequence[NodeSpec], fabric: FabricSpec, devices: int | None = None) -> Topology:
    """Graph of machines joined by `fabric`; device numbers run through the machines in order.

    With `devices` only that many of the first are there (the links of the others stay empty).
    """
    links = Links()
    nics: list[_Nic] = []
    first = 0
    for node, spec in enumerate(nodes):
        for number, nic in enumerate(add_node(links, spec, node=node, first=first)):
            nics.append(_Nic(name=nic, node=node, number=number, bandwidth_bytes_per_s=spec.nic_bandwidth_bytes_per_s))
            for rank in devices_of_nic(spec, number):
                links.join(first + rank, nic, spec.nic_bandwidth_bytes_per_s, fabric.latency_s / 4, "PCIe")
        first += spec.devices
    if len(nodes) > 1:
        if not all(spec.nics for spec in nodes):
            raise ProfileError(f"cluster {name}: a node has no NIC and cannot join the fabric; give every node NICs")
        _FABRICS[_known(name, fabric)](links, nics, fabric, len(nodes))
    count = first if devices is None else devices
    if not 1 <= count <= first:
        raise ProfileError(f"cluster {name} has {first} devices and is too small for {count}; add nodes or use fewer")
    links.remove(range(count, first))
    return Topology(name, links)


def _fat_tree(links: Links, nics: Sequence[_Nic], fabric: FabricSpec, nodes: int) -> None:
    per_leaf = fabric.nodes_per_leaf or nodes
    _tree(links, nics, fabric, [f"leaf{nic.node // per_leaf}" for nic in nics])


def _rails(links: Links, nics: Sequence[_Nic], fabric: FabricSpec, nodes: int) -> None:
    per_leaf = fabric.nodes_per_leaf or nodes
    rails = fabric.rails or len(nics)
    _tree(links, nics, fabric, [f"leaf{nic.node // per_leaf}/rail{nic.number % rails}" for nic in nics])


def _tree(links: Links, nics: Sequence[_Nic], fabric: FabricSpec, leaf_of_nic: Sequence[str]) -> None:
    below: dict[str, float] = {}
    for nic, leaf in zip(nics, leaf_of_nic, strict=True):
        if leaf not in below:
            links.vertex(leaf, "switch", node=-1)
        below[leaf] = below.get(leaf, 0.0) + nic.bandwidth_bytes_per_s
        links.join(nic.name, leaf, nic.bandwidth_bytes_per_s, fabric.latency_s / 4, "NIC")
    if len(below) > 1 and math.isfinite(fabric.oversubscription):
        spine = links.vertex("spine", "switch", node=-1)
        for leaf, bandwidth in below.items():
            links.join(leaf, spine, bandwidth / fabric.oversubscription, fabric.spine_latency_s, "spine")


def _torus(links: Links, nics: Sequence[_Nic], fabric: FabricSpec, nodes: int) -> None:
    if not fabric.shape or math.prod(fabric.shape) != nodes or min(fabric.shape) < 2:
        raise ProfileError(
            f"torus fabric {fabric.shape} does not hold {nodes} nodes; give dimensions of 2 or more with this product"
        )
    routers = [links.vertex(f"router{node}", "switch", node=-1) for node in range(nodes)]
    inside = [0.0] * nodes
    for nic in nics:
        inside[nic.node] += nic.bandwidth_bytes_per_s
        links.join(nic.name, routers[nic.node], nic.bandwidth_bytes_per_s, fabric.latency_s / 8, "NIC")
    degree = sum(min(2, size - 1) for size in fabric.shape)
    for one, other in torus_edges(fabric.shape):
        capacity = min(inside[one], inside[other]) / degree
        links.join(routers[one], routers[other], capacity, fabric.latency_s / 4, "torus")


_FABRICS = {"fat-tree": _fat_tree, "rail-optimised": _rails, "torus": _torus}


def _known(name: str, fabric: FabricSpec) -> str:
    if fabric.kind not in _FABRICS:
        raise ProfileError(f"cluster {name}: fabric {fabric.kind!r} is not known; use one of {', '.join(_FABRICS)}")
    if not fabric.oversubscription >= 1 or fabric.nodes_per_leaf < 0:
        raise ProfileError(
            f"cluster {name}: oversubscription {fabric.oversubscription}, {fabric.nodes_per_leaf} nodes a leaf; "
            f"the first is at least 1, the second at least 0"
        )
    return fabric.kind


def topology_graph(hardware: Hardware, devices: int) -> Topology:
    """Graph of `devices` devices.

    Bandwidths and latencies are those of the profile's levels, divided among links as the profile's ``topology.node``
    and ``topology.fabric`` say. A profile without them gets one switch for each unit of each level.
    """
    hardware.check_devices(devices)
    if hardware.node is None:
        return _level_tree(hardware, devices)
    spec = unit_spec(hardware)
    nodes = -(-devices // spec.devices)
    return cluster_topology(hardware.name, [spec] * nodes, fabric_spec(hardware), devices)


def check_graph(hardware: Hardware) -> None:
    """Raise ProfileError where no graph can be built: a wrong node, or links without latency that make a cycle."""
    if hardware.node is None:
        return
    spec = unit_spec(hardware)
    check_spec(spec)
    fabric = fabric_spec(hardware)
    if spec.latency_s == 0 or spec.host_latency_s == 0:
        node_topology(spec)
    if spec.nics and fabric.latency_s == 0:
        # Two machines close every kind of cycle that runs through the fabric.
        cluster_topology(hardware.name, [spec] * 2, fabric)


def unit_spec(hardware: Hardware) -> NodeSpec:
    """The machine whose copies the fabric joins: a node, or a whole supernode."""
    graph = hardware.node
    if graph is None:
        raise ProfileError(f"profile {hardware.name} does not say how a node is joined; give it topology.node")
    inner, outer = _split(hardware)
    size, first = inner[-1].size, inner[0]
    through_host = inner[1] if len(inner) > 1 else None
    nics = graph.nics * (size // hardware.devices_per_node)
    return NodeSpec(
        kind=graph.kind,
        devices=size,
        bandwidth_bytes_per_s=first.bandwidth_bytes_per_s,
        latency_s=first.latency_s,
        host_bandwidth_bytes_per_s=(
            through_host.bandwidth_bytes_per_s if through_host else graph.host_bandwidth_bytes_per_s
        ),
        host_latency_s=through_host.latency_s if through_host else graph.host_latency_s,
        group=graph.group,
        shape=graph.shape,
        nics=nics if outer else 0,
        nic_bandwidth_bytes_per_s=outer[0].bandwidth_bytes_per_s * size / nics if outer else 0.0,
        profile=hardware.name,
    )


def fabric_spec(hardware: Hardware) -> FabricSpec:
    """The fabric of the levels beyond a node; a second such level is the spine."""
    inner, outer = _split(hardware)
    kind = hardware.fabric.kind if hardware.fabric else "fat-tree"
    if not outer:
        return FabricSpec(kind=kind, latency_s=inner[-1].latency_s)
    if len(outer) > 2:
        raise ProfileError(
            f"profile {hardware.name} has {len(outer)} levels beyond its nodes; a fabric has leaves and a spine: use 2"
        )
    leaf, spine = outer[0], outer[-1]
    return FabricSpec(
        kind=kind,
        latency_s=leaf.latency_s,
        nodes_per_leaf=leaf.size // inner[-1].size if len(outer) == 2 else 0,
        oversubscription=max(1.0, leaf.bandwidth_bytes_per_s / spine.bandwidth_bytes_per_s),
        rails=hardware.node.nics if hardware.node else 0,
        spine_latency_s=max(0.0, spine.latency_s - leaf.latency_s) / 2,
    )


def _split(hardware: Hardware) -> tuple[list[Level], list[Level]]:
    """Levels inside a unit, and those of the fabric."""
    unit = max(hardware.devices_per_node, hardware.levels[0].size)
    inner = [level for level in hardware.levels if level.size <= unit]
    return inner, list(hardware.levels[len(inner) :])


def _level_tree(hardware: Hardware, devices: int) -> Topology:
    """One switch for each unit of each level; a link carries what all devices below it send together."""
    links = Links()
    below: dict[Vertex, range] = {}
    for device in range(devices):
        rank = device % hardware.devices_per_node
        links.device(device, node=device // hardware.devices_per_node, rank=rank, profile=hardware.name)
        below[device] = range(device, device + 1)
    for level in hardware.levels:
        units: dict[Vertex, range] = {}
        for vertex, span in below.items():
            number = span.start // level.size
            switch = f"{level.name}{number}"
            if switch not in units:
                units[switch] = span
                machine = span.start // hardware.devices_per_node if level.size <= hardware.devices_per_node else -1
                links.vertex(switch, "switch", node=machine)
            units[switch] = range(units[switch].start, span.stop)
            links.join(vertex, switch, level.bandwidth_bytes_per_s * len(span), level.latency_s / 2, level.name)
        below = units
    return Topology(hardware.name, links)
