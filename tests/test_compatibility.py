"""The table of versions that `make compatibility` writes into the docs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / ".ci" / "compatibility.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def row(script: dict[str, Any], python: str, torch: str, *failed: str) -> Any:
    versions = {"torch": torch, "torchvision": "0.24.1", "transformers": "5.23.0"}
    return script["Row"](python=python, versions=versions, tests=1234, failed=failed)


def test_a_run_of_some_pairs_replaces_their_rows(script: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{script['BEGIN']}\n{script['END']}\nafter\n")
    script["write"](page, [row(script, "3.11", "2.9.1", "a", "b"), row(script, "3.12", "2.9.1", "c")], every=True)
    script["write"](page, [row(script, "3.11", "2.9.1"), row(script, "3.11", "2.15.0")], every=False)
    table = [
        script["HEAD"],
        "| 3.11 | 2.9.1 | 0.24.1 | 5.23.0 | 1,234 | 0 |",
        "| 3.11 | 2.15.0 | 0.24.1 | 5.23.0 | 1,234 | 0 |",
        "| 3.12 | 2.9.1 | 0.24.1 | 5.23.0 | 1,234 | 1 |",
        "\nFailed with Python 3.12, torch 2.9.1: c",
    ]
    assert page.read_text() == "\n".join(["before", script["BEGIN"], "", *table, "", script["END"], "after", ""])


def test_a_run_of_every_pair_replaces_the_table(script: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{script['BEGIN']}\n{script['END']}\n")
    for torch in ("2.9.1", "2.10.0"):
        script["write"](page, [row(script, "3.11", torch)], every=True)
    assert "2.10.0" in page.read_text()
    assert "2.9.1" not in page.read_text()


def test_failures_and_errors_are_counted(script: dict[str, Any], tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="t" name="good"/><testcase classname="t" name="wrong"><failure/>'
        '</testcase><testcase classname="t" name="broken"><error/></testcase></testsuite></testsuites>'
    )
    assert script["counted"](report) == (3, ("t::wrong", "t::broken"))
    assert script["counted"](tmp_path / "none.xml") == (0, ("the test run ended without a report",))
