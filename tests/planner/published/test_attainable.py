"""What error is left when factors are known, and how far rows of the same facts lie apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.published.attainable import best_factor, spread_of, told_by_others, with_factors

RATIOS = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=12).map(np.array)


@given(ratios=RATIOS, other=st.floats(0.05, 20.0))
def test_no_other_factor_leaves_a_smaller_error(ratios: np.ndarray, other: float) -> None:
    least = np.abs(best_factor(ratios) * ratios - 1).mean()
    assert least <= np.abs(other * ratios - 1).mean() + 1e-12


def test_a_factor_for_each_group_takes_its_bias_away() -> None:
    ratios = np.array([1.2, 1.2, 1.2, 0.5, 0.5])
    found = with_factors(ratios, ["a", "a", "a", "b", "b"])
    assert found.groups == 2
    assert found.hindsight == pytest.approx(0.0)
    assert found.others == pytest.approx(0.0)


def test_a_row_alone_is_no_witness_of_its_own_factor() -> None:
    found = with_factors(np.array([1.5, 1.0]), ["a", "b"])
    assert found.hindsight == pytest.approx(0.0)
    assert found.others == pytest.approx(0.25)


def test_what_rows_of_the_same_facts_differ_by_is_left_to_everyone() -> None:
    spread = spread_of(np.array([1.0, 2.0, 5.0, 7.0]), ["a", "a", "b", "c"])
    assert spread is not None
    assert (spread.rows, spread.groups) == (2, 1)
    assert spread.error == pytest.approx(0.25)  # one second for both: right for the one, half of the other
    assert spread_of(np.array([1.0, 2.0]), ["a", "b"]) is None


def test_other_measurements_of_the_same_facts_predict_no_better_than_they_agree() -> None:
    assert told_by_others(np.array([1.0, 2.0, 9.0]), ["a", "a", "b"]).tolist() == [1.0, 0.5]
    assert told_by_others(np.array([1.0, 2.0]), ["a", "b"]).size == 0
