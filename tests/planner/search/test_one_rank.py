"""The whole network on one rank: equal to trying everything, and to a table over bytes where there are many units."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.search.stages import one_rank
from planner.search.stages.fragments import (
    ACTIVATION,
    STEADY,
    TRANSIENT,
    Fragments,
    dominated,
    undominated_of_each,
)
from planner.search.stages.partition import partition, proves_misfit
from planner.search.stages.priced_chain import PricedChain
from planner.search.stages.task import PartitionTask
from tests.planner.search.test_byte_grid import on_one_rank
from tests.planner.search.test_pipeline_partition import brute_force, check, tasks


def alone(task: PartitionTask) -> PartitionTask:
    """The same on one rank."""
    return replace(task, ranks=1, chunks=1, rank_of=np.zeros(1, dtype=np.int64), in_flight=np.full(1, 2.0))


def equal_units(values: np.ndarray, units: int, limit_bytes: float) -> PartitionTask:
    """So many units in a row on one rank, each with the same ways."""
    state = np.full(len(values), -1)
    ways = Fragments(values, state, state, np.arange(len(values))[:, None])
    return on_one_rank([ways], [units], float(limit_bytes))


@settings(max_examples=80)
@given(tasks())
def test_one_rank_equals_brute_force(task: PartitionTask) -> None:
    one = alone(task)
    found, best = partition(one), brute_force(one)
    assert (found is None) == (best == np.inf)
    if found is None:
        assert proves_misfit(one, one, 32)
    else:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)
        check(one, found)


@given(tasks())
def test_few_ways_at_once_keep_a_true_bound(task: PartitionTask) -> None:
    one = alone(task)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_rank, "BEAMS", (1,))
        found, best = partition(one, width=1), brute_force(one)
    if found is not None:
        assert found.lower_bound_s <= best * (1 + 1e-9) <= found.objective_s * (1 + 2e-9)
        check(one, found)
    else:
        assert best == np.inf or not proves_misfit(one, one, 1)


@settings(max_examples=50)
@given(tasks(), st.integers(-4, 4))
def test_of_what_takes_enough_any_choice_will_do(task: PartitionTask, more: int) -> None:
    one = alone(task)
    best = brute_force(one)
    if best == np.inf:
        return
    enough_s = best + more
    found = partition(one, enough_s=enough_s)
    assert found is not None
    check(one, found)
    assert found.lower_bound_s <= min(best, enough_s) * (1 + 1e-9)
    if more > 0:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)
    else:
        assert best * (1 - 1e-9) <= found.objective_s


@pytest.mark.parametrize(("enough", "fewer"), [(0.99, True), (1.01, False)])
def test_what_cannot_be_enough_is_not_followed_farther(enough: float, fewer: bool) -> None:
    """Ways whose bytes lie on no grid leave something open with few of them: tried again where it may be enough."""
    rng = np.random.default_rng(1)
    values = np.zeros((12, 7))
    values[:, STEADY], values[:, ACTIVATION] = rng.uniform(1, 2, (2, 12))
    values[:, ACTIVATION] = 4 - values[:, STEADY] + rng.uniform(0, 0.1, 12)
    one = equal_units(values, 40, 100.0)
    followed = []
    with pytest.MonkeyPatch.context() as patch:
        follow = PricedChain.followed
        patch.setattr(PricedChain, "followed", lambda *given: followed.append(given) or follow(*given))
        best = partition(one)
        assert best is not None
        tries = len(followed)
        found = partition(one, enough_s=enough * best.objective_s)
    assert found is not None
    assert (len(followed) - tries < tries) == fewer
    assert best.objective_s <= found.objective_s <= 1.01 * best.objective_s


def least_over_bytes(seconds: list[int], held: list[int], peaks: list[int], units: int, limit: int) -> float:
    """Least seconds of equal units by a table over whole bytes, for every limit on what one unit needs at once."""
    best = np.inf
    for peak in set(peaks):
        table = np.zeros(max(limit - peak, -1) + 1)
        for _ in range(units):
            after = np.full_like(table, np.inf)
            for second, need, once in zip(seconds, held, peaks, strict=True):
                if once <= peak and need < len(table):
                    after[need:] = np.minimum(after[need:], second + table[: len(table) - need])
            table = after
        best = min(best, float(table[-1]) if len(table) else np.inf)
    return best


@settings(max_examples=25)
@given(
    ways=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40), st.integers(0, 50)), min_size=1, max_size=7),
    units=st.integers(20, 60),
    share=st.floats(0.0, 1.1),
)
def test_many_equal_units_equal_a_table_over_bytes(ways: list[tuple[int, int, int]], units: int, share: float) -> None:
    seconds, held, peaks = (list(column) for column in zip(*ways, strict=True))
    low, high = units * min(held), units * max(held) + max(peaks)
    limit = int(low + share * (high - low))
    values = np.zeros((len(ways), 7))
    for column, numbers in ((STEADY, seconds), (ACTIVATION, held), (TRANSIENT, peaks)):
        values[:, column] = numbers
    found, best = partition(equal_units(values, units, limit)), least_over_bytes(seconds, held, peaks, units, limit)
    assert (found is None) == (best == np.inf)
    if found is not None:
        assert found.objective_s == pytest.approx(best)
        assert found.lower_bound_s == pytest.approx(best)


@pytest.mark.parametrize("count", [1, 40, 600])
@pytest.mark.parametrize("ordered", [False, True])
def test_undominated_of_each_key(count: int, ordered: bool) -> None:
    rng = np.random.default_rng(count)
    values, keys = rng.integers(0, 4, (count, 3)).astype(np.float64), rng.integers(0, 5, count)
    keys = np.sort(keys) if ordered else keys
    expected: list[int] = []
    for key in dict.fromkeys(keys.tolist()):
        rows = np.flatnonzero(keys == key)
        rows = rows[np.lexsort(values[rows].T[::-1])]
        expected += rows[~dominated(values[rows])].tolist()
    assert undominated_of_each(values, keys).tolist() == expected
