"""Visits of equal layers: what one adds to a micro-batch is written once for each state in which it finds it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import ceil
from typing import Generic, TypeVar

import numpy as np

from planner.lowering.blueprint import Block, Event, Stretch, Visit
from planner.lowering.travelling import Entry, Kind, Pending
from simulator.task_table import IntArray

T = TypeVar("T")
_ORDER, _PERSISTENT, _GRADIENT = np.array([0, 0, 1]), np.array([0, 1]), np.array([0, 1, 0])
"""Where rows of what is written of a micro-batch have their unit."""


class Ahead(Generic[T]):
    """What a script has of one kind of item, in order, with the units, and how much of it has been passed."""

    def __init__(self, script: Sequence[Stretch], kind: type[T]) -> None:
        self.items: list[tuple[T, int]] = []
        self.passed = 0
        self._of: dict[int, list[T]] = {}
        for events, units in script:
            if id(events) not in self._of:
                items = [event.item for event in events if isinstance(event, Event)]
                self._of[id(events)] = [item for item in items if isinstance(item, kind)]
            if self._of[id(events)]:
                self.items += [(item, unit) for unit in units for item in self._of[id(events)]]

    def count(self, events: Sequence[Block | Event]) -> int:
        """How many there are of the events of a visit."""
        return len(self._of[id(events)])

    def around(self, visit: Visit) -> tuple[object, ...]:
        """What the next visit has, with what is before and behind that; units count from its own."""
        count, begin = self.count(visit.events), self.passed
        if not count:
            return ()
        found = self.items[max(begin - 1, 0) : begin + count + 1]
        return (begin == 0, *[(id(item), unit - visit.unit) for item, unit in found])


@dataclass(slots=True)
class MicroBatch:
    """What has been written of a micro-batch.

    ``order`` holds drafts of the blueprint in threes: the first, the one behind the last, the unit they are run for;
    ``persistent`` values that outlive a micro-batch, beside parameters, the batch and the loss, with their units, and
    ``synchronised`` gradients in threes.
    ``pending`` are those of ``buckets`` that are not empty, as they began to be so.
    """

    order: array[int]
    persistent: array[int]
    synchronised: array[int]
    buckets: dict[Kind, Pending]
    pending: dict[Kind, Pending]


@dataclass(slots=True)
class _Held:
    """A bucket: a number for what is in it, counted from a unit, 0 for nothing; and entries still to be put there."""

    bucket: Pending
    number: int = 0
    unit: int = 0
    count: int = 0
    to_come: list[tuple[Sequence[Entry], int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What a visit does to a bucket: empties it once or more, or not; what it leaves there is beside the rest or alone.

    Units count from the visit's. ``found`` is the number of what it finds and how far that was from the visit.
    """

    kind: Kind
    found: tuple[int, int]
    empties: bool
    left: tuple[Entry, ...]
    left_number: int
    left_bytes: int


@dataclass(frozen=True, slots=True)
class _Added:
    """What a visit adds, its units from its own, and what it does to buckets, in the order in which they then wait."""

    order: IntArray
    persistent: IntArray
    synchronised: IntArray
    changes: tuple[_Change, ...]


