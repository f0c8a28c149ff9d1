"""Pages hold everything they need and say what the results say."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from reports import page
from reports.demo import Command, DemoRun, comparison_text, demo_page
from reports.what_if import what_if_page, write_what_if_page
from tests.results import infeasible_result, make_plan, make_rows

VOID = {"meta", "br", "img", "input", "link"}


class Outline(HTMLParser):
    """Collects what a page holds and checks that its elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.identities: list[str] = []
        self.linked: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.linked += [values[key] or "" for key in ("src", "href") if key in values]
        self.identities += [values["id"] or ""] if "id" in values else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th", "span"):
            self.cells.append(data)


def outline(text: str) -> Outline:
    """Parse a page."""
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def test_the_what_if_page_is_whole_and_opens_offline(tmp_path: Path) -> None:
    path = write_what_if_page(make_rows(), network="zoo:gpt2", batch_rule="weak scaling", path=tmp_path / "report.html")
    text = path.read_text(encoding="utf-8")
    found = outline(text)
    assert found.linked == [], "nothing is loaded from elsewhere"
    assert {"step-time", "throughput", "efficiency", "memory", "time-0", "time-1"} <= set(found.identities)
    assert len(found.identities) == len(set(found.identities))
    assert "data 128 × tensor 2" in found.cells
    assert any("42 GiB over the 78 GiB" in cell for cell in found.cells), "infeasible rows say why"
    assert "Plotly" in text
    assert '<html lang="en">' in text


def test_a_sweep_without_any_plan_has_a_page() -> None:
    rows = [row for row in make_rows() if row.best is None]
    assert rows
    assert "42 GiB over" in what_if_page(rows, network="zoo:gpt2", batch_rule="weak scaling")


def test_names_are_escaped() -> None:
    text = what_if_page(make_rows(), network="py:a:<script>alert(1)</script>", batch_rule="<b>")
    assert "<script>alert(1)" not in text
    assert "<b>" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def test_the_same_rows_give_the_same_page() -> None:
    pages = {what_if_page(make_rows(), network="zoo:gpt2", batch_rule="weak scaling") for _ in range(2)}
    assert len(pages) == 1


def test_tables_mark_their_headings() -> None:
    text = page.table(["name", "value"], [["a & b", "1"]], caption="things", numbers=(1,)).text
    assert '<th scope="col" class="number">value</th>' in text
    assert '<th scope="row">a &amp; b</th><td class="number">1</td>' in text


@pytest.fixture
def comparison() -> DemoRun:
    """A made-up run."""
    return DemoRun(
        name="MLP",
        plan=make_plan(2, 1),
        prediction={"step_time_s": 0.004, "interval_s": [0.003, 0.005]},
        run={
            "processes": 2,
            "steps": 3,
            "warm_up_steps": 1,
            "data": "digits",
            "losses": [3.0, 2.0, 1.0],
            "reference_losses": [3.0, 2.0, 1.0],
            "max_loss_difference": 1e-7,
            "tolerance": 1e-4,
            "measured_step_time_s": {"median": 0.005, "p10": 0.0045, "p90": 0.006},
            "predicted_step_time_s": 0.004,
            "error": -0.2,
            "predicted_peak_memory_bytes": 2**20,
            "measured_peak_memory_bytes": 2**21,
        },
    )


def test_predicted_stands_beside_measured(comparison: DemoRun) -> None:
    text = comparison_text([comparison])
    assert re.search(r"MLP +step time +4\.00 ms \(3\.00–5\.00 ms\) +5\.00 ms \(4\.50–6\.00 ms\) +-20\.0 %", text)
    assert re.search(r"MLP +peak memory +1\.00 MiB +2\.00 MiB +-50\.0 %", text)
    made = demo_page([Command(line="meshwright plan", output="a < b", seconds=1.0)], [comparison], [])
    assert outline(made).linked == []
    assert "a &lt; b" in made


def test_stub_results_are_as_the_planner_makes_them() -> None:
    assert infeasible_result().candidates == ()
