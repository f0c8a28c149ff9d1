"""The table over evenly spaced bytes: a true bound, and the best where what was rounded fits."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.search.stages import one_rank
from planner.search.stages.byte_grid import LONG, ByteGrid, GridKind, spacing_of
from planner.search.stages.fragments import ACTIVATION, STEADY, TRANSIENT, Fragments
from planner.search.stages.partition import partition
from planner.search.stages.priced_chain import PricedChain, PricedWays
from planner.search.stages.task import PartitionTask

TENSOR = 64.0
Way = tuple[int, float, int, int]
"""Seconds, bytes, boundary states."""


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[Way]], list[int], float, float]:
    """A unit, a row of equal units and a unit, whose ways keep whole tensors and a little, and how much may stand."""

    def ways(entries: list[int], exits: list[int], most: int) -> list[Way]:
        found = []
        for entry in entries:
            for leave in exits:
                for _ in range(draw(st.integers(1, most))):
                    held = TENSOR * draw(st.integers(0, 6)) + draw(st.sampled_from([0.0, 0.0, 0.01, 0.3]))
                    found.append((draw(st.integers(1, 50)), held, entry, leave))
        return found

    kinds = [ways([-1], [0, 1], 2), ways([0, 1], [0, 1], 3), ways([0, 1], [-1], 2)]
    kinds[0] = [(s, held + draw(st.floats(0, TENSOR)), e, x) for s, held, e, x in kinds[0]]
    counts = [1, draw(st.integers(LONG, LONG + 6)), 1]
    return kinds, counts, draw(st.floats(0.0, 1.05)), draw(st.sampled_from([0.0, 0.0, 0.02]))


def chain_of(drawn: tuple[list[list[Way]], list[int], float, float]) -> tuple[list[list[Way]], list[int], float]:
    kinds, counts, share, noise = drawn
    kinds = [[(s, b + noise * (n % 3), e, x) for n, (s, b, e, x) in enumerate(kind)] for kind in kinds]
    low, high = (
        sum(pick(b for _, b, *_ in kind) * count for kind, count in zip(kinds, counts, strict=True))
        for pick in (min, max)
    )
    return kinds, counts, low + share * (high - low)


def least_seconds(kinds: list[list[Way]], counts: list[int], room: float) -> float:
    """By every way of every unit, those left out that another one beats in seconds and bytes."""
    reached: dict[int, list[tuple[float, float]]] = {-1: [(0.0, 0.0)]}
    for kind in (kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)):
        after: dict[int, list[tuple[float, float]]] = {}
        for seconds, held, entry, leave in kind:
            after.setdefault(leave, []).extend((t + seconds, b + held) for t, b in reached.get(entry, ()))
        reached = {}
        for state, values in after.items():
            kept: list[tuple[float, float]] = []
            for value in sorted(values):
                if not kept or value[1] < kept[-1][1]:
                    kept.append(value)
            reached[state] = kept
    return min((t for t, b in reached.get(-1, ()) if b <= room * (1 + 1e-12)), default=np.inf)


def on_one_rank(kinds: Sequence[Fragments], counts: Sequence[int], limit_bytes: float) -> PartitionTask:
    """A row of units on one rank, so many of each kind, that send nothing."""
    return PartitionTask(
        kinds=tuple(kinds),
        counts=tuple(counts),
        sends_s=np.zeros((sum(counts) - 1, 2)),
        fill_sends=0.0,
        steady_sends=0.0,
        ranks=1,
        chunks=1,
        rank_of=np.zeros(1, dtype=np.int64),
        in_flight=np.ones(1),
        limit_bytes=limit_bytes,
    )


def task_of(kinds: list[list[Way]], counts: list[int], room: float) -> PartitionTask:
    made = []
    for kind in kinds:
        values = np.zeros((len(kind), 7))
        values[:, STEADY] = [way[0] for way in kind]
        values[:, ACTIVATION] = [way[1] for way in kind]
        values[:, TRANSIENT] = 1.0
        entry, leave = (np.array([way[side] for way in kind]) for side in (2, 3))
        made.append(Fragments(values, entry, leave, np.arange(len(kind))[:, None]))
    return on_one_rank(made, counts, room + 1.0)


NO_WAY_AT_EVERY_PRICE: tuple[list[list[Way]], list[int], float, float] = (
    [
        [(1, 0.0, -1, 0), (3, 0.0, -1, 1)],
        [(1, 64.0, 0, 0), (2, 0.0, 0, 0), (2, 0.0, 0, 1), (1, 0.0, 1, 0), (1, 0.0, 1, 1)],
        [(1, 0.0, 0, -1), (1, 0.0, 1, -1)],
    ],
    [1, 8, 1],
    0.5,
    0.0,
)


@settings(max_examples=60)
@given(chains())
@example(NO_WAY_AT_EVERY_PRICE)
def test_one_rank_of_evenly_spaced_bytes_is_the_best(drawn: tuple[list[list[Way]], list[int], float, float]) -> None:
    kinds, counts, room = chain_of(drawn)
    found, best = partition(task_of(kinds, counts, room)), least_seconds(kinds, counts, room)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s <= best * (1 + 1e-9)


@settings(max_examples=60)
@given(chains())
def test_grid_bounds_every_choice(drawn: tuple[list[list[Way]], list[int], float, float]) -> None:
    kinds, counts, room = chain_of(drawn)
    parts = []
    for kind, count in zip(kinds, counts, strict=True):
        held = np.array([way[1] for way in kind])
        entry, leave = (np.array([way[side] + 1 for way in kind]) for side in (2, 3))
        parts.append(GridKind(held, entry, leave, count, np.arange(len(kind))))
    spacing = spacing_of(parts) or TENSOR
    each = [np.array([float(way[0]) for way in kind]) for kind in kinds]
    costs = [cost for cost, count in zip(each, counts, strict=True) for _ in range(count)]
    grid, best = ByteGrid(parts, costs, spacing, room), least_seconds(kinds, counts, room)
    if not grid.small:
        assert best == np.inf
        return
    grid.fill()
    least = grid.best()
    if least is None:
        assert best == np.inf
        return
    seconds, ways = least
    units = [kind for kind, count in zip(kinds, counts, strict=True) for _ in range(count)]
    picked = [unit[way] for unit, way in zip(units, ways, strict=True)]
    assert seconds == pytest.approx(sum(way[0] for way in picked))
    assert all(left[3] == right[2] for left, right in pairwise(picked))
    assert seconds <= best * (1 + 1e-9)
    if sum(way[1] for way in picked) <= room:
        assert seconds == pytest.approx(best)


def test_ways_that_differ_in_whole_tensors_need_no_more_than_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ninety-six units of many nearly equal ways: following few of them leaves something open, the table does not."""
    monkeypatch.setattr(one_rank, "BEAMS", (1,))
    kind = [
        (1000 + 7 * (6 - n) ** 2 + extra, TENSOR * n - 1e-4 * extra, e, x)
        for n in range(6)
        for extra in range(4)
        for e in (0, 1)
        for x in (0, 1)
    ]
    kinds = [[(5, 3.0, -1, 0), (6, 1.0, -1, 1)], kind, [(9, 2 * TENSOR, 0, -1), (8, 2.4 * TENSOR, 1, -1)]]
    counts = [1, 96, 1]
    room = 96 * 2.37 * TENSOR
    found = partition(task_of(kinds, counts, room), width=1)
    assert found is not None
    assert found.lower_bound_s == pytest.approx(found.objective_s)
    assert found.memory_bytes[0] <= room + 1.0


def test_units_none_of_whose_ways_takes_less_than_the_limit_leave_no_choice() -> None:
    """A better plan may be known than any that this limit on the most of all units leaves."""
    kind = [(9 - n, TENSOR * n, 0, 0) for n in range(4)]
    values, one = np.array([(s, 0.0, 0.0, held) for s, held, *_ in kind], dtype=float), np.zeros(4, dtype=np.int64)
    first = PricedWays(values[:1], np.ones(1), one[:1], one[:1], one[:1])
    row = PricedWays(values, np.ones(4), one, one, np.arange(4))
    chain = PricedChain([first, row], [1, LONG], 1.5 * LONG * TENSOR)
    assert chain.spacing == TENSOR
    choices, least = chain.spaced(chain.bound_s * 1.01)
    assert choices
    assert least >= chain.bound_s
    assert chain.spaced(chain.bound_s * 0.99) == ([], np.inf)
