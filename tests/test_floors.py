"""A room imports only what stands below it.

Every import counts, also one inside a function or for types alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]
ROOMS = (
    "hw_profiles",
    "simulator",
    "planner.graph",
    "planner.sharding",
    "planner.networks",
    "planner.plans",
    "planner.cost",
    "planner.search",
    "planner.lowering",
    "planner.planning",
    "planner.published",
    "planner.execution",
    "planner.exchange",
    "planner.what_if",
    "reports",
    "planner",
    "planner.cli",
    "meshwright",
)
"""From the ground up. `planner` itself is its façade, whose names come from all rooms."""

LARGEST_CYCLE = 1
"""Most modules in a cycle of imports: no module is in one."""


def _modules() -> dict[str, Path]:
    found = {}
    for package in sorted({room.partition(".")[0] for room in ROOMS}):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imported(path: Path) -> Iterator[tuple[str, str]]:
    """Imported modules, with the name that is taken from each ("" for the module itself)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; name the module in full"
            yield from ((node.module or "", alias.name) for alias in node.names)


@cache
def _imports() -> nx.DiGraph[str]:
    modules = _modules()
    graph: nx.DiGraph[str] = nx.DiGraph()
    for name, path in modules.items():
        for module, taken in _imported(path):
            found = f"{module}.{taken}" if f"{module}.{taken}" in modules else module
            if found in modules and found != name:
                graph.add_edge(name, found)
    return graph


def _room(module: str) -> str:
    return max((room for room in ROOMS if module == room or module.startswith(f"{room}.")), key=len)


def test_a_room_imports_only_what_stands_below_it() -> None:
    upward = [
        (name, imported)
        for name, imported in _imports().edges
        if ROOMS.index(_room(name)) < ROOMS.index(_room(imported))
    ]
    assert not upward


def test_import_cycles_are_no_longer_than_they_were() -> None:
    cycles = sorted(map(sorted, nx.strongly_connected_components(_imports())), key=len)
    assert len(cycles[-1]) <= LARGEST_CYCLE, cycles[-1]


def test_no_file_stands_loose_at_the_root_of_the_planner() -> None:
    assert [path.name for path in (ROOT / "planner").glob("*.py")] == ["__init__.py"]
