"""The hardware that a file describes: the profile of its chip, cut to the devices and servers that are there."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import PurePath

from simulator.cluster_files.rank_table import RankTable, parse_rank_table
from simulator.errors import ProfileError
from simulator.hardware import Hardware, Level

CHIP_PROFILES = {
    "910": "ascend910-atlas800",
    "910a": "ascend910-atlas800",
    "910b": "ascend910b-atlas800t-a2",
    "910c": "cloudmatrix384",
}
SERVER_TYPES = {"A2": "ascend910b-atlas800t-a2", "A3": "cloudmatrix384"}
"""Profiles by the generation in a server's ``hardware_type``, such as 800T-A2-64G."""
SUPERNODE_PROFILE = "cloudmatrix384"
QUAD = 4
MAX_SERVERS = {"hccs-quads": 512, "full-mesh": 1024}


def described_hardware(content: bytes, file: str, profile: str, load: Callable[[str], Hardware]) -> Hardware:
    """Hardware of the cluster that the rank table in `content` describes.

    Parameters
    ----------
    profile
        name or path of the profile of its chip; empty where the table says which chip it is.
    load
        reads a profile.

    Raises
    ------
    ProfileError
        the table is wrong, breaks a rule of HCCL, or does not say its chip.
    """
    table = parse_rank_table(content, file)
    hardware = load(profile or _profile_of(table, file))
    check_rules(table, hardware, file)
    return _cut(hardware, table, PurePath(file).stem)


def check_rules(table: RankTable, hardware: Hardware, file: str) -> None:
    """Raise ProfileError where HCCL would not take `table` for servers of `hardware`."""
    for problem in _problems(table, hardware):
        raise ProfileError(f"rank table {file}: {problem}")


def _profile_of(table: RankTable, file: str) -> str:
    chip = table.chip.lower().removeprefix("ascend").strip()
    if chip in CHIP_PROFILES:
        return CHIP_PROFILES[chip]
    generation = next((name for name in SERVER_TYPES if name.lower() in chip.split("-")), None)
    if generation is not None:
        return SERVER_TYPES[generation]
    if table.version == "2.0":
        raise ProfileError(
            f"rank table {file}: tables of version 2.0 are of Atlas 350, 850 or 950, which no profile describes; write "
            f"the profile of the chip before it, for example --hw my-profile.yaml@{file}"
        )
    if table.super_pods:
        return SUPERNODE_PROFILE
    said = f"its chip_info {table.chip!r} is not known" if table.chip else "it does not say which chip it has"
    raise ProfileError(
        f"rank table {file}: {said}; write the profile of the chip before it, for example "
        f"--hw ascend910b-atlas800t-a2@{file} (chips known: {', '.join(CHIP_PROFILES)})"
    )


def _problems(table: RankTable, hardware: Hardware) -> Iterator[str]:
    """What HCCL forbids; rules from its documentation of rank tables and of Atlas servers."""
    if not hardware.device_name.startswith("Ascend") or hardware.node is None:
        yield (
            f"profile {hardware.name} has devices {hardware.device_name}; rank tables describe Ascend servers: use one "
            f"of {', '.join(dict.fromkeys(CHIP_PROFILES.values()))}"
        )
        return
    whole = hardware.devices_per_node
    for device in table.devices:
        if device.device >= whole:
            yield (
                f"device_id {device.device} of server {device.server} does not exist; a server of {hardware.name} has "
                f"devices 0 to {whole - 1}"
            )
    counts = {server: len(table.of(server)) for server in table.servers}
    least, most = min(counts, key=lambda name: counts[name]), max(counts, key=lambda name: counts[name])
    if counts[least] != counts[most]:
        yield (
            f"server {least} has {counts[least]} devices and server {most} {counts[most]}; all servers have equally "
            f"many: take some out"
        )
    yield from _problems_of_kind(table, hardware, counts[most])
    limit = MAX_SERVERS.get(hardware.node.kind)
    if limit is not None and len(counts) > limit:
        yield f"{len(counts)} servers; HCCL joins at most {limit} servers of {hardware.name}"
    sizes = {len(pod) for pod in table.super_pods}
    if len(sizes) > 1:
        yield (
            f"supernodes have {', '.join(map(str, sorted(sizes)))} servers; the simulation takes supernodes of equally "
            f"many servers: give each as many as the least"
        )


