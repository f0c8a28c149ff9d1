"""What equal blocks of a rank take, tabled by doubling, against block after block."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.stages import rank_memory
from planner.search.stages.fragments import ACTIVATION, STEADY, Fragments


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 3), st.integers(1, 12), st.integers(1, 20))
def test_rows_of_blocks_cost_what_block_after_block_costs(seed: int, states: int, ways: int, highest: int) -> None:
    random = np.random.default_rng(seed)
    values, ends = random.random((ways, 7)), random.integers(0, states, (2, ways))
    block = Fragments(values, ends[0], ends[1], np.arange(ways)[:, None])
    prices, steady = np.array([0.0, 0.5, 2.0]), values[:, STEADY]
    tables, kept = rank_memory._tables(block, highest, prices, steady[None])
    costs = [*(steady + price * values[:, ACTIVATION] for price in prices), values[:, ACTIVATION]]
    for row, cost in zip([*tables[0], kept], costs, strict=True):
        reached = np.zeros(states)
        for count in range(highest + 1):
            assert np.isclose(row[count], reached.min(), rtol=1e-12) or row[count] == reached.min()
            after = np.full(states, np.inf)
            np.minimum.at(after, ends[1], reached[ends[0]] + cost)
            reached = after
    both = rank_memory._shared(tables)
    for count in range(highest + 1):
        least = np.min(tables[..., : count + 1] + tables[..., count::-1], axis=-1)
        np.testing.assert_allclose(both[..., count], least, rtol=1e-12)
