"""What the accuracy page says of the rows that are predicted worst."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.published.metrics import ScoredRow
from planner.published.predictions import FUNCTIONAL, MISSING_FACT
from reports.accuracy_outliers import memory_outliers, time_outliers
from reports.page import Html

GIB = 2**30
NOTHING = ScoredRow(row_id="r0", source="suite", file="f.csv", status="ok", device="A100", devices=8)


def timed(index: int, error: float, **changes: object) -> ScoredRow:
    own = {"row_id": f"r{index}", "measured_step_time_s": 2.0, "predicted_step_time_s": 2 * (1 + error)}
    return replace(NOTHING, **own, **changes)  # type: ignore[arg-type]


def held(index: int, error: float, **changes: object) -> ScoredRow:
    own = {"row_id": f"r{index}", "measured_memory_bytes": 40.0 * GIB, "predicted_memory_bytes": 40 * (1 + error) * GIB}
    return replace(NOTHING, **own, **changes)  # type: ignore[arg-type]


def lines(table: Html) -> list[str]:
    """Text of each line of a table, cells apart by bars."""
    rows = re.findall(r"<tr>(.*?)</tr>", table.text.split("<tbody>")[1], flags=re.DOTALL)
    return [re.sub(r"(?:<[^>]+>)+", "|", row).strip("|") for row in rows]


def test_rows_of_one_source_device_and_cause_stand_together() -> None:
    assumed = {"reason": "batch not stated: 32"}
    rows = [timed(index, -0.5 + 0.02 * index, devices=8 * (1 + index % 2), **assumed) for index in range(5)]
    rows += [timed(7, 2.0), timed(8, -0.9, group=FUNCTIONAL), timed(9, 0.01)]
    by_cause, worst = time_outliers(rows)
    assert "The 7 rows" in by_cause.text
    alone, together = lines(worst)
    assert alone == "r7|suite|A100 × 8|+200 %|unexplained"
    assert together == "r0, r1, r2 and 2 more|suite|A100 × 8, 16|−50 to −42 %|assumed: batch not stated: 32"


def test_rows_whose_memory_is_far_off_are_listed_by_what_they_cost() -> None:
    rows = [held(1, 0.2), held(2, -0.3, memory_doubt=MISSING_FACT), held(3, -0.12, memory_doubt=MISSING_FACT)]
    rows += [held(4, 0.05), timed(5, 0.9)]
    first, second = lines(memory_outliers(rows))
    assert first == f"r2, r3|suite|−30 to −12 %|10.50|{MISSING_FACT}"
    assert second == "r1|suite|+20 %|5.00|described in full: unexplained"


def test_names_of_rows_are_not_broken_at_their_hyphens() -> None:
    rows = [replace(held(i, i / 5, group=FUNCTIONAL), row_id=f"L-000{i}") for i in (1, 2)]
    table = memory_outliers(rows).text
    assert '<span class="whole">L-0002</span>, <span class="whole">L-0001</span>' in table
    assert "a functional test" in table


def test_nothing_far_off_is_said() -> None:
    assert "No row's memory" in memory_outliers([held(1, 0.05)]).text.replace("&#x27;", "'")
    assert len(time_outliers([timed(1, 0.05)])) == 1
