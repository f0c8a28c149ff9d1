"""Networks that users' code describes, remembered as long as nothing that the code has read has changed.

To describe such a network its code has to run, which takes torch and the making of a module. What the code reads is
noted while it runs: its modules and those beside them, files that it opens, variables of the environment, versions of
libraries. Where all are as they were, so is the network, and its graph lies in the cache (`planner.graph.cache`).
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache as remember
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.graph import cache
from planner.graph.capture_errors import short_path
from planner.networks.child import in_child
from planner.networks.inputs import InputSpec
from planner.networks.marks import Marks
from planner.networks.network import Network
from simulator.errors import InputError, NetworkError
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from torch import nn


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
    # By its last part: of a whole name, the package must be imported where that has no __init__.py.
    found = PathFinder.find_spec(name.rpartition(".")[2], places)
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


Make = Callable[[int | None], "nn.Module"]
_OURS = tuple(Path(__file__).resolve().parents[2] / name for name in ("planner", "simulator", "meshwright"))
_MOST_BYTES = 1 << 28
_MOST_NEIGHBOURS = 500
_PLAIN = (
    *("name", "spec", "family", "description", "default_global_batch", "default_optimizer", "sequence_length"),
    *("notes", "layerwise"),
)


@dataclass(kw_only=True)
class _Reads:
    """Digests of files by path and of variables by name (None: not set), versions of libraries by name."""

    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str | None] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)

    def unchanged(self) -> bool:
        """Whether all is as it was noted."""
        return (
            all(os.environ.get(name) is None if was is None else _text(os.environ.get(name)) == was
                for name, was in self.variables.items())
            and all(cache.version(name) == was for name, was in self.libraries.items())
            and all(_file(path) == was for path, was in self.files.items())
        )  # fmt: skip

    @property
    def digest(self) -> str:
        """One digest of all."""
        return _text(json.dumps(asdict(self), sort_keys=True))


def remembered(spec: str, sequence_length: int | None, look: Callable[[], Network], make: Make) -> Network:
    """The network that `look` describes in a process of its own, or described when nothing was different.

    Parameters
    ----------
    spec
        Names the network.
    look
        Describes it, whatever its `Network.make` is.
    make
        Makes its module.
    """
    place = _place(spec, sequence_length)
    known = None if place is None else _load(place)
    if known is not None:
        return replace(known, make=make)
    if spec.startswith("py:"):
        check_factory(spec.removeprefix("py:"))
    import planner.networks.python_factory  # noqa: F401 - torch is imported once, for this process and its forks

    fresh = spec.split(":")[1] not in sys.modules  # code of a module loaded before may differ from its file
    network, reads = in_child(spec, lambda: _noted(look, fresh and place is not None))
    if reads is None or place is None or network.marks:
        return replace(network, make=make)
    with suppress(OSError, InputError):  # a full or read-only disk is no error
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps({"reads": asdict(reads), "network": _to_json(network)}))
    return replace(network, make=make, content=f"{spec} {reads.digest}")


def _place(spec: str, sequence_length: int | None) -> Path | None:
    folder = cache.folder()
    if folder is None:
        return None
    here = str(Path.cwd())
    paths = [path for path in sys.path if path not in ("", here)]
    key = _text("\n".join((spec, str(sequence_length), here, *paths, cache.toolchain())))
    return folder / f"{key}.network.json"


def _load(place: Path) -> Network | None:
    """A network noted before; None where something that it was made of has changed, or the file is damaged."""
    try:
        held = json.loads(place.read_bytes())
        reads = _Reads(**held["reads"])
        if not reads.unchanged():
            return None
        network = _from_json(held["network"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return replace(network, content=f"{network.spec} {reads.digest}")


def _to_json(network: Network) -> dict[str, Any]:
    plain = {name: getattr(network, name) for name in _PLAIN}
    modules = network.marks.modules if network.marks is not None else ()
    return {**plain, "inputs": [asdict(one) for one in network.inputs], "modules": modules}


def _from_json(held: dict[str, Any]) -> Network:
    inputs = tuple(InputSpec(**{**one, "shape": tuple(one["shape"])}) for one in held["inputs"])
    plain: dict[str, Any] = {name: tuple(held[name]) if isinstance(held[name], list) else held[name] for name in _PLAIN}
    return Network(**plain, inputs=inputs, make=_not_made, marks=Marks(modules=tuple(held["modules"])))


def _not_made(depth: int | None) -> nn.Module:
    """Stand for what makes a module while a network goes from one process to another."""
    raise NotImplementedError


def _noted(look: Callable[[], Network], wanted: bool) -> tuple[Network, _Reads | None]:
    """What `look` describes, and what it has read; None where that is not wanted, or too much."""
    before = set(sys.modules)
    with _listening() as (opened, variables):
        network = replace(look(), make=_not_made)
    reads = _reads(opened, variables, before) if wanted else None
    return network, reads


_LISTENERS: list[list[str]] = []
"""Lists that take the names of files that are opened. Python cannot take a hook back: it is added once."""


def _hook(event: str, values: tuple[Any, ...]) -> None:
    if event == "open" and _LISTENERS and isinstance(values[0], (str, os.PathLike)):
        writes = isinstance(values[2], int) and values[2] & (os.O_WRONLY | os.O_RDWR)
        if not writes:
            _LISTENERS[-1].append(os.fspath(values[0]))


@remember
def _add_hook() -> None:
    sys.addaudithook(_hook)


@contextmanager
def _listening() -> Iterator[tuple[list[str], dict[str, str | None]]]:
    """Note the files that are opened and the variables of the environment that are asked for."""
    _add_hook()
    kind: Any = type(os.environ)
    plain, variables = kind.__getitem__, dict[str, str | None]()

    def asked(environment: Any, key: Any) -> Any:
        try:
            value = plain(environment, key)
        except KeyError:
            variables.setdefault(str(key), None)
            raise
        variables.setdefault(str(key), _text(value))
        return value

    opened: list[str] = []
    _LISTENERS.append(opened)
    kind.__getitem__ = asked
    try:
        yield opened, variables
    finally:
        kind.__getitem__ = plain
        _LISTENERS.pop()


def _reads(opened: list[str], variables: dict[str, str | None], before: set[str]) -> _Reads | None:
    from planner.graph.capture_errors import is_library

    modules = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    own = {Path(file).resolve() for file in modules.values() if file and not is_library(file)}
    own = {path for path in own if not _is_ours(path) and path.is_file()}
    folders = {path.parent for path in own}
    beside = {near for folder in folders for near in sorted(folder.glob("*.py"))[:_MOST_NEIGHBOURS]}
    named = (name for name in opened if not is_library(name) and not name.startswith(("/proc/", "/sys/")))
    read = {path for path in map(Path.resolve, map(Path, named)) if path.is_file() and path.suffix != ".pyc"}
    files = own | beside | {path for path in read if not _is_ours(path)}
    if sum(path.stat().st_size for path in files) > _MOST_BYTES:
        return None
    new = {name.partition(".")[0] for name, file in modules.items() if name not in before and file and is_library(file)}
    digests = {str(path): _file(str(path)) for path in sorted(files)}
    if "" in digests.values():
        return None
    return _Reads(
        files=digests,
        variables=dict(sorted(variables.items())),
        libraries={name: cache.version(name) for name in sorted(new & set(_distributions()))},
    )


def _is_ours(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in _OURS)


def _distributions() -> list[str]:
    from importlib import metadata

    return [found.metadata["Name"] for found in metadata.distributions()]


def _file(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""


def _text(text: str | None) -> str:
    return hashlib.sha256((text or "").encode("utf-8", "surrogateescape")).hexdigest()
