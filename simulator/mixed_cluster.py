"""Clusters of several device types: nodes of different profiles joined by one fabric.

A YAML file (docs/topology.md) names profiles and how many nodes of each. Groups that span types move in step, so their
collectives take the slowest member's links and their kernels the slowest member's time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level, is_profile_path
from simulator.input_file import FileKind
from simulator.profile_file import PROFILE, parse_profile
from simulator.profile_parts import Count, NonNegative, Part
from simulator.program import Kernel
from simulator.topology import FabricSpec, Topology, cluster_topology, fabric_spec, unit_spec

FloatArray = npt.NDArray[np.float64]
MAX_NODES = 2048
CLUSTER = FileKind(name="cluster", remedy="see docs/topology.md for the format", error=ProfileError)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedCluster:
    """Nodes of several profiles in the order of their device numbers, and the fabric that joins them.

    Attributes
    ----------
    nodes
        the profile of each node (of each supernode, where that is what the fabric joins).
    profiles
        name or path of each node's profile, as `simulator.profiles.load_profile` takes it; empty where unknown.
    """

    name: str
    nodes: tuple[Hardware, ...]
    fabric: FabricSpec
    profiles: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        """Number of devices."""
        return sum(unit_spec(hardware).devices for hardware in self.nodes)

    def topology(self) -> Topology:
        """Graph whose devices carry the name of their profile."""
        return cluster_topology(self.name, [unit_spec(hardware) for hardware in self.nodes], self.fabric)

    def node_of(self, device: int) -> int:
        """Number of the node that holds `device`."""
        first = 0
        for node, hardware in enumerate(self.nodes):
            first += unit_spec(hardware).devices
            if 0 <= device < first:
                return node
        raise ProfileError(f"cluster {self.name} has {first} devices and no device {device}; use 0 to {first - 1}")


class _FabricPart(Part):
    kind: Literal["fat-tree", "rail-optimised", "torus"] = "fat-tree"
    latency_s: NonNegative | None = None
    nodes_per_leaf: Count | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    shape: list[Count] = Field(default_factory=list)


class _NodesPart(Part):
    profile: Annotated[str, Field(min_length=1, max_length=1000)]
    count: Annotated[int, Field(ge=1, le=MAX_NODES)]


class _ClusterPart(Part):
    format: Literal["meshwright-cluster"]
    version: Annotated[int, Field(ge=1, le=1)]
    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    nodes: Annotated[list[_NodesPart], Field(min_length=1, max_length=1000)]
    fabric: _FabricPart = _FabricPart()


def parse_cluster(content: bytes, file: str, load: Callable[[str], Hardware]) -> MixedCluster:
    """Cluster from the bytes of `file`; paths of profiles in it are relative to it, `load` knows those by name."""
    try:
        part = _ClusterPart.model_validate_json(json.dumps(CLUSTER.yaml(content, file)))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ProfileError(f"cluster {file}: {place}: {first['msg']}; {CLUSTER.remedy}") from None
    except (TypeError, ValueError) as error:
        raise ProfileError(
            f"cluster {file} holds a value that is no text, number, list or mapping ({error}); {CLUSTER.remedy}"
        ) from None
    folder = Path(file).expanduser().parent
    profiles = tuple(_place(entry.profile, folder) for entry in part.nodes for _ in range(entry.count))
    read = {
        profile: (parse_profile(PROFILE.read(profile), profile) if is_profile_path(profile) else load(profile))
        for profile in dict.fromkeys(profiles)
    }
    nodes = tuple(read[profile] for profile in profiles)
    fabric = part.fabric
    latency = fabric.latency_s
    if latency is None:
        latency = max(fabric_spec(hardware).latency_s for hardware in nodes)
    cluster = MixedCluster(
        name=part.name,
        nodes=nodes,
        profiles=profiles,
        fabric=FabricSpec(
            kind=fabric.kind,
            latency_s=latency,
            nodes_per_leaf=fabric.nodes_per_leaf or 0,
            oversubscription=fabric.oversubscription,
            shape=tuple(fabric.shape),
        ),
    )
    cluster.topology()  # checks the fabric
    return cluster


def _place(profile: str, folder: Path) -> str:
    """A profile by name, or by path from where the program runs."""
    return str(folder / Path(profile).expanduser()) if is_profile_path(profile) else profile


def pacing_hardware(cluster: MixedCluster) -> Hardware:
    """The profile of a job whose devices all do the same in step.

    It has the least memory, the slowest links of every level, and the kernels of the type whose matrix products are
    slowest.
    """
    types = list(dict.fromkeys(cluster.nodes))
    links = slowest_links(cluster, range(len(cluster.nodes)))
    slowest = min(types, key=matrix_rate)
    members = [
        (name, sum(unit_spec(hardware).devices for hardware in alike))
        for name, alike in itertools.groupby(cluster.nodes, key=lambda hardware: hardware.device_name)
    ]
    numbers = repr((cluster.fabric, [hardware.hash for hardware in cluster.nodes]))
    return replace(
        with_links(slowest, links),
        name=cluster.name,
        hash=hashlib.sha256(numbers.encode()).hexdigest(),
        description=f"Nodes of {', '.join(hardware.name for hardware in types)}, joined by one fabric, in step.",
        device_memory_bytes=min(hardware.device_memory_bytes for hardware in types),
        members=tuple(members),
        uncertainty=max((hardware.uncertainty for hardware in types), key=lambda interval: interval.high),
    )


def with_links(hardware: Hardware, links: Hardware) -> Hardware:
    """`hardware` joined as `links` is."""
    return replace(
        hardware,
        hash=hashlib.sha256(f"{hardware.hash} {links.hash}".encode()).hexdigest(),
        levels=links.levels,
        node=links.node,
        fabric=links.fabric,
        max_devices=links.max_devices,
        devices_per_node=links.devices_per_node,
        node_device_counts=links.node_device_counts,
        collective_overhead_s=links.collective_overhead_s,
        collective_algorithms=links.collective_algorithms,
        collective_tables=links.collective_tables,
    )


def matrix_rate(hardware: Hardware) -> float:
    """FLOP/s that matrix products reach on a device in its usual precision."""
    return hardware.peak(hardware.default_precision) * hardware.kernels[Kernel.MATMUL].compute_efficiency


def slowest_links(cluster: MixedCluster, nodes: Sequence[int]) -> Hardware:
    """A profile of two levels, node and fabric, each with the slowest numbers of `nodes`.

    Its devices per node are the greatest common divisor of the nodes' devices; everything else is that of the first
    node. Nodes below different leaves have the bandwidth of the links to the spine, all leaves sending upwards.
    """
    return _slowest(cluster, frozenset(nodes))


@lru_cache(maxsize=256)
def _slowest(cluster: MixedCluster, nodes: frozenset[int]) -> Hardware:
    types = list(dict.fromkeys(cluster.nodes[node] for node in sorted(nodes)))
    if len(nodes) == 1:
        return types[0]
    specs = [unit_spec(hardware) for hardware in types]
    if not all(spec.nics for spec in specs):
        raise ProfileError(f"cluster {cluster.name}: a profile has no level beyond its node; it cannot join a fabric")
    size = math.gcd(*(spec.devices for spec in specs))
    inner = Level(
        name="node",
        size=size,
        bandwidth_bytes_per_s=min(spec.bandwidth_bytes_per_s for spec in specs),
        latency_s=max(spec.latency_s for spec in specs),
    )
    port = min(spec.nic_bandwidth_bytes_per_s * spec.nics / spec.devices for spec in specs)
    per_leaf = cluster.fabric.nodes_per_leaf or len(cluster.nodes)
    if len({node // per_leaf for node in nodes}) > 1:
        port /= cluster.fabric.oversubscription
    whole = sum(unit_spec(hardware).devices for hardware in cluster.nodes)
    outer = Level(name="fabric", size=whole, bandwidth_bytes_per_s=port, latency_s=cluster.fabric.latency_s)
    common = [name for name in types[0].collective_algorithms if all(name in t.collective_algorithms for t in types)]
    return replace(
        types[0],
        name=f"{cluster.name}: {', '.join(hardware.name for hardware in types)}",
        hash="+".join(hardware.hash for hardware in types),
        levels=(inner, outer) if size > 1 else (outer,),
        node=None,
        fabric=None,
        max_devices=whole,
        devices_per_node=size,
        node_device_counts=tuple(range(1, size + 1)),
        collective_overhead_s=max(hardware.collective_overhead_s for hardware in types),
        collective_algorithms=tuple(common),
        collective_tables=(),
    )
