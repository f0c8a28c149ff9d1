"""What equal blocks of a rank take, tabled by doubling, against block after block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.stages import block_bounds
from planner.search.stages.fragments import ACTIVATION, STEADY, Fragments


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 12), st.integers(1, 20))
def test_rows_of_blocks_cost_what_block_after_block_costs(seed: int, states: int, ways: int, highest: int) -> None:
    random = np.random.default_rng(seed)
    values, ends = random.random((ways, 7)), random.integers(0, states, (2, ways))
    block = Fragments(values, ends[0], ends[1], np.arange(ways)[:, None])
    prices, steady = np.array([0.0, 0.5, 2.0]), values[:, STEADY]
    sums = block_bounds._tables(block, highest, prices, steady[None])
    costs = [*(steady + price * values[:, ACTIVATION] for price in prices), values[:, ACTIVATION]]
    for row, cost in zip(sums.T, costs, strict=True):
        reached = np.zeros(states)
        for count in range(highest + 1):
            assert np.isclose(row[count], reached.min(), rtol=1e-12) or row[count] == reached.min()
            after = np.full(states, np.inf)
            np.minimum.at(after, ends[1], reached[ends[0]] + cost)
            reached = after
    both = block_bounds._shared(sums)
    for count in range(highest + 1):
        least = np.min(sums[: count + 1] + sums[count::-1], axis=0)
        np.testing.assert_allclose(both[count], least, rtol=1e-12)


@given(st.lists(st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 20))
def test_least_time_of_all_blocks_is_that_at_which_ranks_hold_enough(seconds: list[list[int]], count: int) -> None:
    """What is behind the last block of a rank is not tabled: a rank that holds so many may hold all."""
    times = np.cumsum(np.array(seconds, dtype=np.float64), axis=1)
    found = block_bounds._least(times, count)
    held = [int((row <= found).sum()) - 1 for row in times]
    fewer = [int((row < found).sum()) - 1 for row in times]
    assert found in times
    assert 3 in held or sum(max(each, 0) for each in held) >= count
    assert 3 not in fewer
    assert sum(max(each, 0) for each in fewer) < count
