"""What of a step is written once: drafts of tasks, the values they read and write, and the order of a micro-batch."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from planner.graph.chain import Chain
from planner.graph.operator_graph import TensorRef
from planner.lowering.alike import Passes, passes_of
from planner.lowering.body import Fetch, Gather, Item
from planner.lowering.copies import NOBODY, Copies, Row, UnalikeError
from planner.lowering.instructions import Instruction
from planner.lowering.placed import PlacedGraph
from planner.lowering.turns import draft_of_copy, in_turn, is_message, stored_values, values_of_samples
from planner.lowering.ways import Wanted
from planner.lowering.writer import Draft
from simulator.columns import KIND_INDEX
from simulator.program import BufferKind, Phase, Task
from simulator.task_table import IntArray

SAME = -(1 << 32)
"""Unit of a value that is that of the draft's own copy; that of a copy so many units behind it is as much more."""
RELATIVE = SAME // 2
"""Units below count from the draft's own."""


class Shared(NamedTuple):
    """Values of several units, arrays (n,).

    Each stands beside the unit of the whole network whose copy of it is meant, or how far that is from the draft's own.
    """

    values: IntArray
    units: IntArray


def shared(values: Sequence[int], units: Sequence[int]) -> Shared:
    """The same of any sequences."""
    return Shared(np.array(values, dtype=np.int64), np.array(units, dtype=np.int64))


NO_VALUES = shared((), ())


class Block(NamedTuple):
    """Drafts ``first … last`` (exclusive)."""

    first: int
    last: int


class Event(NamedTuple):
    """A complete gradient, or the place where a unit needs its parameters or activations.

    ``copy`` is the part of the micro-batch that the gradient is of.
    """

    item: TensorRef | Gather | Fetch
    copy: int = 0


class Visit(NamedTuple):
    """What runs in a row for one unit of the whole network: copies of a layer that is written once share ``events``."""

    events: Sequence[Block | Event]
    unit: int


class Stretch(NamedTuple):
    """Visits of equal layers one behind the other, or one before the other."""

    events: Sequence[Block | Event]
    units: Sequence[int]


def stretches(visits: Iterable[Visit]) -> Iterator[Stretch]:
    """Put visits of equal layers together.

    >>> events = [Block(0, 9)]
    >>> [stretch.units for stretch in stretches([Visit(events, unit) for unit in (1, 2, 3, 9, 8)])]
    [[1, 2, 3], [9, 8]]
    """
    events: Sequence[Block | Event] = ()
    units: list[int] = []
    for visit in visits:
        steps = (units[1] - units[0],) if len(units) > 1 else (1, -1)
        if units and visit.events is events and visit.unit - units[-1] in steps:
            units.append(visit.unit)
            continue
        if units:
            yield Stretch(events, units)
        events, units = visit.events, [visit.unit]
    if units:
        yield Stretch(events, units)


