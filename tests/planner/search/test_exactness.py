"""The exact search equals brute force on every small problem hypothesis can think of."""

from __future__ import annotations

import itertools
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.dynamic_programming import solve
from planner.search.exact.elimination import min_plus_power
from planner.search.problem.problem import Cost, Problem
from tests.oracles.brute_force import TableProblem, exhaustive, random_cost

Edges = set[tuple[int, int]]


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


SHAPES = (tree, diamonds, ladder, clique, anything)


@st.composite
def graphs(draw: st.DrawFn) -> TableProblem:
    """Trees, diamonds, ladders and cliques of up to six variables with up to four states."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    count = draw(st.integers(1, 6))
    sizes = tuple(int(s) for s in random.integers(1, 5 if count < 6 else 4, count))
    edges = draw(st.sampled_from(SHAPES))(count, random)
    pairs = {(a, b): random_cost(random, (sizes[a], sizes[b])) for a, b in sorted(edges)}
    return TableProblem(sizes, tuple(random_cost(random, (s,)) for s in sizes), pairs, {})


@st.composite
def chains_of_blocks(draw: st.DrawFn) -> TableProblem:
    """A head, a run of two to four equal blocks of one or two variables, a tail, perhaps something shared by all."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = draw(st.integers(1, 2))
    count = draw(st.integers(2, 4 if width == 1 else 3))
    shared = draw(st.booleans())
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


@settings(max_examples=300, deadline=None)
@given(graphs(), st.integers(0, 40))
def test_equals_exhaustive_search_under_a_memory_limit(problem: TableProblem, limit: int) -> None:
    check(problem, float(limit))


@settings(max_examples=200, deadline=None)
@given(chains_of_blocks())
def test_folded_blocks_equal_the_unrolled_graph(problem: TableProblem) -> None:
    check(problem, np.inf)


@settings(max_examples=100, deadline=None)
@given(chains_of_blocks(), st.integers(0, 40))
def test_folded_blocks_equal_the_unrolled_graph_under_a_memory_limit(problem: TableProblem, limit: int) -> None:
    check(problem, float(limit))


@pytest.mark.slow
@settings(max_examples=2500, deadline=None)
@given(st.one_of(graphs(), chains_of_blocks()), st.one_of(st.just(np.inf), st.integers(0, 60).map(float)))
def test_thousands_of_graphs_equal_exhaustive_search(problem: TableProblem, limit: float) -> None:
    check(problem, limit)


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
