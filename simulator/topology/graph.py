"""A topology: a directed graph of devices, switches, hosts and NICs, checked, with routes by a fixed rule."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from simulator.errors import ProfileError

if TYPE_CHECKING:
    import networkx as nx

Vertex = int | str
Route = tuple[Vertex, ...]
VertexKind = Literal["device", "switch", "host", "nic"]
MAX_LINKS_NAMED = 6


class Topology:
    """Devices ``0 … n - 1`` (integers), other vertices (names) and directed links.

    Every vertex carries ``kind`` and ``node`` (the machine it sits in, -1 for the fabric), a device also ``rank`` (its
    place in the machine) and ``profile`` (its type); every link ``capacity_bytes_per_s``, ``latency_s`` and ``kind``.

    A route is the one with the fewest hops, then the least latency, then the vertex that was added first. It stays
    inside the machine when both ends are in one and it has a way, and passes through a device or back through a NIC
    only where no other route exists. So same-rail traffic stays on its rail switch, other traffic climbs to the spine,
    and where there is no spine it changes rail inside a machine.
    """

    def __init__(self, name: str, graph: nx.DiGraph[Vertex]) -> None:
        import networkx as nx

        _check(name, graph)
        self.name = name
        self.graph = nx.freeze(graph)
        self.devices = tuple(sorted(vertex for vertex in graph if isinstance(vertex, int)))
        self.links: tuple[tuple[Vertex, Vertex], ...] = tuple(graph.edges)
        self.capacities = [float(graph.edges[link]["capacity_bytes_per_s"]) for link in self.links]
        self._index = {link: place for place, link in enumerate(self.links)}
        self._order = {vertex: place for place, vertex in enumerate(graph)}
        self._routes: dict[tuple[Vertex, Vertex], Route] = {}

    def __repr__(self) -> str:
        return f"Topology({self.name!r}, {len(self.devices)} devices, {len(self.links)} links)"

    def route(self, source: Vertex, destination: Vertex) -> Route:
        """Vertices from `source` to `destination`, both included."""
        found = self._routes.get((source, destination))
        if found is None:
            self.check_group((source, destination))
            found = self._routes[source, destination] = self._find(source, destination)
        return found

    def links_of(self, path: Sequence[Vertex]) -> tuple[int, ...]:
        """Indices into ``links`` of the links along `path`."""
        return tuple(self._index[link] for link in itertools.pairwise(path))

    def latency_of(self, path: Sequence[Vertex]) -> float:
        """Seconds that the first byte takes along `path`."""
        return math.fsum(self.graph.edges[link]["latency_s"] for link in itertools.pairwise(path))

    def check_group(self, group: Iterable[Vertex]) -> None:
        """Raise ProfileError unless every member of `group` is a device (or another vertex) of this topology."""
        outside = [vertex for vertex in group if vertex not in self._order]
        if outside:
            raise ProfileError(
                f"topology {self.name} has {len(self.devices)} devices, 0 to {len(self.devices) - 1}, and is too small "
                f"for {', '.join(map(str, outside[:MAX_LINKS_NAMED]))}; use fewer devices or a larger topology"
            )

    def _find(self, source: Vertex, destination: Vertex) -> Route:
        kinds = self.graph.nodes
        machine, other = kinds[source]["node"], kinds[destination]["node"]

        def passes(machines: set[int], barred: set[str]) -> Callable[[Vertex], bool]:
            return lambda vertex: kinds[vertex]["node"] in machines and kinds[vertex]["kind"] not in barred

        inside = [passes({machine}, {"device", "nic"}), passes({machine}, {"nic"})] if machine == other else []
        outside = [passes({machine, other, -1}, {"device"}), passes({machine, other, -1}, set())]
        for rule in (*inside, *outside):
            found = self._shortest(source, destination, rule)
            if found is not None:
                return found
        raise ProfileError(f"topology {self.name} has no route from {source} to {destination}; join them by links")

    def _shortest(self, source: Vertex, destination: Vertex, passes: Callable[[Vertex], bool]) -> Route | None:
        queue: list[tuple[int, float, int, Vertex, Vertex]] = [(0, 0.0, 0, source, source)]
        before: dict[Vertex, Vertex] = {}
        while queue:
            hops, latency, _, vertex, previous = heapq.heappop(queue)
            if vertex in before:
                continue
            before[vertex] = previous
            if vertex == destination:
                return tuple(reversed(list(_back(before, source, destination))))
            for neighbour, link in self.graph.adj[vertex].items():
                if neighbour not in before and (neighbour == destination or passes(neighbour)):
                    entry = (hops + 1, latency + link["latency_s"], self._order[neighbour], neighbour, vertex)
                    heapq.heappush(queue, entry)
        return None


def _back(before: dict[Vertex, Vertex], source: Vertex, destination: Vertex) -> Iterator[Vertex]:
    vertex = destination
    while vertex != source:
        yield vertex
        vertex = before[vertex]
    yield source


class Links:
    """A graph under construction: vertices and full-duplex links."""

    def __init__(self) -> None:
        import networkx as nx

        self.graph: nx.DiGraph[Vertex] = nx.DiGraph()

    def vertex(self, vertex: Vertex, kind: VertexKind, *, node: int = 0, **extra: object) -> Vertex:
        """Add `vertex`."""
        self.graph.add_node(vertex, kind=kind, node=node, **extra)
        return vertex

    def device(self, number: int, *, node: int = 0, rank: int, profile: str = "") -> int:
        """Add device `number`, the `rank`-th of its machine."""
        self.vertex(number, "device", node=node, rank=rank, profile=profile)
        return number

    def join(self, one: Vertex, other: Vertex, capacity_bytes_per_s: float, latency_s: float, kind: str) -> None:
        """Add a link that carries `capacity_bytes_per_s` in each direction; links beside each other add up."""
        for link in ((one, other), (other, one)):
            beside = self.graph.edges[link]["capacity_bytes_per_s"] if self.graph.has_edge(*link) else 0.0
            capacity = capacity_bytes_per_s + beside
            self.graph.add_edge(*link, capacity_bytes_per_s=capacity, latency_s=latency_s, kind=kind)


def _check(name: str, graph: nx.DiGraph[Vertex]) -> None:
    devices = [vertex for vertex in graph if isinstance(vertex, int)]
    if sorted(devices) != list(range(len(devices))) or not devices:
        raise ProfileError(
            f"topology {name}: devices must be numbered 0, 1, …, got {sorted(devices)[:8]}; renumber them"
        )
    for one, other, link in graph.edges(data=True):
        for key, least in (("capacity_bytes_per_s", "above 0"), ("latency_s", "at least 0")):
            value = link.get(key)
            number = value if isinstance(value, (int, float)) and math.isfinite(value) else -1.0
            if number < 0 or (number == 0 and least == "above 0"):
                raise ProfileError(
                    f"topology {name}: link {one} to {other} has {key} {value}; it must be a number {least}"
                )
    import networkx as nx

    still: nx.Graph[Vertex] = nx.Graph()
    still.add_edges_from((one, other) for one, other, link in graph.edges(data=True) if link["latency_s"] == 0)
    cycle = next(iter(nx.cycle_basis(still)), None)
    if cycle:
        shown = ", ".join(f"{a} to {b}" for a, b in itertools.pairwise([*cycle, cycle[0]][: MAX_LINKS_NAMED + 1]))
        raise ProfileError(
            f"topology {name}: the links {shown} form a cycle of zero latency, on which a message may go round "
            f"without time passing; give at least one of them a latency_s above 0"
        )
