"""The exact search equals brute force on every small problem hypothesis can think of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.dynamic_programming import solve
from planner.search.exact import buckets
from planner.search.exact.blocks import min_plus_power
from planner.search.problem.problem import Cost, Problem
from tests.oracles.brute_force import TableProblem, exhaustive, random_cost, totals

Edges = set[tuple[int, int]]


@pytest.mark.parametrize("told_apart", [True, False])
def test_classes_of_many_tables_are_those_of_their_equal_rows(
    told_apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where checksums of rows that differ are the same."""
    if not told_apart:
        monkeypatch.setattr(buckets, "_factors", lambda count: np.zeros(count, dtype=np.uint64))
    random = np.random.default_rng(3)
    shapes = [(7, 2), (1, 3), (5, 1), (6, 2), (9, 3), (4, 1)]
    slices = [[random.integers(0, 2, shape).astype(float) for _ in range(1 + n % 2)] for n, shape in enumerate(shapes)]
    slices.append([np.array([[1.0, np.inf], [0.0, np.inf]]).T])
    for tables, (found, members) in zip(slices, buckets.classes(slices), strict=True):
        rows = [tuple(row) for row in np.concatenate(tables, axis=1)]
        first = list(dict.fromkeys(rows))
        assert found.tolist() == [first.index(row) for row in rows]
        assert members.tolist() == [rows.index(row) for row in first]
    assert buckets.classes([]) == []


def tree(count: int, random: np.random.Generator) -> Edges:
    return {(int(random.integers(v)), v) for v in range(1, count)}


def diamonds(count: int, random: np.random.Generator) -> Edges:
    """0 to 1 and 2, these to 3, 3 to 4 and 5."""
    return {(a, b) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5)) if b < count}


def ladder(count: int, random: np.random.Generator) -> Edges:
    """Two rails with rungs between them."""
    return {(v, v + 2) for v in range(count - 2)} | {(v, v + 1) for v in range(0, count - 1, 2)}


def clique(count: int, random: np.random.Generator) -> Edges:
    """Of up to five variables, whose elimination has width 4, and what hangs on the last of them."""
    inner = min(count, 5)
    return {*itertools.combinations(range(inner), 2), *((inner - 1, v) for v in range(inner, count))}


def anything(count: int, random: np.random.Generator) -> Edges:
    return {pair for pair in itertools.combinations(range(count), 2) if random.random() < 0.5}


SHAPES: Mapping[str, Callable[[int, np.random.Generator], Edges]] = {
    "tree": tree,
    "diamonds": diamonds,
    "ladder": ladder,
    "clique": clique,
    "anything": anything,
}


def graph_of(shape: str, random: np.random.Generator) -> TableProblem:
    """Of four to six variables with up to four states, one or two of one variable now and then."""
    count = int(random.integers(4, 7)) if random.random() < 0.9 else int(random.integers(1, 4))
    sizes = tuple(int(s) for s in random.integers(1, 5 if count < 6 else 4, count))
    edges = SHAPES[shape](count, random)
    pairs = {(a, b): random_cost(random, (sizes[a], sizes[b])) for a, b in sorted(edges)}
    return TableProblem(sizes, tuple(random_cost(random, (s,)) for s in sizes), pairs, {})


def blocks_of(width: int, random: np.random.Generator) -> TableProblem:
    """A head, a run of two to five equal blocks of one or two variables, a tail, perhaps something shared by all."""
    count = int(random.integers(2, 6 if width == 1 else 4))
    shared = random.random() < 0.5
    block_sizes = [int(s) for s in random.integers(1, 4, width)]
    sizes = [2, *block_sizes, *block_sizes, 3, *([2] if shared else [])]
    first, second = list(range(1, 1 + width)), list(range(1 + width, 1 + 2 * width))
    tail, common = 1 + 2 * width, 2 + 2 * width
    unary = [random_cost(random, (s,)) for s in sizes]
    pairs = {(0, first[0]): random_cost(random, (2, sizes[first[0]]))}
    for v, w in zip(first, second, strict=True):
        unary[w] = unary[v]
    if width == 2:
        inner = random_cost(random, (block_sizes[0], block_sizes[1]))
        pairs[first[0], first[1]] = pairs[second[0], second[1]] = inner
    pairs[first[-1], second[0]] = random_cost(random, (block_sizes[-1], block_sizes[0]))
    pairs[second[-1], tail] = random_cost(random, (block_sizes[-1], 3))
    if shared:
        used = random_cost(random, (block_sizes[0], 2))
        pairs[first[0], common] = pairs[second[0], common] = used
        pairs[tail, common] = random_cost(random, (3, 2))
    block = dict(zip(second, first, strict=True))
    return TableProblem(tuple(sizes), tuple(unary), pairs, block, count)


