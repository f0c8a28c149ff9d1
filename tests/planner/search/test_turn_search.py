"""Several chunks a rank on chains too long to be partitioned exactly."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.search.stages import cutting
from planner.search.stages.cutting import cut, cut_turns
from planner.search.stages.fragments import ACTIVATION, FILL, RESIDENT, STEADY, Fragments
from planner.search.stages.partition import PartitionTask, partition
from planner.search.stages.segments import Segments
from planner.search.stages.turn_search import SHORT
from tests.planner.search.test_pipeline_partition import tasks

BLOCKS = 12


def ways(*times_and_bytes: tuple[float, float], entry: int = 0, leave: int = 0) -> Fragments:
    """Ways of one unit by their seconds and the bytes of one micro-batch."""
    values = np.zeros((len(times_and_bytes), 7))
    for row, (seconds, kept) in zip(values, times_and_bytes, strict=True):
        row[[FILL, STEADY, ACTIVATION, RESIDENT]] = seconds / 10, seconds, kept, 1.0
    size = len(values)
    return Fragments(values, np.full(size, entry), np.full(size, leave), np.arange(size)[:, None])


def chain(head: tuple[float, float], *block: tuple[float, float], chunks: int, limit_bytes: float) -> PartitionTask:
    """An embedding, equal blocks and a head on two ranks, the first of which has more in flight."""
    return PartitionTask(
        kinds=(ways((0.5, 1.0), entry=-1), ways(*block), ways(head, leave=-1)), counts=(1, BLOCKS, 1),
        sends_s=np.zeros((BLOCKS + 1, 1)), fill_sends=1.0, steady_sends=2.0, ranks=2, chunks=chunks,
        rank_of=np.tile(np.arange(2), chunks), in_flight=np.tile([2.0, 1.0], chunks), limit_bytes=limit_bytes,
    )  # fmt: skip


@settings(max_examples=20, deadline=None)
@given(tasks(chunks=2), st.integers(0, 2**32 - 1))
def test_the_compiled_loop_picks_the_same_rows(task: PartitionTask, seed: int) -> None:
    segments = Segments(task, np.inf, 100)
    assume(segments.groups)
    random = np.random.default_rng(seed)
    tables = random.choice([0.0, 1.0, 2.0, 3.0, np.inf], size=(2, 2, 3, len(segments.values)))
    which, turns = random.integers(0, 2, task.pieces).tolist(), random.random((task.chunks, 2, 3))
    found = []
    for many in (0, 10**9):
        with patch.object(cutting, "_MANY", many):
            found.append(cut_turns(segments, tables, which, turns))
    assert found[0] == found[1]


@settings(max_examples=40)
@given(tasks(chunks=2), st.integers(0, 2**32 - 1))
def test_limits_of_turns_are_chosen_with_the_cheapest_row(task: PartitionTask, seed: int) -> None:
    segments = Segments(task, np.inf, 100)
    assume(segments.groups)
    random = np.random.default_rng(seed)
    tables = random.choice([0.0, 1.0, 2.0, 3.0, np.inf], size=(2, 3, len(segments.values)))
    which, turns = random.integers(0, 2, task.pieces), random.integers(0, 4, (task.chunks, 3)).astype(float)
    costs = np.minimum.reduceat(tables, segments.offsets, axis=2)
    best = np.inf
    for limits in product(range(3), repeat=task.chunks):
        each = np.array([costs[kind, limits[chunk // task.ranks]] for chunk, kind in enumerate(which)])
        groups = cut(segments, each, range(task.pieces))
        if groups is not None:
            row = sum(each[chunk, group] for chunk, group in enumerate(groups))
            best = min(best, row + sum(turns[turn, limit] for turn, limit in enumerate(limits)))
    both = np.stack([tables, np.where(np.isinf(tables), np.inf, 0.0)], axis=1)
    found = cut_turns(segments, both, which.tolist(), np.stack([turns, turns], axis=1))
    assert (found is None) == (best == np.inf)
    if found is not None:
        picks = found[0]
        least = 0.0
        for turn in range(task.chunks):
            inside = range(turn * task.ranks, (turn + 1) * task.ranks)
            sums = sum(tables[which[chunk], :, picks[chunk]] for chunk in inside)
            least += float((sums + turns[turn]).min())
        assert least == pytest.approx(best)


def test_chunks_need_not_be_alike_where_memory_does_not_bind() -> None:
    """A head that keeps much more than the chunks before it."""
    task = chain((3.0, 40.0), (1.0, 0.5), chunks=7, limit_bytes=200.0)
    assert task.units == task.pieces > SHORT
    assert task.roomy
    found = partition(task)
    assert found is not None
    assert found.ends == tuple(range(1, task.units + 1))


@pytest.mark.parametrize("chunks", [2, 3])
def test_no_more_units_keep_less_than_must(chunks: int) -> None:
    fast, slow = (1.0, 4.0), (1.4, 1.0)
    task = chain((2.0, 1.0), fast, slow, chunks=chunks, limit_bytes=45.0)
    found = partition(task)
    assert found is not None
    assert np.all(found.memory_bytes <= task.limit_bytes)
    begins = np.concatenate([[0], found.ends[:-1]])
    chunk = np.searchsorted(begins, np.arange(task.units), side="right") - 1
    late = np.array([kind == 1 and label == 1 for kind, label in zip(kinds_of(task), found.labels, strict=True)])
    saved = task.in_flight[chunk] * (fast[1] - slow[1])
    for rank in range(task.ranks):
        own = saved[late & (task.rank_of[chunk] == rank)]
        assert not len(own) or found.memory_bytes[rank] + own.min() > task.limit_bytes
    only_slow = partition(replace(task, kinds=(task.kinds[0], ways(slow), task.kinds[2]), limit_bytes=np.inf))
    only_fast = partition(replace(task, limit_bytes=np.inf))
    assert only_slow is not None
    assert only_fast is not None
    assert only_fast.objective_s < found.objective_s < only_slow.objective_s


def kinds_of(task: PartitionTask) -> list[int]:
    """Kind of every unit."""
    return [kind for kind, count in enumerate(task.counts) for _ in range(count)]
