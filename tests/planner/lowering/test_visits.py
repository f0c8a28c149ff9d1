"""Visits that are repeated leave what would be there if each were written."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.lowering.blueprint import Block, Stretch, Visit
from planner.lowering.travelling import Pending
from planner.lowering.visits import MicroBatch, Visits


class Bucketing:
    """Every visit puts gradients into buckets; those that are full are written down with what is in them."""

    def __init__(self, full: Sequence[int], gradients: Sequence[tuple[int, int]]) -> None:
        self.kinds: list[Any] = [f"kind {number}" for number in range(len(full))]
        self.gradients = gradients
        self.legs: list[Any] = [f"leg {number}" for number in range(len(gradients))]
        self.full = full
        self.batch = MicroBatch(array("q"), array("q"), array("q"), {}, {})

    def write(self, visit: Visit) -> None:
        batch = self.batch
        for leg, (number, size) in zip(self.legs, self.gradients, strict=True):
            kind = self.kinds[number]
            bucket = batch.buckets.setdefault(kind, Pending(inf, self.full[number]))
            batch.persistent.extend((size, visit.unit))
            batch.pending.setdefault(kind, bucket)
            bucket.entries.append((visit.unit, leg))
            bucket.size_bytes += size
            if bucket.size_bytes >= bucket.full_bytes:
                for unit, _ in batch.pending.pop(kind).emptied():
                    batch.order.extend((number, size, visit.unit))
                    batch.synchronised.extend((number, unit, size))

    def left(self) -> object:
        batch = self.batch
        buckets = [(bucket.entries, bucket.size_bytes) for bucket in batch.buckets.values()]
        return batch.order, batch.persistent, batch.synchronised, buckets, [*batch.pending]


@settings(deadline=None, max_examples=50)
@given(
    full=st.lists(st.integers(1, 40), min_size=2, max_size=2),
    gradients=st.lists(st.tuples(st.integers(0, 1), st.integers(1, 9)), min_size=1, max_size=4),
    count=st.integers(1, 60),
)
@example(full=[2, 3], gradients=[(0, 1), (1, 1)], count=33)
@example(full=[1000, 7], gradients=[(0, 1), (1, 2)], count=60)
@example(full=[50, 7], gradients=[(0, 1), (1, 2)], count=60)
def test_stretches_of_visits_leave_what_each_visit_does(
    full: list[int], gradients: list[tuple[int, int]], count: int
) -> None:
    one, other = Bucketing(full, gradients), Bucketing(full, gradients)
    visits = Visits(one.batch, one.write, lambda _: False)
    events = [Block(0, 1), Block(1, 2)]
    units = range(count, 0, -1)
    visits.add_all(Stretch(events, units))
    visits.restore()
    for unit in units:
        other.write(Visit(events, unit))
    assert one.left() == other.left()


def test_buckets_that_only_grow_are_filled_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[Visit] = []
    add = Visits.add

    def counted(visits: Visits, visit: Visit, around: object) -> object:
        alone.append(visit)
        return add(visits, visit, around)

    monkeypatch.setattr(Visits, "add", counted)
    writer = Bucketing([1000, 6], [(0, 1), (1, 2)])
    Visits(writer.batch, writer.write, lambda _: False).add_all(Stretch([Block(0, 1), Block(1, 2)], range(600)))
    assert len(alone) < 12
