"""Numbers in order: narrow and wide ones alike."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.task_table import stable_order


@pytest.mark.parametrize("limit", [1, 2**16, 2**16 + 1])
def test_order_is_stable_up_to_the_limit(limit: int) -> None:
    numbers = np.random.default_rng(0).integers(0, limit, 200)
    numbers[[3, 50, 90]] = limit - 1
    expected = sorted(range(len(numbers)), key=lambda place: numbers[place])
    assert stable_order(numbers, limit).tolist() == expected
