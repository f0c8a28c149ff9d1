"""Networks that users' code describes, remembered as long as nothing that the code has read has changed.

To describe such a network its code has to run, which takes torch and the making of a module. What the code reads is
noted while it runs: its modules and those beside them, files that it opens, variables of the environment, versions of
libraries. Where all are as they were, so is the network, and its graph lies in the cache (`planner.graph.cache`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache as remember
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.graph import cache
from planner.networks.child import in_child
from planner.networks.inputs import InputSpec
from planner.networks.marks import Marks
from planner.networks.network import Network
from planner.networks.user_module import check_factory
from simulator.errors import InputError
from simulator.whole_file import write_whole

if TYPE_CHECKING:
    from torch import nn

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
