"""What no estimate from the stated facts could take away of the error of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_floor import best_single, known_rows, refitted, twins
from tests.measurements import write_measurements

SIZES = st.lists(st.floats(min_value=0.1, max_value=100), min_size=2, max_size=8)


@given(values=SIZES)
@settings(max_examples=60, deadline=None)
def test_no_other_value_serves_twins_better(values: list[float]) -> None:
    measured = np.array(values)

    def cost(value: float) -> float:
        return float(np.abs(value / measured - 1).sum())

    least = cost(best_single(measured))
    assert all(least <= cost(float(other)) + 1e-9 for other in np.concatenate([measured, measured * 1.07]))


@given(values=SIZES, scale=st.floats(min_value=0.5, max_value=2), base=st.floats(min_value=0, max_value=5))
@settings(max_examples=30, deadline=None)
def test_a_factor_and_an_offset_are_found(values: list[float], scale: float, base: float) -> None:
    predicted = np.array(values)
    measured = scale * predicted + base
    assert np.abs(refitted(measured, predicted, offset=True)).sum() == pytest.approx(0, abs=1e-6)
    plain = np.abs(predicted / measured - 1).sum()
    assert np.abs(refitted(measured, predicted, offset=False)).sum() <= plain + 1e-9


def test_rows_that_state_the_same_are_twins(tmp_path: Path) -> None:
    stated = {"mem_kind": "peak reserved"}
    write_measurements(
        tmp_path / "m.csv",
        {**stated, "mem_gib_per_gpu": "20"},
        {**stated, "mem_gib_per_gpu": "30", "step_time_s": "9", "notes": "again"},
        {**stated, "mem_gib_per_gpu": "40", "micro_batch": "8"},
        {**stated, "mem_gib_per_gpu": "50", "outcome": "oom"},
    )
    rows = known_rows(tmp_path)
    assert [row.measured for row in rows] == [20, 30, 40]
    (group,) = twins(rows).values()
    assert [row.measured for row in group] == [20, 30]
