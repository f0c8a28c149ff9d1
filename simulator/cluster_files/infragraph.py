"""InfraGraph: a cluster as devices with components and links, instances of them, and what connects these.

Read: how many hosts there are, how the accelerators (``xpu``) of one are joined, and what its network ports carry; the
accelerator itself is the profile's. Written: the node of a profile, with the bandwidth that messages reach. Bandwidths
of a file count as what messages reach.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level
from simulator.input_file import FileKind
from simulator.topology.cluster import unit_spec
from simulator.topology.nodes import devices_of_nic, node_topology

INFRAGRAPH = FileKind(
    name="InfraGraph",
    remedy="give devices, instances and connections, see docs/topology.md",
    max_bytes=16 << 20,
    error=ProfileError,
)
RATES: Mapping[str, float] = {"giga_bytes_per_second": 1e9, "giga_bits_per_second": 1e9 / 8}
"""Bytes/s of each unit of ``bandwidth``."""
MOST = 65_536
"""The largest count of components or instances."""
_TYPES: Mapping[str, str] = {"device": "xpu", "switch": "switch", "host": "cpu", "nic": "nic"}


def is_infragraph(content: bytes) -> bool:
    """Whether a file has what an InfraGraph has."""
    return b"instances" in content and b"components" in content


def infragraph(hardware: Hardware, devices: int) -> dict[str, Any]:
    """The InfraGraph of whole nodes of a profile with so many devices, joined by one switch.

    Raises
    ------
    ProfileError
        The profile does not say how a node is joined, or `devices` are no whole nodes.
    """
    spec = unit_spec(hardware)
    hardware.check_devices(devices)
    if devices % spec.devices:
        raise ProfileError(f"{devices} devices are no whole nodes of {spec.devices}; use a multiple")
    graph, count = node_topology(spec), devices // spec.devices
    names: dict[object, str] = {}
    kinds: Counter[str] = Counter()
    for vertex, data in graph.graph.nodes(data=True):
        kind = _TYPES[data["kind"]]
        names[vertex] = f"{kind}.{kinds[kind]}"
        kinds[kind] += 1
    links: dict[tuple[str, float], str] = {}
    inside: list[str] = []
    for (one, other), capacity in zip(graph.links, graph.capacities, strict=True):
        if names[one] < names[other]:
            kind = str(graph.graph.edges[one, other]["kind"])
            link = links.setdefault((kind, capacity), f"{kind.lower()}{len(links)}")
            inside.append(f"{names[one]}.{link}.{names[other]}")
    rate = spec.nic_bandwidth_bytes_per_s
    for nic in range(spec.nics):
        link = links.setdefault(("port", rate), "port")
        inside += [f"xpu.{device}.{link}.nic.{nic}" for device in devices_of_nic(spec, nic)]
    kinds["nic"] = spec.nics
    node = {
        "name": "node",
        "components": [
            {"name": kind, "count": size, "type": kind, **({"external": True} if kind == "nic" else {})}
            for kind, size in kinds.items()
            if size
        ],
        "links": [_link(name, capacity) for (_, capacity), name in links.items()],
        "connections": inside,
    }
    ports = [(host, nic) for host in range(count) for nic in range(spec.nics)]
    network = {"name": "network", "components": [{"name": "port", "count": max(1, len(ports)), "type": "switch"}]}
    return {
        "name": hardware.name,
        "description": f"{count} nodes of {hardware.name}; bandwidths are those that messages reach",
        "devices": [node, network],
        "instances": [
            {"name": "host", "device": "node", "count": count},
            {"name": "net", "device": "network", "count": 1},
        ],
        "links": [_link("network", rate)] if ports else [],
        "connections": [f"host.{host}.nic.{nic}.network.net.0.port.{n}" for n, (host, nic) in enumerate(ports)],
    }


def _link(name: str, capacity: float) -> dict[str, Any]:
    return {"name": name, "bandwidth": {"choice": "giga_bytes_per_second", "giga_bytes_per_second": capacity / 1e9}}


def infragraph_hardware(content: bytes, file: str, profile: str, load: Callable[[str], Hardware]) -> Hardware:
    """Hardware of the cluster that an InfraGraph describes, of the devices of a profile.

    Raises
    ------
    ProfileError
        The file is none, or its accelerators are joined in a way that is not simulated.
    """
    if not profile:
        raise ProfileError(
            f"{file} does not say which accelerator it has; write its profile before it: --hw dgx-h100@{file}"
        )
    raw = INFRAGRAPH.json(content, file) if content.lstrip()[:1] == b"{" else INFRAGRAPH.yaml(content, file)
    hardware = load(profile)
    if hardware.node is None:
        raise ProfileError(f"profile {hardware.name} does not say how a node is joined; use a profile like dgx-h100")
    try:
        host, hosts = _host(raw)
        devices = _components(host, "xpu")
        size, nics = sum(devices.values()), sum(_components(host, "nic").values())
        kind, bandwidth = _inside(host, devices, size)
        ports = _ports(raw, [item["name"] for item in raw["instances"] if item["device"] == host["name"]])
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ProfileError(f"{file} is no InfraGraph: {type(error).__name__} {error}; {INFRAGRAPH.remedy}") from None
    first = replace(
        hardware.levels[0], size=size, bandwidth_bytes_per_s=bandwidth or hardware.levels[0].bandwidth_bytes_per_s
    )
    if kind != "nvswitch":
        first = replace(first, reduction_bandwidth_bytes_per_s=0.0)
    outer = hardware.levels[-1]
    rate = ports / (hosts * size) if ports else outer.bandwidth_bytes_per_s
    levels: tuple[Level, ...] = (first,)
    if hosts > 1:
        levels = (first, replace(outer, size=hosts * size, bandwidth_bytes_per_s=rate))
    shared = max(n for n in range(1, size + 1) if size % n == 0 and n <= (nics or 1))
    algorithms = tuple(name for name in hardware.collective_algorithms if kind == "nvswitch" or name != "switch")
    digest = hashlib.sha256(f"{hardware.hash} {kind} {size} {hosts} {bandwidth} {rate}".encode()).hexdigest()
    return replace(
        hardware,
        name=f"{hardware.name}@{PurePath(file).stem}",
        hash=digest,
        devices_per_node=size,
        node_device_counts=tuple(range(1, size + 1)),
        max_devices=hosts * size,
        node=replace(hardware.node, kind=kind, nics=shared),
        levels=levels,
        collective_algorithms=algorithms,
        collective_tables=(),
    )


def _host(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], int]:
    """The device with accelerators, and how many instances of it there are."""
    found = [device for device in raw["devices"] if _components(device, "xpu")]
    if len(found) != 1:
        raise ValueError(f"{len(found)} devices have components of type xpu, and one is simulated")
    return found[0], sum(_count(item) for item in raw["instances"] if item["device"] == found[0]["name"])


def _components(device: Mapping[str, Any], kind: str) -> dict[str, int]:
    return {item["name"]: _count(item) for item in device.get("components", []) if item.get("type") == kind}


def _count(item: Mapping[str, Any]) -> int:
    count = item["count"]
    if not isinstance(count, int) or not 1 <= count <= MOST:
        raise ValueError(f"{item['name']} has count {count!r}; give a whole number from 1 to {MOST}")
    return count


def _rates(links: Any) -> dict[str, float]:
    """Bytes/s of links by name."""
    found = {}
    for link in links or []:
        unit = link["bandwidth"]["choice"]
        if unit not in RATES:
            raise ValueError(f"link {link['name']} has bandwidth in {unit}; use {' or '.join(RATES)}")
        rate = float(link["bandwidth"][unit]) * RATES[unit]
        if not 0 < rate < math.inf:
            raise ValueError(f"link {link['name']} has bandwidth {link['bandwidth'][unit]}; give a number above 0")
        found[link["name"]] = rate
    return found


def _inside(host: Mapping[str, Any], devices: Mapping[str, int], size: int) -> tuple[str, float]:
    """Kind of the node, and bytes/s that an accelerator sends over all its links inside."""
    rates, switches = _rates(host.get("links")), _components(host, "switch")
    sent: defaultdict[tuple[str, str], float] = defaultdict(float)
    pairs: set[tuple[tuple[str, str], tuple[str, str]]] = set()
    below: defaultdict[tuple[str, str], set[tuple[str, str]]] = defaultdict(set)
    for one, link, other in _connections(host):
        ends = sorted((one, other), key=lambda end: end[0] not in devices)
        if ends[0][0] not in devices:
            continue
        if ends[1][0] in devices:
            pairs.add((min(ends), max(ends)))
            sent[ends[0]] += rates[link]
            sent[ends[1]] += rates[link]
        elif ends[1][0] in switches:
            below[ends[1]].add(ends[0])
            sent[ends[0]] += rates[link]
    bandwidth = min(sent.values(), default=0.0)
    if pairs and len(pairs) == size * (size - 1) // 2:
        return "full-mesh", bandwidth
    if not pairs and below and all(len(members) == size for members in below.values()):
        return "nvswitch", bandwidth
    if not pairs:
        return "pcie-tree", bandwidth
    raise ValueError(f"{len(pairs)} pairs of {size} accelerators are joined: no full mesh, and no switch joins all")


def _connections(host: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], str, tuple[str, str]]]:
    for text in host.get("connections", []):
        one, number, link, other, place = text.split(".")
        yield (one, number), link, (other, place)


def _ports(raw: Mapping[str, Any], instances: list[str]) -> float:
    """Bytes/s of all connections that leave a host."""
    rates = _rates(raw.get("links"))
    words = [text.split(".") for text in raw.get("connections", [])]
    return sum(rates[part[4]] for part in words if part[0] in instances or part[5] in instances)
