"""The replay of PyTorch's caching allocator, from which the share of its free blocks is taken."""

from __future__ import annotations

import pytest

from benchmarks.caching_allocator import MEBI, Allocator, resnet50
from planner.cost.memory_traits import MANY_SIZES_SHARE, traits_of
from planner.cost.stacks import Stack


def test_blocks_are_split_merged_and_used_again() -> None:
    pool = Allocator()
    first, second = pool.take(4 * MEBI), pool.take(5 * MEBI)
    assert pool.reserved == 20 * MEBI
    pool.give(first)
    pool.give(second)
    assert [block.size for block in pool.blocks] == [20 * MEBI]
    whole = pool.take(19.5 * MEBI)
    assert (whole.size, pool.reserved, pool.peak) == (20 * MEBI, 20 * MEBI, 20 * MEBI)
    # Segments of 12 and 14 MiB; 1 MiB more than is needed is no block of its own, 1.5 MiB are.
    assert [pool.take(size * MEBI).size / MEBI for size in (11, 12.5)] == [12, 12.5]


@pytest.mark.parametrize(("samples", "element"), [(128, 4), (512, 2)])
def test_what_a_convolutional_network_leaves_free_is_the_share_that_is_estimated(samples: int, element: int) -> None:
    pool = resnet50(samples, element)
    assert pool.allocated == pytest.approx(3 * 4 * 25_557_032, rel=1e-4)
    estimated = traits_of(Stack.EAGER).allocator_bytes + MANY_SIZES_SHARE * (pool.peak - pool.allocated)
    assert pool.reserved == pytest.approx(pool.peak + estimated, rel=0.03)
