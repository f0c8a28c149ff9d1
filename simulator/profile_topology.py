"""The topology part of a profile: levels of bandwidth, and the graphs of a node and of the fabric."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from simulator.hardware import FabricGraph, Level, NodeGraph
from simulator.profile_parts import Count, Name, NonNegative, Part, Positive, Sourced
from simulator.program import Collective


class LevelPart(Part):
    """One level of the topology."""

    name: Name
    size: Sourced[Count]
    bandwidth_bytes_per_s: Sourced[Positive]
    latency_s: Sourced[NonNegative]
    reduction_bandwidth_bytes_per_s: Sourced[Positive] | None = None


class NodePart(Part):
    """What joins the devices of a node, and which of them share a NIC."""

    kind: Sourced[
        Literal[
            "nvswitch", "hybrid-cube-mesh", "ring", "full-mesh", "hccs-quads", "nvlink-islands",
            "pcie-tree", "supernode", "torus",
        ]
    ]  # fmt: skip
    nics: Sourced[Count]
    group: Sourced[Count] | None = None
    shape: Sourced[Annotated[list[Count], Field(min_length=1, max_length=3)]] | None = None
    host_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    host_latency_s: Sourced[NonNegative] | None = None


class FabricPart(Part):
    """What joins the nodes."""

    kind: Sourced[Literal["fat-tree", "rail-optimised"]]
    nodes_per_leaf: Sourced[Count] | None = None
    oversubscription: Sourced[Annotated[float, Field(ge=1, lt=1e6)]] | None = None


class TopologyPart(Part):
    """Which device counts exist and what joins them, innermost level first."""

    max_devices: Sourced[Count]
    devices_per_node: Sourced[Count]
    node_device_counts: Sourced[Annotated[list[Count], Field(min_length=1)]]
    collective_overhead_s: Sourced[NonNegative] | None = None
    host_memory_bytes: Sourced[Positive] | None = None
    host_memory_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    disk_bandwidth_bytes_per_s: Sourced[Positive] | None = None
    collective_algorithms: (
        Sourced[list[Literal["tree", "hierarchical", "switch", "halving-doubling", "mesh", "ring-halving"]]] | None
    ) = None
    pinned_algorithms: Sourced[dict[Collective, Annotated[str, Field(max_length=100)]]] | None = None
    levels: Annotated[list[LevelPart], Field(min_length=1, max_length=8)]
    node: NodePart | None = None
    fabric: FabricPart | None = None

    @model_validator(mode="after")
    def _sizes_agree(self) -> TopologyPart:
        sizes = [level.size.value for level in self.levels]
        if any(inner >= outer for inner, outer in itertools.pairwise(sizes)):
            raise ValueError(f"level sizes must grow from the innermost level outwards, got {sizes}")
        if sizes[-1] != self.max_devices.value:
            raise ValueError(
                f"the outermost level holds {sizes[-1]} devices, max_devices says {self.max_devices.value}"
            )
        if self.devices_per_node.value > self.max_devices.value:
            raise ValueError("devices_per_node must not exceed max_devices")
        _check_whole_units(sizes, self.devices_per_node.value)
        counts = self.node_device_counts.value
        if counts != sorted(set(counts)) or counts[-1] > self.devices_per_node.value:
            raise ValueError("node_device_counts must ascend and not exceed devices_per_node")
        if len({level.name for level in self.levels}) != len(self.levels):
            raise ValueError("level names must differ")
        return self

    @model_validator(mode="after")
    def _graphs_agree(self) -> TopologyPart:
        if self.fabric is not None and self.node is None:
            raise ValueError("fabric needs node: say what joins the devices of a node and how many NICs it has")
        if self.node is not None and self.devices_per_node.value % self.node.nics.value:
            raise ValueError(
                f"node.nics {self.node.nics.value} does not divide devices_per_node {self.devices_per_node.value}; "
                f"equal runs of devices share a NIC"
            )
        if self.fabric is not None and (self.fabric.nodes_per_leaf is None) != (self.fabric.oversubscription is None):
            raise ValueError("fabric.nodes_per_leaf and fabric.oversubscription belong together; give both or neither")
        if self.fabric is not None and self.fabric.nodes_per_leaf is not None:
            _check_leaf([level.size.value for level in self.levels], self._leaf(self.fabric.nodes_per_leaf.value))
        return self

    @model_validator(mode="after")
    def _pinned_exist(self) -> TopologyPart:
        from simulator.collectives import ALGORITHMS

        for collective, name in self.pinned_algorithms.value.items() if self.pinned_algorithms else ():
            if name not in ALGORITHMS[collective]:
                known = ", ".join(ALGORITHMS[collective])
                raise ValueError(f"pinned_algorithms: {collective.value} has no algorithm {name!r}; use one of {known}")
        return self

    def _leaf(self, nodes: int) -> int:
        return nodes * self.devices_per_node.value

    def hardware_levels(self) -> tuple[Level, ...]:
        """Levels; an oversubscribed fabric makes two of the outermost, its leaves and its spine."""
        levels = tuple(map(_level, self.levels))
        fabric = self.fabric
        if fabric is None or fabric.oversubscription is None or fabric.nodes_per_leaf is None:
            return levels
        outer = levels[-1]
        size = self._leaf(fabric.nodes_per_leaf.value)
        leaf = Level(
            name=f"{outer.name} leaf",
            size=size,
            bandwidth_bytes_per_s=outer.bandwidth_bytes_per_s,
            latency_s=outer.latency_s,
        )
        bandwidth = outer.bandwidth_bytes_per_s / fabric.oversubscription.value
        spine = Level(name=outer.name, size=outer.size, bandwidth_bytes_per_s=bandwidth, latency_s=outer.latency_s)
        return (*levels[:-1], leaf, spine)

    def graphs(self) -> dict[str, Any]:
        """Graphs of the node and of the fabric, and pinned algorithms, as fields of `Hardware`."""
        graphs: dict[str, Any] = {}
        if self.pinned_algorithms is not None:
            graphs["pinned_algorithms"] = self.pinned_algorithms.value
        if self.node is not None:
            graphs["node"] = NodeGraph(**_values(self.node))
        if self.fabric is not None:
            graphs["fabric"] = FabricGraph(kind=self.fabric.kind.value)
        return graphs


def _values(part: NodePart) -> dict[str, Any]:
    given = {name: entry.value for name, entry in part if entry is not None}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _level(part: LevelPart) -> Level:
    reduction = part.reduction_bandwidth_bytes_per_s
    return Level(
        name=part.name,
        size=part.size.value,
        bandwidth_bytes_per_s=part.bandwidth_bytes_per_s.value,
        latency_s=part.latency_s.value,
        reduction_bandwidth_bytes_per_s=reduction.value if reduction else 0.0,
    )


def _check_leaf(sizes: list[int], leaf: int) -> None:
    inside = sizes[-2] if len(sizes) > 1 else 1
    if not inside < leaf < sizes[-1] or sizes[-1] % leaf or leaf % inside:
        raise ValueError(
            f"fabric.nodes_per_leaf makes leaves of {leaf} devices; a leaf holds several units of {inside} and divides "
            f"the outermost level of {sizes[-1]}: change nodes_per_leaf or max_devices"
        )


def _check_whole_units(sizes: list[int], node: int) -> None:
    """A level holds whole units of the one inside it, and a node is such a unit or lies inside the innermost."""
    for place, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        if outer % inner:
            near = -(-outer // inner) * inner
            raise ValueError(
                f"levels.{place}.size {inner} does not divide levels.{place + 1}.size {outer}; a level holds whole "
                f"units of the one inside it: make {outer} a multiple of {inner}, for example {near}"
            )
    if node not in sizes and sizes[0] % node:
        known = ", ".join(map(str, sizes))
        raise ValueError(
            f"devices_per_node {node} is not the size of a level ({known}) and does not divide levels.0.size "
            f"{sizes[0]}; a node is a unit of a level or lies inside the innermost: use {known} or a divisor of "
            f"{sizes[0]}"
        )
