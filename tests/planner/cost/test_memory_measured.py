"""Predicted memory against published measurements: a guard on the accuracy that `docs/memory.md` states."""

from __future__ import annotations

import math

import numpy as np
import pytest

from planner.cost.memory.device import training_memory
from planner.published.reading import read_measurements
from planner.published.reading_memory import figure_of
from tests.measurements import PUBLISHED, needs_published

pytestmark = [pytest.mark.slow, needs_published]


def errors(file: str) -> np.ndarray:
    """Relative errors of all rows with a run and a measured memory."""
    rows = [row for row in read_measurements(PUBLISHED / file) if row.run and not math.isnan(row.memory_gib)]
    return np.array(
        [
            training_memory(row.run).figures()[figure_of(row.memory_kind)] / 2**30 / row.memory_gib - 1
            for row in rows
            if row.run
        ]
    )


@pytest.mark.parametrize(
    ("file", "median", "bias"),
    [
        ("C_torchtitan_pytorch_native.csv", 0.06, 0.05),
        ("L_megatron_ci_golden.csv", 0.01, 0.03),
        ("M_bigscience_jeanzay.csv", 0.07, 0.03),
        ("H_systems_papers.csv", 0.05, 0.05),
        ("E_ascend_training.csv", 0.03, 0.05),
    ],
)
def test_the_error_stays_where_it_was(file: str, median: float, bias: float) -> None:
    found = errors(file)
    assert found.size >= 20
    assert np.median(np.abs(found)) < median
    assert abs(found.mean()) < bias


def test_runs_that_went_out_of_memory_are_found() -> None:
    rows = [row for row in read_measurements(PUBLISHED / "J_parallel_layouts_hagemann_a100.csv") if row.run]
    out = np.array([row.outcome == "oom" for row in rows])
    predicted = np.array([not training_memory(row.run).fits for row in rows if row.run])
    assert len(rows) > 600
    assert (out & predicted).sum() / out.sum() > 0.95
    assert (out & predicted).sum() / predicted.sum() > 0.95