def _problems_of_kind(table: RankTable, hardware: Hardware, count: int) -> Iterator[str]:
    kind = hardware.node.kind if hardware.node else ""
    if kind == "hccs-quads":
        if len(table.servers) > 1 and count != hardware.devices_per_node:
            yield (
                f"{len(table.servers)} servers of {count} devices; several servers of {hardware.name} take part with "
                f"all {hardware.devices_per_node}: use multiples of {hardware.devices_per_node} devices"
            )
        elif count not in hardware.node_device_counts:
            yield f"{count} devices on one server; HCCL takes {_list(hardware.node_device_counts)}"
        yield from _quads(table, count)
    if kind == "supernode" and count > 1 and count % 2:
        yield f"{count} devices on a server; a processor has two dies, and both take part: use an even number"


def _quads(table: RankTable, count: int) -> Iterator[str]:
    for server in table.servers:
        quads = {device.device // QUAD for device in table.of(server)}
        if count <= QUAD and len(quads) > 1:
            numbers = _list(tuple(device.device for device in table.of(server)))
            low, high = _list(tuple(range(count))), _list(tuple(range(QUAD, QUAD + count)))
            yield (
                f"server {server} uses devices {numbers}; devices 0 to 3 and 4 to 7 are networks of their own, and a "
                f"job of {count} stays inside one: use {low} or {high}"
            )


def _list(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


# Cutting a profile to what is there


def _cut(hardware: Hardware, table: RankTable, name: str) -> Hardware:
    per_server = len(table.devices) // len(table.servers)
    one = len(table.servers) == 1
    node = hardware.devices_per_node if one else per_server
    cut = hardware if node == hardware.devices_per_node else _smaller_nodes(hardware, node)
    if table.super_pods:
        pod = per_server * len(table.super_pods[0])
        levels = [replace(level, size=pod if level.size > node else level.size) for level in cut.levels[:-1]]
        cut = replace(cut, levels=(*levels, replace(cut.levels[-1], size=max(pod + 1, cut.levels[-1].size))))
    total = len(table.devices)
    counts = tuple(count for count in cut.node_device_counts if count <= total) or (total,)
    digest = hashlib.sha256(f"{hardware.hash} {total} {per_server} {len(table.super_pods)}".encode()).hexdigest()
    return replace(
        cut,
        name=f"{hardware.name}@{name}",
        hash=digest,
        max_devices=total,
        node_device_counts=counts if total in counts or not one else (*counts, total),
        levels=tuple(_levels(cut.levels, total)),
    )


def _levels(levels: tuple[Level, ...], total: int) -> Iterator[Level]:
    """Levels up to the first that holds all devices; beyond a node that one shrinks to them."""
    for place, level in enumerate(levels):
        if level.size < total:
            yield level
            continue
        yield replace(level, size=total) if place and level is levels[-1] else level
        return


def _smaller_nodes(hardware: Hardware, node: int) -> Hardware:
    """Servers that take part with `node` of their devices.

    In a full mesh each device then has links to ``node - 1`` others; elsewhere a device keeps what it has. The ports of
    the other devices stay idle.
    """
    whole = hardware.devices_per_node
    graph = hardware.node
    if graph is None or (graph.nics * node) % whole:
        raise ProfileError(
            f"servers of {node} devices do not share the {graph.nics if graph else 0} ports of a server of "
            f"{hardware.name} evenly; use {whole} devices a server"
        )
    share = (node - 1) / (whole - 1) if graph.kind == "full-mesh" and node > 1 else 1.0
    levels = tuple(
        replace(level, size=node, bandwidth_bytes_per_s=level.bandwidth_bytes_per_s * share)
        if level.size == whole
        else level
        for level in hardware.levels
    )
    counts = tuple(dict.fromkeys((*itertools.takewhile(lambda count: count < node, hardware.node_device_counts), node)))
    return replace(
        hardware,
        devices_per_node=node,
        levels=levels,
        node=replace(graph, nics=graph.nics * node // whole, group=min(graph.group, node)),
        node_device_counts=counts,
    )
