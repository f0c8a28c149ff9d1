"""The page of a sweep of richer plans: pipelines, schedules, recomputation."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from planner.what_if import WhatIfRow
from reports.what_if import what_if_page
from tests.results import make_rows


def with_plan(row: WhatIfRow, **fields: object) -> WhatIfRow:
    best = row.best
    assert best is not None
    candidate = replace(best, plan=replace(best.plan, **fields))  # type: ignore[arg-type]
    return replace(row, result=replace(row.result, candidates=(candidate,)))


def page_of(rows: list[WhatIfRow]) -> str:
    return what_if_page(rows, network="zoo:gpt2", batch_rule="weak scaling")


def test_what_no_plan_uses_has_no_column() -> None:
    text = page_of(list(make_rows()))
    assert ">schedule<" not in text
    assert ">recompute<" not in text


def test_pipelines_and_recomputation_are_told() -> None:
    rows = list(make_rows())
    rows[-1] = with_plan(rows[-1], pipeline=4, virtual=2, schedule="interleaved_1f1b", recompute="selective")
    text = page_of(rows)
    for words in (
        ">schedule<",
        ">recompute<",
        "interleaved 1f1b, 2 chunks",
        ">selective<",
        "pipeline 4 × data ",
    ):
        assert words in text


def test_the_baseline_of_every_profile_is_named() -> None:
    assert "against that of dgx-a100 × 16, dgx-h100 × 8." in page_of(list(make_rows()))


def test_the_axis_of_times_reaches_the_ends_of_the_intervals() -> None:
    rows = list(make_rows())
    best = rows[-1].best
    assert best is not None
    longest = 30 * best.prediction.step_time_s
    prediction = replace(best.prediction, interval_s=(best.prediction.step_time_s, longest))
    result = replace(rows[-1].result, candidates=(replace(best, prediction=prediction),))
    text = page_of([*rows[:-1], replace(rows[-1], result=result)])
    ticks = [json.loads(found) for found in re.findall(r'"tickvals":(\[[^]]*\])', text)]
    assert any(max(found) > longest / 2.5 for found in ticks if max(found) < 10 * longest)


def set_rows() -> list[WhatIfRow]:
    """The same clusters with two networks."""
    rows = [row for row in make_rows() if row.best is not None]
    return [replace(row, settings={"network": rate}) for rate in ("100Gb", "400Gb") for row in rows]


def test_every_setting_has_a_picture_and_a_column() -> None:
    text = page_of(set_rows())
    assert "Throughput by network" in text
    assert text.count('<th scope="col">with</th>') == 4
    assert "Throughput by" not in page_of(list(make_rows()))


def test_a_page_takes_less_than_two_megabytes() -> None:
    assert len(page_of(set_rows()).encode()) < 2e6


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_browser_draws_every_chart_within_400_pixels(tmp_path: Path) -> None:
    """In a frame 400 pixels wide nothing but tables is wider than the window."""
    (tmp_path / "page.html").write_text(page_of(set_rows()), encoding="utf-8")
    look = (
        "<body><iframe id=f src=page.html style='width:400px;height:4000px;border:0'></iframe><script>"
        "setInterval(() => {const d = document.getElementById('f').contentDocument;"
        "document.body.dataset.said = [d.body.dataset.drawn, d.documentElement.scrollWidth,"
        "d.querySelectorAll('.main-svg').length, d.querySelectorAll('script.chart').length].join(' ')}, 200)</script>"
    )
    (tmp_path / "look.html").write_text(look)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files",
               f"--user-data-dir={tmp_path / 'browser'}", "--virtual-time-budget=20000", "--dump-dom",
               (tmp_path / "look.html").as_uri()]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    said = re.search(r'data-said="(\w+) (\d+) (\d+) (\d+)"', found)
    assert said is not None
    assert said[1] == "true"
    assert int(said[2]) <= 400
    assert int(said[3]) >= int(said[4]) > 4
