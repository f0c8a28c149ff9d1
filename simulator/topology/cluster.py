"""The topology of a hardware profile: the graph of its nodes and fabric with the profile's own numbers."""

from __future__ import annotations

from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level
from simulator.topology.fabrics import FabricSpec, cluster_topology
from simulator.topology.graph import Links, Topology, Vertex
from simulator.topology.nodes import NodeSpec, check_spec, node_topology


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
