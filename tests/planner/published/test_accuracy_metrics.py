"""Figures of predictions against measurements."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau

from planner.published.metrics import ScoredRow, accuracy_of, metrics_of_rows

_counter = itertools.count()


def scored(
    predicted: float | None = None,
    measured: float | None = None,
    *,
    interval: tuple[float, float] | None = None,
    memory: tuple[float, float] | None = None,
    outcomes: tuple[str, str] = ("", ""),
    workload: str = "",
    source: str = "s",
    status: str = "ok",
) -> ScoredRow:
    return ScoredRow(
        row_id=f"T-{next(_counter)}", source=source, file="m.csv", status=status, predicted_step_time_s=predicted,
        measured_step_time_s=measured, interval_s=interval, workload=workload,
        predicted_memory_bytes=memory[0] if memory else None, measured_memory_bytes=memory[1] if memory else None,
        predicted_outcome=outcomes[0], measured_outcome=outcomes[1],
    )  # fmt: skip


def test_errors_by_hand() -> None:
    rows = [scored(1.1, 1.0, interval=(1.0, 1.2)), scored(0.8, 1.0, interval=(0.7, 0.9)), scored(3.0, 2.0)]
    figures = metrics_of_rows([*rows, scored(status="skipped")])
    assert (figures.rows, figures.predicted, figures.timed, figures.coverage) == (4, 3, 3, 0.75)
    assert figures.time_mean == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert figures.time_median == pytest.approx(0.2)
    assert figures.time_p90 == pytest.approx(0.2 + 0.8 * 0.3)
    assert figures.time_max == pytest.approx(0.5)
    assert figures.time_bias == pytest.approx((0.1 - 0.2 + 0.5) / 3)
    assert figures.inside_interval == 0.5


def test_memory_and_outcomes_by_hand() -> None:
    rows = [
        scored(memory=(9.0, 10.0), outcomes=("ok", "ok")),
        scored(memory=(12.0, 10.0), outcomes=("oom", "ok")),
        scored(outcomes=("oom", "oom")),
        scored(outcomes=("oom", "oom")),
        scored(outcomes=("ok", "oom")),
        scored(outcomes=("oom", "error")),
    ]
    figures = metrics_of_rows(rows)
    assert (figures.memory_rows, figures.oom_rows) == (2, 3)
    assert figures.memory_mean == pytest.approx(0.15)
    assert figures.memory_bias == pytest.approx(0.05)
    assert figures.oom_recall == pytest.approx(2 / 3)
    assert figures.oom_precision == pytest.approx(2 / 3)


def test_memory_with_and_without_doubt() -> None:
    rows = [scored(memory=(9.0, 10.0)), scored(memory=(12.0, 10.0)), scored(memory=(20.0, 10.0))]
    figures = metrics_of_rows([*rows[:2], replace(rows[2], memory_doubt="what was measured is not stated")])
    assert (figures.memory_rows, figures.memory_clear_rows) == (3, 2)
    assert figures.memory_mean == pytest.approx(1.3 / 3)
    assert figures.memory_median == pytest.approx(0.2)
    assert figures.memory_clear_mean == pytest.approx(0.15)


def test_choice_by_hand() -> None:
    first = [scored(1.0, 2.2, workload="a"), scored(2.0, 2.0, workload="a"), scored(3.0, 4.0, workload="a")]
    second = [scored(1.0, 1.0, workload="b"), scored(2.0, 3.0, workload="b"), scored(5.0, 5.0, workload="c")]
    figures = metrics_of_rows([*first, *second])
    assert figures.workloads == 2
    assert figures.regret == pytest.approx((0.1 + 0.0) / 2)
    assert figures.kendall_tau == pytest.approx((1 / 3 + 1) / 2)


def test_repeated_plan_counts_once_with_its_median() -> None:
    rows = [scored(1.0, t, workload="a") for t in (2.0, 2.2, 9.0)]
    assert metrics_of_rows(rows).workloads == 0
    figures = metrics_of_rows([*rows, scored(2.0, 2.0, workload="a")])
    assert figures.regret == pytest.approx(0.1)


def test_nothing_to_tell() -> None:
    figures = metrics_of_rows([])
    assert (figures.coverage, figures.time_mean, figures.regret, figures.oom_precision) == (0.0, None, None, None)
    assert metrics_of_rows([scored(1.0, 1.0, outcomes=("oom", "ok"))]).oom_precision is None


def test_by_source_in_order() -> None:
    accuracy = accuracy_of([scored(1.0, 1.0, source="b"), scored(2.0, 1.0, source="a"), scored(3.0, 1.0, source="b")])
    assert list(accuracy.by_source) == ["b", "a"]
    assert accuracy.by_source["b"].time_mean == pytest.approx(1.0)
    assert accuracy.overall.rows == 3


@given(
    pairs=st.lists(
        st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=20, unique_by=lambda pair: pair[0]
    )
)
@settings(max_examples=40, deadline=None)
def test_ranks_as_scipy_and_regret_never_negative(pairs: list[tuple[float, float]]) -> None:
    figures = metrics_of_rows([scored(p, m, workload="w") for p, m in pairs])
    expected = kendalltau([p for p, _ in pairs], [m for _, m in pairs]).statistic
    if np.isfinite(expected):
        assert figures.kendall_tau == pytest.approx(expected)
    assert figures.regret is not None
    assert figures.regret >= 0
    best = min(pairs)[1]
    assert figures.regret == pytest.approx(best / min(m for _, m in pairs) - 1)
