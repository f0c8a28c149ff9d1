"""A topology: a directed graph of devices, switches, hosts and NICs, checked, with routes by a fixed rule."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

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

    def __init__(self, name: str, links: Links) -> None:
        _check(name, links)
        self.name = name
        self.devices = tuple(sorted(vertex for vertex in links.vertices if isinstance(vertex, int)))
        self.links: tuple[tuple[Vertex, Vertex], ...] = tuple((one, other) for one, other, _ in links)
        self.capacities = [float(link["capacity_bytes_per_s"]) for *_, link in links]
        self._vertices, self._adjacent = links.vertices, links.adjacent
        self._index = {link: place for place, link in enumerate(self.links)}
        self._order = {vertex: place for place, vertex in enumerate(links.vertices)}
        self._routes: dict[tuple[Vertex, Vertex], Route] = {}

    @cached_property
    def graph(self) -> nx.DiGraph[Vertex]:
        """The same in networkx, frozen; made when it is first asked for."""
        import networkx as nx

        graph: nx.DiGraph[Vertex] = nx.DiGraph()
        graph.add_nodes_from(self._vertices.items())
        graph.add_edges_from((one, other, self._adjacent[one][other]) for one, other in self.links)
        frozen: nx.DiGraph[Vertex] = nx.freeze(graph)
        return frozen

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
        return math.fsum(self._adjacent[one][other]["latency_s"] for one, other in itertools.pairwise(path))

    def machine_of(self, vertex: Vertex) -> int:
        """Number of the machine that a vertex sits in, -1 for the fabric."""
        return int(self._vertices[vertex]["node"])

    def joined(self, one: Vertex, other: Vertex) -> bool:
        """Whether a link leads from `one` to `other`."""
        return other in self._adjacent[one]

    def check_group(self, group: Iterable[Vertex]) -> None:
        """Raise ProfileError unless every member of `group` is a device (or another vertex) of this topology."""
        outside = [vertex for vertex in group if vertex not in self._order]
        if outside:
            raise ProfileError(
                f"topology {self.name} has {len(self.devices)} devices, 0 to {len(self.devices) - 1}, and is too small "
                f"for {', '.join(map(str, outside[:MAX_LINKS_NAMED]))}; use fewer devices or a larger topology"
            )

    def _find(self, source: Vertex, destination: Vertex) -> Route:
        machine, other = self.machine_of(source), self.machine_of(destination)
        inside = [({machine}, ("device", "nic")), ({machine}, ("nic",))] if machine == other else []
        outside = [({machine, other, -1}, ("device",)), ({machine, other, -1}, ())]
        for machines, barred in (*inside, *outside):
            found = self._shortest(source, destination, machines, barred)
            if found is not None:
                return found
        raise ProfileError(f"topology {self.name} has no route from {source} to {destination}; join them by links")

    def _shortest(
        self, source: Vertex, destination: Vertex, machines: Collection[int], barred: Collection[str]
    ) -> Route | None:
        """The shortest way through vertices of some machines that are of no barred kind."""
        queue: list[tuple[int, float, int, Vertex, Vertex]] = [(0, 0.0, 0, source, source)]
        before: dict[Vertex, Vertex] = {}
        vertices, order = self._vertices, self._order
        while queue:
            hops, latency, _, vertex, previous = heapq.heappop(queue)
            if vertex in before:
                continue
            before[vertex] = previous
            if vertex == destination:
                return tuple(reversed(list(_back(before, source, destination))))
            for neighbour, link in self._adjacent[vertex].items():
                if neighbour in before:
                    continue
                place = vertices[neighbour]
                if neighbour == destination or (place["node"] in machines and place["kind"] not in barred):
                    entry = (hops + 1, latency + link["latency_s"], order[neighbour], neighbour, vertex)
                    heapq.heappush(queue, entry)
        return None


def _back(before: dict[Vertex, Vertex], source: Vertex, destination: Vertex) -> Iterator[Vertex]:
    vertex = destination
    while vertex != source:
        yield vertex
        vertex = before[vertex]
    yield source


class Links:
    """A graph under construction: vertices with what they are, and full-duplex links by their two ends."""

    def __init__(self) -> None:
        self.vertices: dict[Vertex, dict[str, Any]] = {}
        self.adjacent: dict[Vertex, dict[Vertex, dict[str, Any]]] = {}

    def __iter__(self) -> Iterator[tuple[Vertex, Vertex, dict[str, Any]]]:
        return ((one, other, link) for one, row in self.adjacent.items() for other, link in row.items())

    def vertex(self, vertex: Vertex, kind: VertexKind, *, node: int = 0, **extra: object) -> Vertex:
        """Add `vertex`."""
        self.vertices[vertex] = {"kind": kind, "node": node, **extra}
        self.adjacent.setdefault(vertex, {})
        return vertex

    def remove(self, vertices: Iterable[Vertex]) -> None:
        """Take vertices out, with their links."""
        for vertex in vertices:
            del self.vertices[vertex]
            for neighbour in self.adjacent.pop(vertex):
                del self.adjacent[neighbour][vertex]

    def device(self, number: int, *, node: int = 0, rank: int, profile: str = "") -> int:
        """Add device `number`, the `rank`-th of its machine."""
        self.vertex(number, "device", node=node, rank=rank, profile=profile)
        return number

    def join(self, one: Vertex, other: Vertex, capacity_bytes_per_s: float, latency_s: float, kind: str) -> None:
        """Add a link that carries `capacity_bytes_per_s` in each direction; links beside each other add up."""
        for here, there in ((one, other), (other, one)):
            beside = self.adjacent[here].get(there)
            capacity = capacity_bytes_per_s + (beside["capacity_bytes_per_s"] if beside else 0.0)
            self.adjacent[here][there] = {"capacity_bytes_per_s": capacity, "latency_s": latency_s, "kind": kind}


def _check(name: str, links: Links) -> None:
    devices = [vertex for vertex in links.vertices if isinstance(vertex, int)]
    if sorted(devices) != list(range(len(devices))) or not devices:
        raise ProfileError(
            f"topology {name}: devices must be numbered 0, 1, …, got {sorted(devices)[:8]}; renumber them"
        )
    for one, other, link in links:
        for key, least in (("capacity_bytes_per_s", "above 0"), ("latency_s", "at least 0")):
            value = link.get(key)
            number = value if isinstance(value, (int, float)) and math.isfinite(value) else -1.0
            if number < 0 or (number == 0 and least == "above 0"):
                raise ProfileError(
                    f"topology {name}: link {one} to {other} has {key} {value}; it must be a number {least}"
                )
    cycle = _cycle((one, other) for one, other, link in links if link["latency_s"] == 0)
    if cycle:
        shown = ", ".join(f"{a} to {b}" for a, b in itertools.pairwise([*cycle, cycle[0]][: MAX_LINKS_NAMED + 1]))
        raise ProfileError(
            f"topology {name}: the links {shown} form a cycle of zero latency, on which a message may go round "
            f"without time passing; give at least one of them a latency_s above 0"
        )


def _cycle(links: Iterable[tuple[Vertex, Vertex]]) -> list[Vertex] | None:
    """Vertices of a cycle of links, whichever way these go; None where there is none."""
    around: dict[Vertex, dict[Vertex, None]] = {}
    for one, other in links:
        around.setdefault(one, {})[other] = None
        around.setdefault(other, {})[one] = None
    above: dict[Vertex, Vertex] = {}
    for root in around:
        if root in above:
            continue
        above[root] = root
        waiting = [root]
        while waiting:
            vertex = waiting.pop()
            for neighbour in around[vertex]:
                if neighbour not in above:
                    above[neighbour] = vertex
                    waiting.append(neighbour)
                elif neighbour != above[vertex]:
                    return _closed(above, vertex, neighbour)
    return None


def _closed(above: dict[Vertex, Vertex], one: Vertex, other: Vertex) -> list[Vertex]:
    """The cycle that a link between two vertices of a tree closes."""
    ways = []
    for vertex in (one, other):
        way = [vertex]
        while above[way[-1]] != way[-1]:
            way.append(above[way[-1]])
        ways.append(way)
    met = next(vertex for vertex in ways[0] if vertex in ways[1])
    return [*ways[0][: ways[0].index(met) + 1], *reversed(ways[1][: ways[1].index(met)])]
