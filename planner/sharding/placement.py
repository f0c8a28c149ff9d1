"""Placements of a tensor along mesh axes, and meshes.

A placement says how a tensor lies along *one* mesh axis. It is a small integer so that cost tables
are arrays: ``d >= 0`` is sharded on tensor dim ``d``, `REPLICATE` is the whole tensor on every rank,
`PARTIAL` is a sum whose terms lie on the ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from simulator.errors import InputError

REPLICATE = -1
PARTIAL = -2

Placement = int
Placements = tuple[Placement, ...]
"""One placement for each mesh axis, outermost axis first."""


def placement_name(placement: Placement) -> str:
    """Name a placement as DTensor does.

    >>> [placement_name(p) for p in (0, 2, REPLICATE, PARTIAL)]
    ['S(0)', 'S(2)', 'R', 'P']
    """
    return {REPLICATE: "R", PARTIAL: "P"}.get(placement, f"S({placement})")


def parse_placement(text: str) -> Placement:
    """Read what `placement_name` wrote.

    >>> [parse_placement(t) for t in ("S(0)", "S(2)", "R", "P")]
    [0, 2, -1, -2]
    """
    if text == "R":
        return REPLICATE
    if text == "P":
        return PARTIAL
    match = re.fullmatch(r"S\((\d{1,2})\)", text)
    if match is None:
        raise InputError(f"placement {text!r} is not one of 'R', 'P', 'S(0)', 'S(1)', …; correct it")
    return int(match[1])


class MeshAxis(NamedTuple):
    """A named mesh axis."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """An ordered tuple of axes.

    Ranks are numbered row-major, so the last axis has neighbouring ranks, unless ``strides`` say for each axis how
    far apart in rank its neighbours are: a mesh of which a larger cluster holds several, as pipelines do.
    """

    axes: tuple[MeshAxis, ...]
    strides: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of devices."""
        return prod(axis.size for axis in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each axis, outermost first."""
        return tuple(axis.size for axis in self.axes)

    def stride(self, axis: int) -> int:
        """Distance in rank between neighbours along `axis`."""
        if self.strides is not None:
            return self.strides[axis]
        return prod(a.size for a in self.axes[axis + 1 :])

    def ranks(self) -> list[int]:
        """Ranks of the mesh that holds rank 0, in order.

        >>> Mesh((MeshAxis("data", 2), MeshAxis("tensor", 2)), strides=(8, 1)).ranks()
        [0, 1, 8, 9]
        """
        found = [0]
        for i, axis in enumerate(self.axes):
            found = [rank + place * self.stride(i) for rank in found for place in range(axis.size)]
        return sorted(found)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of a rank along each axis.

        >>> Mesh((MeshAxis("data", 2), MeshAxis("tensor", 4))).coordinates(6)
        (1, 2)
        """
        return tuple(rank // self.stride(i) % axis.size for i, axis in enumerate(self.axes))

    def groups(self, axis: int) -> list[list[int]]:
        """Ranks of every group along `axis`, in order.

        >>> Mesh((MeshAxis("data", 2), MeshAxis("tensor", 2))).groups(0)
        [[0, 2], [1, 3]]
        """
        stride, size = self.stride(axis), self.axes[axis].size
        heads = [r for r in self.ranks() if r // stride % size == 0]
        return [[head + i * stride for i in range(size)] for head in heads]


def local_shape(shape: Iterable[int], placements: Placements, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of one rank's piece; every sharded dim must divide (checked where strategies are made).

    >>> local_shape((8, 6), (0, 1), (4, 2))
    (2, 3)
    """
    result = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if placement >= 0:
            result[placement] //= size
    return tuple(result)
