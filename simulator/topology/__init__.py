"""Where devices sit and what joins them: groups by level, and the graph of devices, switches, NICs and links."""

from __future__ import annotations

from simulator.topology.cluster import FabricSpec, check_graph, cluster_topology, fabric_spec, topology_graph, unit_spec
from simulator.topology.graph import Topology
from simulator.topology.groups import (
    GroupShape,
    axis_groups,
    group_shape,
    level_of_axis,
    meeting_distance,
    neighbour_distances,
)
from simulator.topology.nodes import NodeSpec, node_topology
from simulator.topology.sharing import link_use, node_shares, payload_rate, ring_bandwidth, shared_links

__all__ = [
    "FabricSpec",
    "GroupShape",
    "NodeSpec",
    "Topology",
    "axis_groups",
    "check_graph",
    "cluster_topology",
    "fabric_spec",
    "group_shape",
    "level_of_axis",
    "link_use",
    "meeting_distance",
    "neighbour_distances",
    "node_shares",
    "node_topology",
    "payload_rate",
    "ring_bandwidth",
    "shared_links",
    "topology_graph",
    "unit_spec",
]
