"""The accuracy report is whole, offline, the same each time, and holds no measured value of a row."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from planner.published.metrics import AccuracyResult, ScoredRow, accuracy_of
from planner.published.predictions import FUNCTIONAL
from reports.accuracy_aims import AIMS, EVERYTHING, ROOFLINE, UTILISATION, metrics_of
from reports.accuracy_outliers import outliers
from reports.accuracy_page import FITTED, LEFT_OUT, accuracy_page, write_accuracy_report
from tests.reports.scored_rows import SOURCES, made_up_result
from tests.reports.test_pages import outline

COMMAND, DATE = "meshwright validate runs/*.csv --report <folder>", "2026-11-21"


@pytest.fixture(scope="module")
def result() -> AccuracyResult:
    return made_up_result(160)


@pytest.fixture(scope="module")
def text(result: AccuracyResult) -> str:
    return accuracy_page(result, command=COMMAND, date=DATE)


def test_the_page_is_well_formed_and_opens_offline(text: str) -> None:
    found = outline(re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL))
    assert [link for link in found.linked if not link.startswith("#")] == []
    assert "http" not in text
    assert "<script" not in text
    assert len(found.identities) == len(set(found.identities))
    for target in re.findall(r'(?:url\(#|href="#)([^")]+)', text):
        assert target in found.identities
    assert len(text) < 1_000_000


def test_every_source_aim_and_both_fits_are_there(text: str, result: AccuracyResult) -> None:
    for source, group, *_ in SOURCES:
        assert html.escape(source) in text
        assert html.escape(group) in text
    for name in (LEFT_OUT, FITTED, UTILISATION, ROOFLINE, *(aim.name for aim in AIMS), html.escape(COMMAND), DATE):
        assert name in text
    assert result.left_out is not None
    for accuracy in (result.left_out, result.fitted):
        for metrics in (accuracy.overall, *accuracy.by_source.values()):
            assert metrics.time_mean is not None
            assert f"{100 * metrics.time_mean:.3g}"[:4] in text
            assert f"{100 * (metrics.time_bias or 0):+.1f} %".replace("-", "−") in text


def test_pictures_take_the_colours_of_the_page(text: str) -> None:
    assert "var(--ink)" in text
    for stand_in in ("#010101", "#020202", "#030303", "#040404"):
        assert stand_in not in text


def test_the_folder_holds_figures_and_predictions_but_no_measurement(
    tmp_path: Path, result: AccuracyResult, text: str
) -> None:
    path = write_accuracy_report(tmp_path / "new" / "accuracy", result, command=COMMAND, date=DATE)
    assert path.name == "index.html"
    assert path.read_text(encoding="utf-8") == text, "the same result gives the same bytes"
    figures = json.loads((path.parent / "metrics.json").read_text(encoding="utf-8"))
    assert figures["leave_one_source_out"]["overall"]["rows"] == 160
    assert set(figures["fitted_on_everything"]["by_source"]) == {name for name, *_ in SOURCES}
    errors = figures["leave_one_source_out"]["baselines"]
    assert errors[ROOFLINE][""] == pytest.approx(0.5)  # as the rows are made up
    predictions = (path.parent / "predictions.csv").read_text(encoding="utf-8")
    assert len(predictions.splitlines()) == 161
    # Coordinates of pictures are left aside: they are rounded, and some equal a measured time by chance.
    words = re.sub(r"<svg.*?</svg>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    everything = set(re.findall(r"[\d.]+", words + json.dumps(figures) + predictions))
    for row in result.fitted.rows:
        if row.measured_step_time_s is not None:
            assert f"{row.measured_step_time_s:.6g}" not in everything


def test_one_fit_alone_and_no_rows_at_all_make_a_page(result: AccuracyResult) -> None:
    alone = accuracy_page(AccuracyResult(fitted=result.fitted), command=COMMAND, date=DATE)
    outline(re.sub(r"<style.*?</style>", "", alone, flags=re.DOTALL))
    assert LEFT_OUT not in alone
    skipped = ScoredRow(row_id="1", source="one", file="a.csv", status="skipped", reason="n_accels not stated")
    empty, nothing_predicted = _page(()), _page((skipped,))
    for made in (empty, nothing_predicted):
        outline(re.sub(r"<style.*?</style>", "", made, flags=re.DOTALL))
    assert "n_accels not stated" in nothing_predicted


def _page(rows: tuple[ScoredRow, ...]) -> str:
    return accuracy_page(AccuracyResult(fitted=accuracy_of(rows)), command=COMMAND, date=DATE)


def test_aims_are_judged_by_their_limits(result: AccuracyResult) -> None:
    bias = next(aim for aim in AIMS if aim.figure == "time_bias")
    metrics = metrics_of(result.fitted, EVERYTHING)
    assert metrics is not None
    for value, met in ((0.02, True), (-0.021, False), (None, None)):
        assert bias.met(replace(metrics, time_bias=value)) is met


def row(index: int, error: float, **fields: object) -> ScoredRow:
    values = {
        "row_id": f"r{index}", "source": "s", "file": "f.csv", "status": "ok", "measured_step_time_s": 2.0,
        "predicted_step_time_s": 2.0 * (1 + error), **fields,
    }  # fmt: skip
    return ScoredRow(**values)  # type: ignore[arg-type]


def test_outliers_are_the_worst_by_ratio_with_a_cause() -> None:
    calm = [row(index, 0.01, workload="w") for index in range(6)]
    found = outliers([*calm, row(7, 1.0, workload="w"), row(8, -0.6), row(9, 0.3, likely_cause="known")])
    assert [one.row.row_id for one in found] == ["r8", "r7", "r9"]
    assert "the other 6 plans of this workload" in found[1].cause.words
    assert found[2].cause.words == "known"
    assert found[1].error == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(index, 0.4 + 0.01 * index) for index in range(8)], "100 % of the 8 rows of this source"),
        ([row(0, 0.5, measured_step_time_s=0.01, predicted_step_time_s=0.02)], "a short step"),
        ([row(0, 0.5, reason="heads not stated: 8 of 128")], "assumed: heads"),
        ([row(0, 0.5, label="extrapolated")], "outside of what was fitted"),
        ([row(0, 0.5)], "unexplained"),
        ([row(index, 0.5, group=FUNCTIONAL) for index in range(8)], "a functional test"),
        ([row(0, 3.5, reason="heads not stated: 8 of 128")], "more than four times off: a time"),
        ([row(0, -0.8)], "more than four times off: a time"),
    ],
)
def test_causes(rows: list[ScoredRow], words: str) -> None:
    assert words in outliers(rows)[0].cause.words


def test_a_report_names_no_folder_of_the_machine_that_made_it(result: AccuracyResult, tmp_path: Path) -> None:
    fault = "/some/where/else/A_file.csv, line 165, column seq_len: '0' is out of range"
    first, *rows = result.fitted.rows
    wrong = replace(first, status="error", file="A_file.csv", reason=fault)
    write_accuracy_report(tmp_path, AccuracyResult(fitted=accuracy_of([wrong, *rows])), command=COMMAND, date=DATE)
    predictions = (tmp_path / "predictions.csv").read_text(encoding="utf-8")
    assert "A_file.csv, line 165" in predictions
    assert "/some/where" not in predictions
