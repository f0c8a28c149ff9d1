"""Where devices sit and what joins them: groups by level, and the graph of devices, switches, NICs and links."""

from __future__ import annotations

from simulator.topology.graph import Topology
from simulator.topology.groups import GroupShape, axis_groups, group_shape, level_of_axis

__all__ = [
    "GroupShape",
    "Topology",
    "axis_groups",
    "group_shape",
    "level_of_axis",
]
