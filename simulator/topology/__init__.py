"""Where devices sit and what joins them: groups by level, and the graph of devices, switches, NICs and links."""

from __future__ import annotations

from simulator.topology.cluster import fabric_spec, topology_graph, unit_spec
from simulator.topology.fabrics import FabricSpec, cluster_topology
from simulator.topology.graph import Topology
from simulator.topology.groups import GroupShape, axis_groups, group_shape, level_of_axis
from simulator.topology.nodes import NodeSpec, node_topology

__all__ = [
    "FabricSpec",
    "GroupShape",
    "NodeSpec",
    "Topology",
    "axis_groups",
    "cluster_topology",
    "fabric_spec",
    "group_shape",
    "level_of_axis",
    "node_topology",
    "topology_graph",
    "unit_spec",
]