@dataclass(frozen=True, slots=True)
class Uses:
    """Values that drafts use, in rows: draft i has ``values[offsets[i]:offsets[i + 1]]``, of ``units``."""

    offsets: array[int] = field(default_factory=lambda: array("q", [0]))
    values: array[int] = field(default_factory=lambda: array("q"))
    units: array[int] = field(default_factory=lambda: array("q"))

    def copy(self) -> Uses:
        """The same rows, to which others may be added."""
        return Uses(self.offsets[:], self.values[:], self.units[:])

    def add_own(self, values: Sequence[int]) -> None:
        """Add the row of one more draft, whose values are of its own copy."""
        if values:
            self.values.extend(values)
            self.units.extend((SAME,) * len(values))
        self.offsets.append(len(self.values))

    def add(self, uses: Shared, by: int = 0) -> None:
        """Add the row of one more draft, its units moved."""
        self.values.frombytes(uses.values.tobytes())
        self.units.frombytes((uses.units + by).tobytes())
        self.offsets.append(len(self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Parameters of all units that are gathered: what is wanted, and arrays (n,), which of it, its value and unit."""

    wanted: Sequence[Wanted]
    which: IntArray
    values: IntArray
    units: IntArray


class Blueprint:
    """Drafts of a network, perhaps a shallow one that stands for a deeper one, and the body of a micro-batch of it.

    A *value* is a number for a name of the lowered network; ``home`` is the unit it belongs to. ``script`` is what runs
    in a micro-batch between the parameters' arrival and the update, in order, for all units of the whole network.

    Parameters
    ----------
    found : Chain, optional
        Units of the lowered network, where it stands for a deeper one.

    Raises
    ------
    UnalikeError
        The order of the lowered network is not that of the whole with fewer layers.
    """

    def __init__(self, source: PlacedGraph, copies: Copies | None = None, found: Chain | None = None) -> None:
        self.source, self.graph = source, source.graph
        self.copies = copies or Copies()
        self.owners = self.copies.owners(source, found)
        self.names: list[str] = []
        self.home: list[int] = []
        self._number: dict[str, int] = {}
        self.tasks: list[Task] = []
        self.instructions: list[Instruction] = []
        self.beside: list[bool] = []
        self.reads, self.writes, self.completes = Uses(), Uses(), Uses()
        self.write_bytes, self.write_kind = array("q"), array("q")
        self.views: list[tuple[int, int, int]] = []
        """Draft, view, and the value whose memory it stands in."""
        for index in source.stored:
            for name in stored_values(source, index):
                self.value(name, self.owners[index])
        self.script = tuple(stretches(self._script(passes_of(source))))

    def with_messages(self, bucket_bytes: int) -> Blueprint:
        """The same micro-batch, to be gone on with in messages of another size: what is added to one, the other lacks.

        Nothing may have been added to it but its body.
        """
        found = copy(self)
        found.source = self.source.with_messages(bucket_bytes)
        for name in (
            "names",
            "home",
            "_number",
            "tasks",
            "instructions",
            "beside",
            "write_bytes",
            "write_kind",
            "views",
        ):
            setattr(found, name, copy(getattr(self, name)))
        found.reads, found.writes, found.completes = (uses.copy() for uses in (self.reads, self.writes, self.completes))
        return found

    def value(self, name: str, home: int) -> int:
        """Number of a value; the first to name it says where it is at home."""
        number = self._number.get(name)
        if number is None:
            number = self._number[name] = len(self.names)
            self.names.append(name)
            self.home.append(home)
        return number

    def named(self, name: str) -> int:
        """Number of a value that is known; raises UnalikeError where there is none."""
        if name not in self._number:
            raise UnalikeError(f"there is no value {name!r}")
        return self._number[name]

    def add(
        self,
        draft: Draft,
        home: int,
        reads: Shared | None = None,
        writes: Shared | None = None,
        by: int = 0,
    ) -> int:
        """Add a draft; what it makes is at home in `home` unless it is known. Returns its number.

        Units of `reads` and `writes` are moved `by` so many.
        """
        number = len(self.tasks)
        self.tasks.append(draft.task)
        self.instructions.append(draft.instruction)
        self.beside.append(draft.beside)
        self._use(self.writes, [buffer.name for buffer in draft.writes] if writes is None else (), home, writes, by)
        self._use(self.reads, draft.reads, home, reads, by)
        self._use(self.completes, draft.completes, home, None, by)
        if draft.writes:
            self.write_bytes.extend([buffer.size_bytes for buffer in draft.writes])
            self.write_kind.extend([KIND_INDEX[buffer.kind] for buffer in draft.writes])
        for view, owner in draft.owners.items():
            self.views.append((number, self.value(view, home), self.value(owner, home)))
        return number

    def _use(self, uses: Uses, names: Sequence[str], home: int, given: Shared | None, by: int) -> None:
        if given is not None:
            uses.add(given, by)
        else:
            uses.add_own([self.value(name, home) for name in names] if names else ())

    @cached_property
    def gathered(self) -> Gathered:
        """What is gathered once a step for all units, in order."""
        source = self.source
        wanted: list[Wanted] = []
        values: list[int] = []
        owners: list[int] = []
        for node in (p.node for p in self.graph.parameters if p.node not in source.by_unit and source.gathered(p.node)):
            ref, home = TensorRef(node), self.owners[node]
            for placed in source.gathered(node):
                wanted.append((ref, placed, source.value_name(ref, placed)))
                values.append(self.value(wanted[-1][2], home))
                owners.append(home)
        which, units = self.copies.in_order(owners)
        return Gathered(wanted=wanted, which=which, values=np.array(values, dtype=np.int64)[which], units=units)

    # The order of a micro-batch

    def _script(self, passes: Passes) -> Iterator[Visit]:
        count = self.source.options.copies
        own: frozenset[str] = frozenset()
        if count > 1:
            own = values_of_samples(self.source, (item for item in passes.items if isinstance(item, Draft)))
        spans = [
            _Span(unit, phase, [self._events(self._of_copy(items, own, copy), unit, copy) for copy in range(count)])
            for unit, phase, items in self._spans(passes)
        ]
        visits = [*self._visits(spans)]
        if count == 1:
            yield from (Visit(span.events[0], unit) for span, unit in visits)
            return
        alone = {id(event): (event,) for span in spans for events in span.events for event in events}
        copies = [
            [Visit(alone[id(event)], unit) for span, unit in visits for event in span.events[copy]]
            for copy in range(count)
        ]
        yield from in_turn(copies, self._ends_turn)

    def _of_copy(self, items: Sequence[Item], own: frozenset[str], copy: int) -> Sequence[Item]:
        """Items of a span in one copy of the micro-batch; parameters are gathered for all by the first."""
        if self.source.options.copies == 1:
            return items
        return [
            draft_of_copy(item, own, copy) if isinstance(item, Draft) else item
            for item in items
            if copy == 0 or not isinstance(item, Gather)
        ]

    def _ends_turn(self, visit: Visit) -> bool:
        (event,) = visit.events
        return isinstance(event, Block) and is_message(self.instructions[event.last - 1])

    def _spans(self, passes: Passes) -> Iterator[tuple[int, Phase, list[Item]]]:
        """Items of the body by the unit and the pass that they belong to."""
        current: tuple[int, Phase] | None = None
        items: list[Item] = []
        begin = 0
        for index, end in zip(passes.nodes, passes.reached, strict=True):
            if end == begin:
                continue
            place = self.owners[index], self.graph.nodes[index].phase
            if place != current:
                if current is not None:
                    yield *current, items
                current, items = place, []
            items += passes.items[begin:end]
            begin = end
        if current is not None:
            yield *current, items

    def _events(self, items: Sequence[Item], unit: int, copy: int) -> list[Block | Event]:
        found: list[Block | Event] = []
        begin = len(self.tasks)
        in_turns = self.source.options.copies > 1
        for item in items:
            if isinstance(item, Draft):
                self.add(item, unit)
                if not in_turns or not is_message(item.instruction):
                    continue
            if len(self.tasks) > begin:
                found.append(Block(begin, len(self.tasks)))
                begin = len(self.tasks)
            if not isinstance(item, Draft):
                found.append(Event(item, copy))
        if len(self.tasks) > begin:
            found.append(Block(begin, len(self.tasks)))
        return found

    def _visits(self, spans: Sequence[_Span]) -> Iterator[tuple[_Span, int]]:
        """Every span with every unit of the whole network that it is run for, in order."""
        copies, place = self.copies, 0
        done: set[tuple[int, Phase]] = set()
        while place < len(spans):
            span = spans[place]
            row = copies.row_of.get(span.unit)
            if row is None:
                yield span, copies.places[span.unit][0]
                place += 1
                continue
            block = spans[place : place + len(row.shallow)]
            if (row.shallow.start, span.phase) in done or not _in_row(block, row, span.phase):
                raise UnalikeError(f"the layers {row.prefix!r} do not run one after the other")
            done.add((row.shallow.start, span.phase))
            by_unit = {one.unit: one for one in block}
            order = row.deep if span.phase is not Phase.BACKWARD else reversed(row.deep)
            yield from ((by_unit[copies.of_unit[unit]], unit) for unit in order)
            place += len(block)


@dataclass(frozen=True, slots=True)
class _Span:
    unit: int
    phase: Phase
    events: list[list[Block | Event]]
    """Of each copy of the micro-batch."""


def _in_row(block: Sequence[_Span], row: Row, phase: Phase) -> bool:
    units = list(row.shallow) if phase is not Phase.BACKWARD else list(reversed(row.shallow))
    return [span.unit for span in block] == units and all(span.phase is phase for span in block)


class Placing:
    """Numbers of values in the whole network, once all of the lowered one are known."""

    def __init__(self, blueprint: Blueprint) -> None:
        self.blueprint, self.copies = blueprint, blueprint.copies
        self.home = np.array(blueprint.home, dtype=np.int64)
        units = max(self.copies.of_unit, default=-1) + 1
        counts = np.bincount(self.home + 1, minlength=units + 1)
        order = np.argsort(self.home, kind="stable")
        self.local = np.empty(len(order), dtype=np.int64)
        self.local[order] = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.of_unit = np.array([*self.copies.of_unit, NOBODY], dtype=np.int64)
        sizes = counts[self.of_unit[:-1] + 1]
        self.base = np.concatenate((counts[0] + np.cumsum(sizes) - sizes, [0])).astype(np.int64)
        """(deep units + 1,) number of the first value of each; behind them of those that are nobody's."""
        self.count = int(counts[0] + sizes.sum())
        in_row = np.array([unit in self.copies.row_of for unit in range(units)] + [False])
        single = np.array(
            [(self.copies.places.get(unit) or (0,))[0] for unit in range(units)] + [NOBODY], dtype=np.int64
        )
        self.fixed = np.where(in_row[self.home], NOBODY, self.base[single[self.home]] + self.local)
        rows = {unit: number for number, row in enumerate(self.copies.rows) for unit in row.shallow}
        self.row = np.array([rows.get(unit, NOBODY) for unit in range(units)] + [NOBODY], dtype=np.int64)
        self._beside: dict[tuple[int, int], int] = {}

    def __call__(self, values: IntArray, units: IntArray) -> IntArray:
        """Numbers of `values` as the copies number `units` know them."""
        found: IntArray = self.base[units] + self.local[values]
        other = np.flatnonzero(self.of_unit[units] != self.home[values])
        found[other] = self.fixed[values[other]]
        elsewhere = other[found[other] < 0]
        if len(elsewhere):
            found[elsewhere] = self._elsewhere(values[elsewhere], units[elsewhere])
        return found

    def _elsewhere(self, values: IntArray, units: IntArray) -> IntArray:
        """Numbers of values that others find in a row; equal layers find the same value of the layer beside them."""
        home, own = self.home[values], self.of_unit[units]
        there = np.clip(units + home - own, 0, len(self.of_unit) - 2)
        kind, row = self.of_unit[there], self.row[home]
        alike = (np.abs(home - own) == 1) & (there == units + home - own)
        alike &= (row != NOBODY) & (row == self.row[own]) & (row == self.row[kind])
        # All others stand for themselves; the unit of a value is NOBODY where it is not asked for by one.
        alone = -1 - (values * len(self.of_unit) + units - NOBODY)
        key = np.where(alike, (values * len(self.row) + own) * len(self.row) + kind, alone)
        _, first, of = np.unique(key, return_index=True, return_inverse=True)
        begin = np.where(alike, self.base[there], 0)
        named = [self._neighbour(int(values[place]), int(units[place])) for place in first.tolist()]
        numbers: IntArray = begin + (np.array(named, dtype=np.int64) - begin[first])[of]
        return numbers

    def _neighbour(self, value: int, unit: int) -> int:
        key = value, unit
        if key not in self._beside:
            home, name = int(self.home[value]), self.blueprint.names[value]
            name, there = self.copies.neighbour(name, home, int(self.of_unit[unit]), unit)
            other = self.blueprint.named(name)
            if self.home[other] != self.of_unit[there]:
                raise UnalikeError(f"value {name!r} is not of the unit that it is named after")
            self._beside[key] = int(self.base[there] + self.local[other])
        return self._beside[key]


class BufferNames(Sequence[str]):
    """Names of the values of the whole network, and of the optimizer states of `states`, made when asked for."""

    def __init__(self, placing: Placing, states: Sequence[int]) -> None:
        self.placing, self.states = placing, states

    def __len__(self) -> int:
        return self.placing.count + len(self.states)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index >= self.placing.count:
            return f"{self[self.states[index - self.placing.count]]}.states"
        placing = self.placing
        unit = int(np.searchsorted(placing.base[:-1], index, side="right")) - 1
        home = int(placing.of_unit[unit])
        local = index - int(placing.base[unit])
        value = int(np.flatnonzero((placing.home == home) & (placing.local == local))[0])
        return placing.copies.deep_name(placing.blueprint.names[value], home, unit)


GRADIENT = KIND_INDEX[BufferKind.GRADIENT]
