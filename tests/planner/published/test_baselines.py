"""Naive baselines beside the predictions of plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planner.published.metrics import ScoredRow
from planner.published.predictions import FUNCTIONAL, operations_s, roofline_s
from planner.published.reading import read_measurements
from reports.accuracy_aims import ROOFLINE, UTILISATION, baseline_errors
from tests.measurements import write_measurements

STATED = {
    "n_layers": "24", "hidden": "2048", "n_heads": "16", "vocab": "50304", "seq_len": "2048", "tp": "1", "pp": "1",
    "n_accels": "8", "global_batch": "64", "micro_batch": "4",
}  # fmt: skip


def test_operations_are_six_a_parameter_and_token(tmp_path: Path) -> None:
    (row,) = read_measurements(write_measurements(tmp_path / "rows.csv", STATED))
    assert row.run is not None
    layers = 24 * (12 * 2048**2)
    tables = (50304 + 2048) * 2048
    by_hand = 6 * (layers + tables) * 64 * 2048 / (8 * row.run.hardware.peak("bfloat16"))
    assert operations_s(row.run) == pytest.approx(by_hand, rel=0.01)
    assert roofline_s(row.run) >= operations_s(row.run)


def test_more_devices_do_not_lower_the_roofline_of_messages(tmp_path: Path) -> None:
    """The sum of gradients takes as long on two nodes as on four: with little work it is the bound."""
    few, more = (
        {**STATED, "n_accels": str(count), "global_batch": str(count), "micro_batch": "1", "seq_len": "16"}
        for count in (16, 32)
    )
    runs = [row.run for row in read_measurements(write_measurements(tmp_path / "rows.csv", few, more))]
    two, four = (roofline_s(run) for run in runs if run is not None)
    assert 1 <= four / two < 1.1


def row(source: str, device: str, measured: float) -> ScoredRow:
    return ScoredRow(
        row_id=f"{source}{device}{measured}", source=source, file="m.csv", status="ok", device=device, group="g",
        predicted_step_time_s=measured, measured_step_time_s=measured, operations_s=1.0, roofline_s=measured / 2,
    )  # fmt: skip


def test_a_utilisation_is_the_median_of_a_device_and_of_other_sources_when_left_out() -> None:
    rows = [row("a", "x", 2.0), row("b", "x", 4.0), row("c", "y", 8.0)]
    fitted = baseline_errors(rows, left_out=False)
    x = (1 / 2 + 1 / 4) / 2
    assert fitted[UTILISATION]["g"] == pytest.approx((abs(1 / x / 2 - 1) + abs(1 / x / 4 - 1)) / 3)
    assert fitted[ROOFLINE] == {"": 0.5, "g": 0.5}
    # "a" is judged by "b", "b" by "a", and "c", alone on its device, by the median of both.
    left_out = baseline_errors(rows, left_out=True)
    assert left_out[UTILISATION][""] == pytest.approx((abs(4 / 2 - 1) + abs(2 / 4 - 1) + abs(1 / x / 8 - 1)) / 3)


def test_a_large_source_has_one_voice_and_functional_tests_have_none() -> None:
    many = [replace(row("a", "x", 2.0), row_id=str(number)) for number in range(9)]
    tests = [replace(row("d", "x", 100.0), group=FUNCTIONAL)]
    found = baseline_errors([*many, row("b", "x", 4.0), *tests], left_out=False)
    assert found[UTILISATION]["g"] == pytest.approx((9 * abs(4 / 3 - 1) * 1 + abs(2 / 3 - 1)) / 10)


def test_rows_without_a_measurement_or_a_prediction_do_not_count() -> None:
    alone = replace(row("a", "x", 2.0), measured_step_time_s=None)
    assert baseline_errors([alone], left_out=False) == {UTILISATION: {}, ROOFLINE: {}}
