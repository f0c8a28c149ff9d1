"""The page of a sweep of richer plans: pipelines, schedules, recomputation."""

from __future__ import annotations

import json
import re
from dataclasses import replace

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
