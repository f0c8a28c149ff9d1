"""Packages import those below them only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("package", "above"),
    [("hw_profiles", {"simulator", "planner", "reports"}), ("simulator", {"planner", "reports"})],
)
def test_no_package_imports_one_above_it(package: str, above: set[str]) -> None:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            assert not above & {name.partition(".")[0] for name in names}, path
