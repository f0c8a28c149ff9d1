"""Units of a lowered network that stand for many of a deeper one, and where what they do is in the deep one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import numpy as np

from planner.graph.chain import Chain
from planner.lowering.placed import PlacedGraph
from simulator.errors import StrategyError
from simulator.task_table import IntArray

NOBODY = -1
"""Owner of what belongs to no single unit."""


class UnalikeError(StrategyError):
    """The units of a shallow network cannot stand for those of the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of layers, ``deep`` units of the whole, and those that stand for them; names begin with ``prefix``."""

    prefix: str
    shallow: range
    deep: range


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The unit of the lowered network that each unit of the whole is like; ``of_unit`` is empty where it is the whole.

    Units outside ``rows`` are there once.
    """

    of_unit: tuple[int, ...] = ()
    rows: tuple[Row, ...] = field(default=())

    @cached_property
    def row_of(self) -> dict[int, Row]:
        """The row of each unit of the lowered network that is in one."""
        return {unit: row for row in self.rows for unit in row.shallow}

    @cached_property
    def places(self) -> dict[int, tuple[int, ...]]:
        """The units of the whole that each unit of the lowered network stands for."""
        found: dict[int, list[int]] = {unit: [] for row in self.rows for unit in row.shallow}
        found[NOBODY] = [NOBODY]
        for deep, unit in enumerate(self.of_unit):
            found.setdefault(unit, []).append(deep)
        return {unit: tuple(deep) for unit, deep in found.items()}

    def owners(self, source: PlacedGraph, found: Chain | None) -> list[int]:
        """The unit that each node belongs to; `NOBODY` for what several share, and for all where nothing is copied.

        Raises
        ------
        UnalikeError
            Layers that are copied share something among them.
        """
        count = len(source.graph.nodes)
        if found is None or not self.of_unit:
            return [NOBODY] * count
        members: list[list[int]] = [[] for _ in range(count)]
        for number, unit in enumerate(found.units):
            for index in unit.nodes:
                members[index].append(number)
        result = []
        for index, units in enumerate(members):
            own = source.units.of_node[index]
            owner = own if own >= 0 else units[0] if len(units) == 1 else NOBODY
            result.append(owner)
            if owner == NOBODY and any(_begins(source.graph.nodes[index].name, row.prefix) for row in self.rows):
                raise UnalikeError(f"{source.graph.nodes[index].name!r} belongs to several layers")
        return result

    def neighbour(self, name: str, home: int, own: int, unit: int) -> tuple[str, int]:
        """A value of another layer as the copy number `unit` of unit `own` finds it: its name, and whose it is.

        From outside a row its first and its last layer are seen, which stand for themselves alone.

        Raises
        ------
        UnalikeError
            The value is not that of the layer before or behind.
        """
        row, step = self.row_of.get(home), home - own
        if row is not None and row is not self.row_of.get(own):
            if home == row.shallow[-1]:
                return name, row.deep[-1]
            if home == row.shallow[0]:
                return name, row.deep[0]
        if row is None or row is not self.row_of.get(own) or abs(step) != 1 or unit + step not in row.deep:
            raise UnalikeError(f"value {name!r} is read by a unit that is not beside its own")
        return shifted(name, row, self.of_unit[unit + step] - home), unit + step

    def deep_name(self, name: str, home: int, unit: int) -> str:
        """Name in the whole network of a value of a unit."""
        row = self.row_of.get(home)
        return name if row is None else shifted(name, row, (unit - row.deep.start) - (home - row.shallow.start))

    def in_order(self, owners: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Things of the lowered network, given their owners, for every copy: arrays (n,) of things and of units.

        They come layer after layer: the first layer's where they are, those of all others where the others' begin.
        """
        things: dict[int, list[int]] = {}
        for thing, owner in enumerate(owners):
            things.setdefault(owner, []).append(thing)
        found: list[Sequence[int]] = []
        units: list[int] = []
        begun: set[str] = set()
        for thing, owner in enumerate(owners):
            row = self.row_of.get(owner)
            if row is None or owner == row.shallow.start:
                found.append((thing,))
                units.append(self.places[owner][0])
            elif row.prefix not in begun:
                begun.add(row.prefix)
                found += [things.get(self.of_unit[unit], ()) for unit in row.deep[1:]]
                units += row.deep[1:]
        which = np.fromiter(chain.from_iterable(found), np.int64)
        return which, np.repeat(np.array(units, dtype=np.int64), [len(one) for one in found])


def shifted(name: str, row: Row, by: int) -> str:
    """A name with the numbers of its layers moved.

    >>> shifted("blocks.3.norm@R in blocks.3", Row(prefix="blocks", shallow=range(5), deep=range(9)), 2)
    'blocks.5.norm@R in blocks.5'
    """
    return re.sub(rf"\b{re.escape(row.prefix)}\.(\d+)\b", lambda m: f"{row.prefix}.{int(m[1]) + by}", name)


def _begins(name: str, prefix: str) -> bool:
    return name.startswith(f"{prefix}.") and name[len(prefix) + 1 : len(prefix) + 2].isdigit()
