"""Where the members of a process group sit: how many inside each level of the topology."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulator.errors import ProfileError
from simulator.hardware import Hardware

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Members of one process group by level, innermost level first.

    ``members[l]`` says into how many units of level ``l - 1`` the part of the group inside one unit of
    level ``l`` divides; the product of all is the size of the group.
    """

    members: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of members."""
        return self.within(len(self.members) - 1)

    @property
    def outermost(self) -> int:
        """Index of the outermost level that the group crosses; 0 for a group of one."""
        return max((level for level, count in enumerate(self.members) if count > 1), default=0)

    def within(self, level: int) -> int:
        """Members inside one unit of `level`; 1 for level -1, the device."""
        product = 1
        for count in self.members[: level + 1]:
            product *= count
        return product


def group_shape(hardware: Hardware, size: int, stride: int) -> GroupShape:
    """Shape of a mesh axis whose groups hold `size` devices, `stride` apart.

    A unit of a level takes the largest part of the group that divides it evenly and fits, so 128
    devices lie as 64 + 64 in racks of 72, as such jobs are placed.
    """
    if size < 1 or stride < 1:
        raise ProfileError(f"a group has size {size} and stride {stride}; both must be at least 1")
    if size > 1 and (size - 1) * stride >= hardware.max_devices:
        raise ProfileError(
            f"a group of {size} devices with stride {stride} does not fit the {hardware.max_devices} devices of "
            f"profile {hardware.name}; use fewer devices"
        )
    members = []
    inside = 1
    for level in hardware.levels[:-1]:
        room = level.size // stride
        grown = max(part for part in _divisors(size) if part % inside == 0 and part <= max(room, inside))
        members.append(grown // inside)
        inside = grown
    return GroupShape(members=(*members, size // inside))


def level_of_axis(hardware: Hardware, size: int, stride: int) -> str:
    """Name of the outermost level that a mesh axis of this `size` and `stride` crosses."""
    return hardware.levels[group_shape(hardware, size, stride).outermost].name


def topology_graph(hardware: Hardware, devices: int) -> nx.Graph[object]:
    """Tree of the topology for `devices` devices: integers are devices, ``(level name, unit)`` their switches.

    Edges carry ``bandwidth_bytes_per_s`` (of all devices below together, per direction) and ``latency_s``.
    """
    import networkx as nx

    hardware.check_devices(devices)
    graph: nx.Graph[object] = nx.Graph(name=hardware.name)
    below: dict[object, range] = {device: range(device, device + 1) for device in range(devices)}
    graph.add_nodes_from(below)
    for level in hardware.levels:
        units: dict[object, range] = {}
        for node, span in below.items():
            unit = (level.name, span.start // level.size)
            first = units.get(unit, span).start
            units[unit] = range(first, span.stop)
            bandwidth = level.bandwidth_bytes_per_s * len(span)
            graph.add_edge(node, unit, bandwidth_bytes_per_s=bandwidth, latency_s=level.latency_s)
        below = units
    return graph


def _divisors(number: int) -> list[int]:
    small = [part for part in range(1, int(number**0.5) + 1) if number % part == 0]
    return small + [number // part for part in reversed(small) if part * part != number]
