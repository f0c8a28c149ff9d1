"""The stage partition against brute force over all cuts and labels."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from planner.search.configurations.bounds import memory_bound, task_bound
from planner.search.stages import partition as pipeline
from planner.search.stages.block_bounds import chunk_times, least_turns
from planner.search.stages.chain_bound import chain_bound
from planner.search.stages.cutting import cut
from planner.search.stages.fragments import ACTIVATION, BACKLOG, FILL, QUEUE, RESIDENT, STEADY, TRANSIENT, Fragments
from planner.search.stages.partition import Partition, PartitionTask, partition
from planner.search.stages.segments import Segments
from planner.search.stages.task import idealised


@st.composite
def kinds(draw: st.DrawFn, count: int, last: bool, entry: list[int], turn: int) -> tuple[Fragments, list[int]]:
    """Ways of one kind of unit; several units in a row may follow each other."""
    size = draw(st.integers(1, 3))
    entries = [draw(st.sampled_from(entry)) for _ in range(size)]
    exits = [draw(st.integers(0, 1)) if not last else -1 for _ in range(size)]
    if count > 1:
        entries = [e if e >= 0 else 0 for e in entries]
        exits = [draw(st.integers(0, 1)) for _ in range(size)]
    numbers = st.integers(0, 6)
    values = np.zeros((size, 7))
    for row in values:
        row[FILL], row[STEADY] = 1 + draw(numbers), 1 + draw(numbers)
        row[QUEUE] = draw(numbers)
        row[BACKLOG] = row[QUEUE] - draw(numbers)
        row[ACTIVATION], row[RESIDENT], row[TRANSIENT] = draw(numbers), draw(numbers), draw(numbers)
    labels = np.arange(size)[:, None]
    return Fragments(values, np.array(entries), np.array(exits), labels), sorted(set(exits))


@st.composite
def tasks(draw: st.DrawFn, chunks: int = 1) -> PartitionTask:
    pieces = draw(st.integers(1, 3))
    counts = [1, *draw(st.lists(st.integers(1, 3), min_size=0, max_size=2)), 1]
    found, states = [], [-1]
    for number, count in enumerate(counts):
        kind, states = draw(kinds(count, number == len(counts) - 1, states, number))
        found.append(kind)
    units = sum(counts)
    between = [[float(draw(st.integers(0, 2))) for _ in range(2)] for _ in counts]
    sends = [between[k] for k, count in enumerate(counts) for _ in range(count)][:-1]
    ranks = draw(st.integers(1, 3)) if chunks == 1 else pieces
    return PartitionTask(
        kinds=tuple(found),
        counts=tuple(counts),
        sends_s=np.array(sends).reshape(units - 1, 2),
        fill_sends=1.0,
        steady_sends=2.0,
        ranks=ranks,
        chunks=chunks,
        rank_of=np.tile(np.arange(ranks), chunks),
        in_flight=np.tile(np.arange(ranks, 0, -1.0), chunks),
        limit_bytes=float(draw(st.sampled_from([8, 15, 25, 40, 1000]))),
        hidden_share=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
    )


def brute_force(task: PartitionTask) -> float:
    """Least objective of all cuts and labels that fit, infinite where none does."""
    kind_of = [kind for kind, count in zip(task.kinds, task.counts, strict=True) for _ in range(count)]
    best = np.inf
    for labels in product(*(range(len(kind)) for kind in kind_of)):
        rows = np.array([kind.values[label] for kind, label in zip(kind_of, labels, strict=True)])
        ends = [(int(k.entry[label]), int(k.exit[label])) for k, label in zip(kind_of, labels, strict=True)]
        if ends[0][0] != -1 or ends[-1][1] != -1 or any(a[1] != b[0] for a, b in pairwise(ends)):
            continue
        for cuts in combinations(range(1, task.units), task.pieces - 1):
            if any(cut not in places for cut, places in zip(cuts, task.cuts, strict=False)):
                continue
            best = min(best, value(task, rows, [e for e, _ in ends], (0, *cuts, task.units)))
    return best


def value(task: PartitionTask, rows: np.ndarray, entries: list[int], cuts: tuple[int, ...]) -> float:
    fill = np.zeros(task.pieces)
    busy = np.zeros(task.pieces)
    standing, transient = np.zeros(task.ranks), np.zeros(task.ranks)
    for chunk, (begin, end) in enumerate(pairwise(cuts)):
        part = rows[begin:end]
        send = task.sends_s[begin - 1, entries[begin]] if begin else 0.0
        fill[chunk] = part[:, FILL].sum() + task.fill_sends * send
        # What is left of the messages when the backward pass ends, message by message.
        clock = free = 0.0
        for row in part[::-1]:
            clock += row[QUEUE] - row[BACKLOG]
            free = max(free, clock) + row[QUEUE]
        own = part[:, STEADY].sum()
        busy[chunk] = own + max(task.steady_sends * send - task.hidden_share * own, 0.0) + max(free - clock, 0.0)
        rank = task.rank_of[chunk]
        standing[rank] += task.in_flight[chunk] * part[:, ACTIVATION].sum() + part[:, RESIDENT].sum()
        transient[rank] = max(transient[rank], part[:, TRANSIENT].max())
    if np.any(standing + transient > task.limit_bytes):
        return np.inf
    return float(fill.sum() + busy.reshape(task.chunks, task.ranks).max(axis=1).sum())


def check(task: PartitionTask, found: Partition) -> None:
    """What a partition says of itself is so."""
    kind_of = [kind for kind, count in zip(task.kinds, task.counts, strict=True) for _ in range(count)]
    rows = np.array([kind.values[label] for kind, label in zip(kind_of, found.labels, strict=True)])
    entries = [int(kind.entry[label]) for kind, label in zip(kind_of, found.labels, strict=True)]
    assert found.objective_s == pytest.approx(value(task, rows, entries, (0, *found.ends)))
    assert np.all(found.memory_bytes <= task.limit_bytes)


def check_exact(task: PartitionTask) -> None:
    """Its partition is what brute force finds."""
    found, best = partition(task, width=10_000), brute_force(task)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)
        check(task, found)


@given(tasks())
def test_one_chunk_a_rank_equals_brute_force(task: PartitionTask) -> None:
    check_exact(task)


@given(tasks())
def test_thinned_fragments_keep_a_true_bound(task: PartitionTask) -> None:
    found, best = partition(task, width=2), brute_force(task)
    if found is not None:
        assert found.lower_bound_s <= best * (1 + 1e-9) <= found.objective_s * (1 + 2e-9)
        assert not found.exact or found.objective_s == pytest.approx(best)
        check(task, found)


@given(tasks())
def test_two_ranks_equal_brute_force(task: PartitionTask) -> None:
    check_exact(replace(task, ranks=2, rank_of=np.arange(2), in_flight=np.array([2.0, 1.0])))


@given(tasks(chunks=2))
def test_several_chunks_a_rank_equal_brute_force_on_short_chains(task: PartitionTask) -> None:
    found, best = partition(task, width=10_000), brute_force(task)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)
        check(task, found)


@given(tasks(chunks=2))
def test_several_chunks_a_rank_are_bounded(task: PartitionTask) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "SHORT", 0)
        found, best = partition(task, width=10_000), brute_force(task)
    if found is not None:
        assert found.lower_bound_s <= best * (1 + 1e-9) <= found.objective_s * (1 + 2e-9)
        check(task, found)
    if task.limit_bytes == 1000:
        assert (found is None) == (best == np.inf)


def hiding_task() -> PartitionTask:
    """One rank whose first unit hides the messages of its last."""
    values = np.array([[1.0, 1, 0, -2, 0, 0, 0], [1, 1, 2, 2, 0, 0, 0]])
    kinds = tuple(
        Fragments(row[None], np.array([entry]), np.array([leave]), np.zeros((1, 1), dtype=np.int64))
        for row, entry, leave in zip(values, (-1, 0), (0, -1), strict=True)
    )
    return PartitionTask(
        kinds=kinds, counts=(1, 1), sends_s=np.zeros((1, 2)), fill_sends=1.0, steady_sends=2.0, ranks=1, chunks=1,
        rank_of=np.zeros(1, dtype=np.int64), in_flight=np.ones(1), limit_bytes=8.0,
    )  # fmt: skip


@example(hiding_task())
@given(st.one_of(tasks(), tasks(chunks=2)))
def test_bounds_hold(task: PartitionTask) -> None:
    best = brute_force(task)
    assert chain_bound(task) <= best + 1e-9 * abs(best)
    assert task_bound(task) <= best * (1 + 1e-9)
    assert memory_bound(task) <= best * (1 + 1e-9)
    ideal = partition(idealised(task), width=10_000)
    if ideal is None:
        assert best == np.inf
    else:
        assert ideal.lower_bound_s <= best * (1 + 1e-9)


@given(
    blocks=st.integers(1, 9), ends=st.tuples(st.integers(0, 5), st.integers(0, 5)), block=st.integers(1, 3),
    ranks=st.integers(1, 3), chunks=st.integers(1, 3), send=st.integers(0, 2),
)  # fmt: skip
def test_whole_units_are_shared_out_as_well_as_can_be(
    blocks: int, ends: tuple[int, int], block: int, ranks: int, chunks: int, send: int
) -> None:
    """An embedding, equal blocks and a head: no shares are better than brute force, and one turn's are as good."""
    seconds, pieces = [ends[0], *[block] * blocks, ends[1]], ranks * chunks
    assume(pieces <= len(seconds) and (ranks > 1 or chunks == 1))
    best = np.inf
    for cuts in combinations(range(1, len(seconds)), pieces - 1):
        parts = [sum(seconds[a:b]) + (send if a else 0) for a, b in pairwise((0, *cuts, len(seconds)))]
        best = min(best, sum(max(parts[turn * ranks : (turn + 1) * ranks]) for turn in range(chunks)))
    times = chunk_times([ends[0], block, ends[1]], [1, blocks, 1], sends_s=send)
    assert least_turns(times, ranks, chunks) <= best * (1 + 1e-9)
    if chunks == 1 and blocks > 1 and max(ends) < block and blocks >= ranks:
        assert least_turns(times, ranks, chunks) == pytest.approx(best)


