"""Where the members of a process group sit: how many inside each level of the topology."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from simulator.checks import divisors
from simulator.errors import ProfileError
from simulator.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Members of one process group by level, innermost level first.

    ``members[l]`` says into how many units of level ``l - 1`` the part of the group inside one unit of
    level ``l`` divides; the product of all is the size of the group. ``stride`` is the distance of
    neighbours in device numbers: it decides which links inside a node they have.
    """

    members: tuple[int, ...]
    stride: int = 1

    @property
    def size(self) -> int:
        """Number of members."""
        return prod(self.members)

    @property
    def outermost(self) -> int:
        """Index of the outermost level that the group crosses; 0 for a group of one."""
        return max((level for level, count in enumerate(self.members) if count > 1), default=0)

    def within(self, level: int) -> int:
        """Members inside one unit of `level`; 1 for level -1, the device."""
        return prod(self.members[: level + 1])


@lru_cache(maxsize=4096)
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
        grown = max(part for part in divisors(size) if part % inside == 0 and part <= max(room, inside))
        members.append(grown // inside)
        inside = grown
    return GroupShape(members=(*members, size // inside), stride=stride)


def meeting_distance(hardware: Hardware, low: int, high: int) -> int:
    """How far apart two devices count: as far as they are, or as the units of a level are that they lie in."""
    return max([high - low, *(level.size for level in hardware.levels[:-1] if low // level.size != high // level.size)])


@lru_cache(maxsize=4096)
def neighbour_distances(hardware: Hardware, size: int, stride: int) -> tuple[tuple[int, float], ...]:
    """Where neighbours of a mesh axis meet: distances with their part of all pairs; none for a single member.

    Neighbours that are `stride` apart and would fit into one unit of a level may lie in two of them all the same: they
    count as far apart as such units are, so that two members at that distance use the same links.
    """
    found = Counter(meeting_distance(hardware, low, low + stride) for low in range(0, (size - 1) * stride, stride))
    return tuple((distance, count / (size - 1)) for distance, count in sorted(found.items()))


def level_of_axis(hardware: Hardware, size: int, stride: int) -> str:
    """Name of the outermost level that a mesh axis of this `size` and `stride` crosses."""
    return hardware.levels[group_shape(hardware, size, stride).outermost].name


def axis_groups(devices: int, size: int, stride: int) -> list[range]:
    """Device numbers of all groups of a mesh axis on the devices 0 to ``devices - 1``."""
    if size < 1 or stride < 1 or devices % (size * stride):
        raise ProfileError(
            f"groups of {size} devices, {stride} apart, do not divide {devices} devices; use sizes and strides whose "
            f"product divides the number of devices"
        )
    block = size * stride
    starts = [base + offset for base in range(0, devices, block) for offset in range(stride)]
    return [range(start, start + block, stride) for start in starts]
