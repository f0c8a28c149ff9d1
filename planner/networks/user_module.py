"""Faults that a user's module shows in its text: it is refused for them before torch is imported."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from planner.graph.capture_errors import short_path
from simulator.errors import NetworkError

_AT_RUN_TIME = ("__getattr__", "globals", "setattr", "exec", "eval", "vars")
"""Names with which a module may have functions that its text does not define."""


def check_factory(place: str) -> None:
    """Check that the module of ``MODULE:FACTORY`` is there, parses, finds what it imports, and names the factory.

    Nothing of it is run. What does not show in the text is left to the import.

    Raises
    ------
    NetworkError
        One of these is not so.
    """
    module_name, _, factory_name = place.partition(":")
    if not module_name or not factory_name or "torch" in sys.modules:
        return
    spec = f"py:{place}"
    tree, file = _parsed(module_name, spec)
    if tree is None:
        return
    for name in _imported(tree):
        if _found(name, [str(Path.cwd()), *sys.path]) is None:
            raise NetworkError(f"network {spec!r}: {module_name} needs module {name!r}; install it")
    known = set(_names(tree))
    if factory_name not in known and not known & {"*", *_AT_RUN_TIME}:
        defined = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        found = ", ".join(name for name in defined if not name.startswith("_"))
        raise NetworkError(
            f"network {spec!r}: {module_name} ({short_path(file)}) has no function {factory_name!r}; it has "
            f"{found or 'none'}"
        )


def _parsed(module_name: str, spec: str) -> tuple[ast.Module | None, str]:
    """The text of a module as a tree, and its file; no tree where there is no text, as of an extension."""
    here = str(Path.cwd())
    places: list[str] | None = [here, *sys.path]
    parts = module_name.split(".")
    found: ModuleSpec | None = None
    for count, _ in enumerate(parts, 1):
        name = ".".join(parts[:count])
        found = None if places is None else _found(name, places)
        if found is None and count > 1:
            return None, ""  # packages may find their modules in ways of their own
        if found is None:
            raise NetworkError(f"network {spec!r}: no module {name!r} in {here} or installed; check the name")
        places = None if found.submodule_search_locations is None else list(found.submodule_search_locations)
    if found is None or not found.has_location or not str(found.origin).endswith(".py"):
        return None, ""
    file = str(found.origin)
    try:
        return ast.parse(Path(file).read_bytes(), file), file
    except OSError:
        return None, file
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) else ""
        said = error.msg if isinstance(error, SyntaxError) else error
        raise NetworkError(
            f"network {spec!r}: importing {module_name} fails: {type(error).__name__} at {short_path(file)}{line}: "
            f"{said}; correct it"
        ) from error


def _found(name: str, places: list[str]) -> ModuleSpec | None:
    found = PathFinder.find_spec(name, places)
    if found is None and "." not in name:
        try:
            return importlib.util.find_spec(name)  # built into Python, or of a finder of its own
        except (ImportError, ValueError):
            return ModuleSpec(name, None)  # loaded, from nobody knows where
    return found


def _imported(tree: ast.Module) -> Iterator[str]:
    """First parts of the modules that the module imports under no condition."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _names(tree: ast.Module) -> Iterator[str]:
    """Names that occur anywhere in the text, as that of a definition, an import or a value."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