@given(st.one_of(tasks(), tasks(chunks=2)), st.data())
def test_pinned_cuts_are_kept_and_the_rest_is_best(task: PartitionTask, data: st.DataObject) -> None:
    assume(1 < task.pieces <= task.units)
    edges = sorted(data.draw(st.lists(st.integers(1, task.units - 1), min_size=task.pieces - 1, unique=True)))
    allowed = tuple(
        range(low, data.draw(st.integers(low, high - 1)) + 1)
        for low, high in pairwise([*edges[: task.pieces - 1], task.units])
    )
    pinned = replace(task, cuts=allowed)
    found, best = partition(pinned, width=10_000), brute_force(pinned)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert all(end in places for end, places in zip(found.ends, allowed, strict=False))
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)
        check(pinned, found)
    assert chain_bound(pinned) <= best * (1 + 1e-9)
    assert memory_bound(pinned) <= best * (1 + 1e-9)


@given(tasks(), st.integers(0, 2**32 - 1))
def test_the_cheapest_row_of_segments_is_that_of_the_plain_recurrence(task: PartitionTask, seed: int) -> None:
    segments = Segments(task, np.inf, 100)
    assume(segments.groups)
    random = np.random.default_rng(seed)
    costs = random.choice([0.0, 1.0, 2.0, np.inf], size=(2, len(segments.groups)))
    which = random.integers(0, 2, task.pieces)
    best: dict[tuple[int, int], tuple[float, list[int]]] = {(0, 0): (0.0, [])}
    for row in which:
        after: dict[tuple[int, int], tuple[float, list[int]]] = {}
        for number, group in enumerate(segments.groups):
            for start in group.starts:
                before, picks = best.get((start, group.entry), (np.inf, []))
                to, total = (start + group.length, group.exit), before + costs[row, number]
                if total < after.get(to, (np.inf, []))[0]:
                    after[to] = total, [*picks, number]
        best = after
    assert cut(segments, costs, which) == best.get((task.units, 0), (np.inf, None))[1]


@settings(max_examples=40)
@given(tasks())
def test_the_least_limit_is_the_first_one_with_a_cut(task: PartitionTask) -> None:
    assume(task.pieces <= task.units)
    cutter = pipeline._Cutter(Segments(task, np.inf, 100))
    assume(len(cutter.limits) and cutter.picks(float(cutter.limits[-1])) is not None)
    first = next(place for place, limit in enumerate(cutter.limits.tolist()) if cutter.picks(limit) is not None)
    assert cutter.least() == first