class Visits:
    """Adds visits to a micro-batch: what `write` has added for one is repeated for others that find the same.

    That is what is ``around``, and in buckets that it empties, or that are emptied ``at_once`` at some place, the same
    gradients as far from the visit's unit; in other buckets there need only be room.
    """

    def __init__(self, batch: MicroBatch, write: Callable[[Visit], None], at_once: Callable[[Kind], bool]) -> None:
        self.batch, self.write, self.at_once = batch, write, at_once
        self._held: dict[Kind, _Held] = {}
        self._numbers: dict[object, int] = {}
        self._known: dict[object, list[_Added]] = {}

    def add_all(self, stretch: Stretch) -> None:
        """Add visits that have nothing around them.

        From where they find again what earlier ones found, as far from their units, the rest is added at once.
        """
        events, units = stretch
        if len(events) == 1 and isinstance(events[0], Block):
            self.batch.order.frombytes(_tiled(np.array([(*events[0], 0)]), _ORDER, np.array(units)).tobytes())
            return
        done: list[_Added] = []
        emptied: set[Kind] = set()
        begins: dict[object, int] = {}
        while len(done) < len(units):
            place = len(done)
            found = self._finds(emptied, units[place])
            if found in begins:
                period, begun = done[begins[found] :], units[begins[found] : place]
                times = self._times(period, emptied, (len(units) - place) // len(period))
                if times > 0:
                    self._go_on(period, begun, units[place : place + times * len(period)], emptied)
                    done += period * times
                    continue
            begins[found] = place
            done.append(self.add(Visit(events, units[place]), ()))
            # What fills an empty bucket lets it grow.
            emptied.update([change.kind for change in done[-1].changes if change.empties and change.found[0]])

    def add(self, visit: Visit, around: object) -> _Added:
        """Add one more visit."""
        events, unit = visit
        # Legs, kinds and events are kept, so that their identities stay theirs.
        known = self._known.setdefault((id(events), around, len(self._held)), [])
        for added in known:
            if all(self._fits(change, unit) for change in added.changes):
                self._repeat(added, unit)
                return added
        known.append(self._written(visit))
        return known[-1]

    def _finds(self, emptied: Collection[Kind], unit: int) -> tuple[object, ...]:
        """What decides what visits do that empty some buckets: what is in these, and whether anything is in others."""
        found = [self._found(held, unit) if kind in emptied else held.number == 0 for kind, held in self._held.items()]
        return tuple(found)

    def _times(self, period: Sequence[_Added], emptied: Collection[Kind], most: int) -> int:
        """How often visits may come again, at most so often, before a bucket is full that they do not empty."""
        growing: dict[Kind, list[_Change]] = {}
        for change in (change for added in period for change in added.changes if change.kind not in emptied):
            growing.setdefault(change.kind, []).append(change)
        for kind, changes in growing.items():
            held, bucket = self._held[kind], self._held[kind].bucket
            more = (sum(change.left_bytes for change in changes), sum(len(change.left) for change in changes))
            room = (bucket.full_bytes - bucket.size_bytes, bucket.most - held.count)
            for adds, free in zip(more, room, strict=True):
                most = most if most * adds < free else ceil(free / adds) - 1
        return most

    def _go_on(
        self, period: Sequence[_Added], begun: Sequence[int], units: Sequence[int], emptied: Collection[Kind]
    ) -> None:
        """Repeat for more units what a period of visits, those of units `begun`, has added again and again."""
        starts = np.array(units[:: len(period)])
        apart = [unit - begun[0] for unit in begun]
        for listed, rows, place in (
            (self.batch.order, [added.order for added in period], _ORDER),
            (self.batch.persistent, [added.persistent for added in period], _PERSISTENT),
            (self.batch.synchronised, [added.synchronised for added in period], _GRADIENT),
        ):
            one = np.concatenate([row + unit * place for row, unit in zip(rows, apart, strict=True)])
            listed.frombytes(_tiled(one, place, starts).tobytes())
        by = units[-1] - begun[-1]
        for held in (self._held[kind] for kind in emptied):
            held.unit += by
            held.to_come = [(entries, unit + by) for entries, unit in held.to_come]
            held.bucket.entries = _moved(held.bucket.entries, by)
        for unit, added in zip(units, cycle(period), strict=False):
            for change in added.changes:
                if change.kind not in emptied:
                    self._leave(change, unit)

    def restore(self) -> None:
        """Put into buckets what visits have left there."""
        for held in self._held.values():
            for entries, unit in held.to_come:
                held.bucket.entries += _moved(entries, unit)
            held.to_come.clear()

    def _found(self, held: _Held, unit: int) -> tuple[int, int]:
        return held.number, held.number and unit - held.unit

    def _fits(self, change: _Change, unit: int) -> bool:
        held = self._held[change.kind]
        if change.empties:
            return change.found == self._found(held, unit)
        bucket = held.bucket
        return (
            (held.number == 0) is (change.found[0] == 0)
            and bucket.size_bytes + change.left_bytes < bucket.full_bytes
            and held.count + len(change.left) < bucket.most
        )

    def _written(self, visit: Visit) -> _Added:
        self.restore()
        batch, unit = self.batch, visit.unit
        order, persistent, synchronised = len(batch.order), len(batch.persistent), len(batch.synchronised)
        before = {k: (bucket.entries, len(bucket.entries), bucket.size_bytes) for k, bucket in batch.buckets.items()}
        self.write(visit)
        waiting = [*batch.pending, *(kind for kind in batch.buckets if kind not in batch.pending)]
        changes = [self._change(kind, before.get(kind), unit) for kind in waiting]
        return _Added(
            order=_rows(batch.order[order:], _ORDER, -unit),
            persistent=_rows(batch.persistent[persistent:], _PERSISTENT, -unit),
            synchronised=_rows(batch.synchronised[synchronised:], _GRADIENT, -unit),
            changes=tuple([change for change in changes if change is not None]),
        )

    def _change(self, kind: Kind, before: tuple[list[Entry], int, int] | None, unit: int) -> _Change | None:
        """What a visit that has been written has done to a bucket; nothing where it has not touched it."""
        bucket = self.batch.buckets[kind]
        held = self._held.setdefault(kind, _Held(bucket))
        entries, count, size = before or ([], 0, 0)
        empties = before is None or bucket.entries is not entries
        if not empties and len(bucket.entries) == count and not self.at_once(kind):
            return None
        # One that is to be found as it is counts as emptied and filled again.
        empties = empties or self.at_once(kind)
        left = tuple(_moved(bucket.entries[0 if empties else count :], -unit))
        found = self._found(held, unit)
        change = _Change(
            kind=kind,
            found=found,
            empties=empties,
            left=left,
            left_number=self._number(left),
            left_bytes=bucket.size_bytes - (0 if empties else size),
        )
        self._note(held, change, unit)
        return change

    def _note(self, held: _Held, change: _Change, unit: int) -> None:
        """Number what is in a bucket behind a change."""
        number = change.left_number
        if not change.empties and held.number:
            key = self._found(held, unit), number
            number = self._numbers.setdefault(key, len(self._numbers) + 1)
        held.number, held.unit = number, unit
        held.count = len(change.left) + (0 if change.empties else held.count)

    def _number(self, entries: Sequence[Entry]) -> int:
        if not entries:
            return 0
        key = tuple([(unit, id(leg)) for unit, leg in entries])
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def _repeat(self, added: _Added, unit: int) -> None:
        batch = self.batch
        batch.order.frombytes((added.order + unit * _ORDER).tobytes())
        batch.persistent.frombytes((added.persistent + unit * _PERSISTENT).tobytes())
        batch.synchronised.frombytes((added.synchronised + unit * _GRADIENT).tobytes())
        for change in added.changes:
            held = self._held[change.kind]
            if change.empties:
                held.bucket.emptied()
                held.to_come.clear()
                batch.pending.pop(change.kind, None)
            self._leave(change, unit)

    def _leave(self, change: _Change, unit: int) -> None:
        """Leave in a bucket what a visit does."""
        held = self._held[change.kind]
        self._note(held, change, unit)
        held.bucket.size_bytes += change.left_bytes
        if change.left:
            held.to_come.append((change.left, unit))
            self.batch.pending.setdefault(change.kind, held.bucket)


def _moved(entries: Sequence[Entry], by: int) -> list[Entry]:
    return [(unit + by, leg) for unit, leg in entries]


def _rows(listed: array[int], place: IntArray, by: int) -> IntArray:
    """Rows of what is listed, with units moved; `place` is 1 where a row has its unit."""
    return np.array(listed, dtype=np.int64).reshape(-1, len(place)) + by * place


def _tiled(rows: IntArray, place: IntArray, units: IntArray) -> IntArray:
    """Rows once for each of `units`, from which theirs count."""
    found: IntArray = (rows + units[:, None, None] * place).reshape(-1, len(place))
    return found
