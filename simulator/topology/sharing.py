"""Who shares a link: bytes per link when groups act at once, and what a group's own links can carry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from simulator.hardware import Hardware
from simulator.topology.cluster import topology_graph, unit_spec
from simulator.topology.graph import Topology, Vertex
from simulator.topology.groups import axis_groups
from simulator.topology.nodes import ISLANDS, MESHES, NodeSpec, node_topology


class Message(NamedTuple):
    """Bytes from one device to another, or between a device and a switch that computes."""

    source: int | str
    destination: int | str
    size_bytes: float


Block = Sequence[int]
Round = list[Message]


def ring_gather(blocks: Sequence[Block], payload: float) -> list[Round]:
    """All-gather or reduce-scatter around ``c`` rings at once, ``c`` the members of a block.

    Ring ``k`` leaves a block by another member than the others do, and reaches the next block at the member of the
    same place, as NCCL's rings do: every second block is run through backwards.
    """
    rings = rings_of(blocks)
    members = len(rings[0])
    size = payload / members / len(rings)
    step = [Message(a, b, size) for ring in rings for a, b in itertools.pairwise([*ring, ring[0]])]
    return [step] * (members - 1)


def pairwise_all_to_all(blocks: Sequence[Block], payload: float) -> list[Round]:
    """``S / n`` from every member to every other, all at once."""
    group = [device for block in blocks for device in block]
    return [[Message(a, b, payload / len(group)) for a, b in itertools.permutations(group, 2)]]


def direct_send(blocks: Sequence[Block], payload: float) -> list[Round]:
    """Every member but the last sends to the next, as the stages of a pipeline do."""
    group = [device for block in blocks for device in block]
    return [[Message(a, b, payload) for a, b in itertools.pairwise(group)]]


Pattern = Callable[[Sequence[Block], float], list[Round]]


def rings_of(blocks: Sequence[Block]) -> list[list[int]]:
    """The rings of `ring_gather`, each a list of devices."""
    if len(blocks) == 1:
        return [list(blocks[0])]
    rings = []
    for start in range(len(blocks[0])):
        ring: list[int] = []
        for number, block in enumerate(blocks):
            turned = [*block[start:], *block[:start]]
            ring += turned[::-1] if number % 2 else turned
        rings.append(ring)
    return rings


if TYPE_CHECKING:
    import networkx as nx

FloatArray = npt.NDArray[np.float64]
ENOUGH = 1 - 1e-9
MAX_SEARCHED = 16


class Shares(NamedTuple):
    """What a group inside a node reaches, over what all devices of the node together reach on a ring."""

    ring: float
    exchange: float
    send: float


WHOLE = Shares(1.0, 1.0, 1.0)


def link_use(topology: Topology, groups: Sequence[Sequence[int]], pattern: Pattern) -> FloatArray:
    """Bytes on every link per byte of payload, (links,), when all `groups` run `pattern` at once.

    The members of a group are taken machine by machine, inside a machine around a ring of direct links where there is
    one.
    """
    use = np.zeros(len(topology.links))
    for group in groups:
        topology.check_group(group)
        steps = pattern(_blocks(topology, group), 1.0)
        times: dict[int, int] = {}
        for step in steps:
            times[id(step)] = times.get(id(step), 0) + 1
        for step in {id(step): step for step in steps}.values():
            for message in step:
                route = topology.route(message.source, message.destination)
                use[list(topology.links_of(route))] += message.size_bytes * times[id(step)]
    return use


def payload_rate(topology: Topology, use: FloatArray) -> float:
    """Bytes of payload a second at which the fullest link is full."""
    busy = use > 0
    return float(np.min(np.asarray(topology.capacities)[busy] / use[busy], initial=np.inf))


class SharedLinks(NamedTuple):
    """Links that several axes cross: capacities (links,) and, by axis, bytes on each per byte of its payload (links,).

    Links that carry the same in the same measure stand for each other and are one entry. ``rates`` are the bytes of
    payload a second of each axis alone, ``widths`` the capacities of the links that set them; infinite for groups of
    one.
    """

    capacities: FloatArray
    uses: Mapping[str, FloatArray]
    rates: Mapping[str, float]
    widths: Mapping[str, float]

    def weights(self, axis: str) -> FloatArray:
        """Bytes on each link (links,) per byte that `axis` sends over its fullest link, shared or not."""
        if not np.isfinite(self.widths[axis]):
            return np.zeros(len(self.capacities))
        weights: FloatArray = self.uses[axis] * (self.rates[axis] / self.widths[axis])
        return weights


def shared_links(
    hardware: Hardware,
    devices: int,
    axes: Mapping[str, tuple[int, int]],
    patterns: Mapping[str, Pattern] | None = None,
) -> SharedLinks:
    """Links that more than one of `axes` cross when all their groups communicate.

    Parameters
    ----------
    axes
        size and stride of each mesh axis.
    patterns
        messages of an axis; those of a ring where it has no entry.
    """
    topology = topology_graph(hardware, devices)
    chosen = patterns or {}
    sent = {name: (*axis, chosen.get(name, ring_gather)) for name, axis in axes.items()}
    # Flows of one axis often send alike.
    distinct = {
        (size, stride, pattern): link_use(topology, axis_groups(devices, size, stride), pattern)
        for size, stride, pattern in set(sent.values())
    }
    uses = {name: distinct[alike] for name, alike in sent.items()}
    rates = {name: payload_rate(topology, use) for name, use in uses.items()}
    capacities = np.asarray(topology.capacities)
    widths = {name: _width(capacities, use) for name, use in uses.items()}
    table = np.array([*uses.values(), capacities]).reshape(len(uses) + 1, -1)
    shared = np.count_nonzero(table[:-1], axis=0) > 1
    columns = np.unique(np.round(table[:, shared], 12), axis=1)
    return SharedLinks(columns[-1], dict(zip(uses, columns[:-1], strict=True)), rates, widths)


def _width(capacities: FloatArray, use: FloatArray) -> float:
    """Capacity of the link that is full first."""
    busy = np.flatnonzero(use)
    return float(capacities[busy[np.argmax(use[busy] / capacities[busy])]]) if busy.size else math.inf


@lru_cache(maxsize=4096)
def node_shares(hardware: Hardware, members: int, stride: int) -> Shares:
    """Shares of the innermost level's bandwidth for groups of `members`, `stride` apart, all groups at once.

    The level's bandwidth is that of all devices of a unit. Where devices are joined directly, a group has only the
    links among its own members; below a PCIe tree groups meet at the host. Switches that never block leave 1.
    """
    if members == 1 or hardware.node is None or hardware.node.kind not in {*MESHES, "pcie-tree"}:
        return WHOLE
    spec = _innermost(hardware)
    topology = node_topology(spec)
    if members * stride <= spec.devices and spec.devices % (members * stride) == 0:
        groups: list[range] = axis_groups(spec.devices, members, stride)
    else:
        groups = [range(0, (members - 1) * stride + 1, stride)]
    bandwidth = _shared_ring_bandwidths if spec.kind not in MESHES else _ring_bandwidths
    if spec.kind == "hybrid-cube-mesh":
        bandwidth = _brick_ring_bandwidths
    whole = min(bandwidth(topology, [topology.devices]))
    exchange = payload_rate(topology, link_use(topology, groups, pairwise_all_to_all)) * (members - 1) / members
    send = payload_rate(topology, link_use(topology, groups, direct_send))
    found = (min(bandwidth(topology, groups)), exchange, send)
    return Shares(*(min(1.0, value / whole) for value in found))


def ring_bandwidth(topology: Topology, group: Sequence[int], *, sharing_hosts: int = 1) -> float:
    """Bytes/s that every member of `group` can send in an all-gather at its best, over links among the members.

    An all-gather of ``S`` bytes takes at least ``S / n max_X |X| / B(X)`` over sets ``X`` of vertices that hold
    ``|X| < n`` members and have links of ``B(X)`` bytes/s leaving them, and trees that reach this bound exist (Zhao et
    al., "ForestColl: Throughput-optimal collective communications on heterogeneous network fabrics", 2024). The result
    is the ``b`` for which this is ``(n - 1) / n S / b``: on one ring its slowest link. Host bridges carry traffic only
    where nothing else joins the members, and then are shared by `sharing_hosts` groups.
    """
    import networkx as nx

    members = list(group)
    topology.check_group(members)
    others = set(topology.devices) - set(members)
    kept = [vertex for vertex in topology.graph if vertex not in others]
    direct = [vertex for vertex in kept if topology.graph.nodes[vertex]["kind"] != "host"]
    graph = topology.graph.subgraph(direct)
    hosts = 1
    if not all(nx.has_path(graph, members[0], member) for member in members):
        graph, hosts = topology.graph.subgraph(kept), sharing_hosts
    network: nx.DiGraph[Vertex] = nx.DiGraph()
    for one, other, link in graph.edges(data=True):
        capacity = link["capacity_bytes_per_s"]
        network.add_edge(one, other, capacity=capacity / hosts if link["kind"] == "host" else capacity)
    return (len(members) - 1) * min(_rate_into(network, members, target) for target in members)


def _rate_into(network: nx.DiGraph[Vertex], members: Sequence[int], target: int) -> float:
    """Largest rate at which every other member can send to `target` at once: the least cut over its members.

    Newton's iteration on the cuts, each found by a maximum flow; it ends after finitely many.
    """
    import networkx as nx

    source = "all members"
    graph = network.copy()
    senders = [member for member in members if member != target]
    rate = sum(link["capacity"] for _, _, link in graph.in_edges(target, data=True)) / len(senders)
    while True:
        graph.add_edges_from(((source, sender) for sender in senders), capacity=rate)
        flow, (before, _) = nx.minimum_cut(graph, source, target)
        inside = sum(sender in before for sender in senders)
        if flow >= rate * len(senders) * ENOUGH or not inside:
            return float(rate)
        rate = (flow - rate * (len(senders) - inside)) / inside


def _ring_bandwidths(topology: Topology, groups: Sequence[Sequence[int]]) -> list[float]:
    return [ring_bandwidth(topology, group, sharing_hosts=len(groups)) for group in groups]


def _brick_ring_bandwidths(topology: Topology, groups: Sequence[Sequence[int]]) -> list[float]:
    """As `ring_bandwidth`, but of whole rings of one NVLink brick each, as NCCL lays them, where one closes."""
    brick = min(
        link["capacity_bytes_per_s"] for *_, link in topology.graph.edges(data=True) if link["kind"] == "NVLink"
    )
    found = []
    for group, bound in zip(groups, _ring_bandwidths(topology, groups), strict=True):
        rings = _most_rings(_closed_rings(topology, list(group)), topology, brick) if len(group) > 2 else 0
        # Every ring is run through both ways.
        found.append(min(bound, 2 * rings * brick) if rings else bound)
    return found


def _closed_rings(topology: Topology, group: list[int]) -> list[list[tuple[int, int]]]:
    """All rings of direct links through `group`, as links; each in one of its two directions."""
    first, *others = group
    rings = []
    for order in itertools.permutations(others):
        links = list(itertools.pairwise([first, *order, first]))
        if order[0] < order[-1] and all(topology.joined(*link) for link in links):
            rings.append(links)
    return rings


def _most_rings(rings: Sequence[Sequence[tuple[int, int]]], topology: Topology, brick: float) -> int:
    """The most rings, each as often as wanted, that bricks are left for."""
    pairs = {frozenset(link) for ring in rings for link in ring}
    left = {pair: round(topology.capacities[topology.links_of(tuple(pair))[0]] / brick) for pair in pairs}

    def best(start: int) -> int:
        most = 0
        for place in range(start, len(rings)):
            used = [frozenset(link) for link in rings[place]]
            if all(left[pair] for pair in used):
                for pair in used:
                    left[pair] -= 1
                most = max(most, 1 + best(place))
                for pair in used:
                    left[pair] += 1
        return most

    return best(0)


def _shared_ring_bandwidths(topology: Topology, groups: Sequence[Sequence[int]]) -> list[float]:
    count = len(groups[0])
    return [payload_rate(topology, link_use(topology, groups, ring_gather)) * (count - 1) / count]


def _innermost(hardware: Hardware) -> NodeSpec:
    """The node, or the one full mesh that is the innermost level."""
    spec = unit_spec(hardware)
    if spec.kind not in ISLANDS:
        return spec
    first = hardware.levels[0]
    bandwidth, latency = first.bandwidth_bytes_per_s, first.latency_s
    return NodeSpec(kind="full-mesh", devices=first.size, bandwidth_bytes_per_s=bandwidth, latency_s=latency)


def _blocks(topology: Topology, group: Sequence[int]) -> list[list[int]]:
    """Members by machine, along direct links where these form a ring; one by one where machines differ in count."""
    by_machine: dict[int, list[int]] = {}
    for device in group:
        by_machine.setdefault(topology.machine_of(device), []).append(device)
    blocks = list(by_machine.values())
    if len({len(block) for block in blocks}) > 1:
        return [[device] for device in group]
    return [_direct_ring(topology.joined, block) for block in blocks]


def _direct_ring(joined: Callable[[Vertex, Vertex], bool], block: list[int]) -> list[int]:
    """`block` in an order in which every neighbour is joined directly; the block as it is where there is none."""
    if not 3 < len(block) <= MAX_SEARCHED or not any(joined(block[0], other) for other in block):
        return block

    def extend(path: list[int]) -> list[int] | None:
        if len(path) == len(block):
            return path if joined(path[-1], path[0]) else None
        for device in block:
            if device not in path and joined(path[-1], device):
                found = extend([*path, device])
                if found:
                    return found
        return None

    return extend(block[:1]) or block