FAMILIES: Mapping[str, Callable[[np.random.Generator], TableProblem]] = {
    **{name: partial(graph_of, name) for name in SHAPES},
    "blocks": partial(blocks_of, 1),
    "wide blocks": partial(blocks_of, 2),
}
EIGHTHS = 8


def limit_of(problem: TableProblem, eighths: float) -> float:
    """A limit so far from the least memory to the last one that rules the fastest plan out; infinite for none."""
    times, memories = totals(problem)
    possible = np.isfinite(times)
    if not np.isfinite(eighths) or not possible.any():
        return np.inf
    least, fastest = memories[possible].min(), memories[times == times.min()].min()
    return float(least + np.floor(max(fastest - 1 - least, 0) * eighths / EIGHTHS))


def check(problem: TableProblem, limit: float) -> None:
    expected = exhaustive(problem, limit)
    found = solve(cast("Problem", problem), limit)
    if expected is None:
        assert found is None or not np.isfinite(found.objective_s)
        return
    assert found is not None
    assert found.memory_bytes <= limit
    assert found.objective_s == pytest.approx(expected[0], abs=1e-9)
    assert found.lower_bound_s == pytest.approx(expected[0], abs=1e-6)


seeds = st.integers(0, 2**32 - 1)


def graphs() -> st.SearchStrategy[TableProblem]:
    """Graphs of all shapes."""
    return st.builds(
        lambda shape, seed: graph_of(shape, np.random.default_rng(seed)), st.sampled_from([*SHAPES]), seeds
    )


def chains_of_blocks() -> st.SearchStrategy[TableProblem]:
    """Chains with runs of equal blocks."""
    return st.builds(lambda width, seed: blocks_of(width, np.random.default_rng(seed)), st.integers(1, 2), seeds)


limits = st.one_of(st.just(np.inf), st.integers(-1, EIGHTHS).map(float), st.integers(0, 2).map(float))


def check_drawn(family: str, seed: int, eighths: float) -> None:
    problem = FAMILIES[family](np.random.default_rng(seed))
    check(problem, limit_of(problem, eighths))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=50, deadline=None)
@given(seeds, limits)
def test_equals_exhaustive_search_with_and_without_a_memory_limit(family: str, seed: int, eighths: float) -> None:
    check_drawn(family, seed, eighths)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=1000, deadline=None)
@given(seeds, limits)
def test_thousands_of_graphs_equal_exhaustive_search(family: str, seed: int, eighths: float) -> None:
    check_drawn(family, seed, eighths)


@pytest.mark.parametrize("family", FAMILIES)
def test_limits_bind_and_equal_blocks_differ(family: str) -> None:
    """What the tests above draw is no empty promise: the fastest plan is often ruled out, and layers often differ."""
    binding, unlike = 0, 0
    for seed in range(100):
        problem = FAMILIES[family](np.random.default_rng(seed))
        free, limited = (exhaustive(problem, limit_of(problem, eighths)) for eighths in (np.inf, 2.0))
        if free is None or limited is None:
            continue
        binding += limited[0] > free[0]
        unlike += any(len({limited[1][v] for v in blocks}) > 1 for blocks in same_in_all_blocks(problem))
    assert binding >= 60
    assert unlike >= (40 if "blocks" in family else 0)


def same_in_all_blocks(problem: TableProblem) -> list[list[int]]:
    """For every variable of a block its numbers in all blocks of the unrolled problem."""
    flat, width = len(problem.sizes), len(problem.block)
    later = range(problem.count - 2)
    return [[v, w, *(flat + n * width + i for n in later)] for i, (w, v) in enumerate(problem.block.items())]


@given(st.integers(0, 2**32 - 1), st.integers(1, 9))
def test_min_plus_power_equals_repeated_products(seed: int, count: int) -> None:
    table = np.random.default_rng(seed).integers(0, 50, (2, 4, 4)).astype(float)
    expected = table
    for _ in range(count - 1):
        expected = (expected[:, :, :, None] + table[:, None, :, :]).min(axis=2)
    power = min_plus_power(table, count)
    np.testing.assert_array_equal(power.table, expected)
    path = power.path(1, 2, 3)
    assert len(path) == count + 1
    assert sum(table[1, a, b] for a, b in itertools.pairwise(path)) == expected[1, 2, 3]


def test_a_limit_below_everything_is_infeasible() -> None:
    only = Cost(np.array([1.0, 2.0]), np.array([5.0, 4.0]))
    problem = TableProblem((2,), (only,), {}, {})
    assert solve(cast("Problem", problem), 3.0) is None
    found = solve(cast("Problem", problem), 4.0)
    assert found is not None
    assert found.assignment == {0: 1}
