"""Reads the files that users give: one way for all, so that no file hangs, fills the memory or crashes the program.

A file must be regular, no larger than its kind may be, UTF-8 and, where it is YAML or JSON, of bounded depth and size.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from yaml.composer import Composer

from simulator.errors import InputError

MAX_DEPTH = 20
MAX_NODES = 100_000
"""Values of a YAML file, aliases counted as what they stand for."""
MAX_DIGITS = 40
_KINDS = (
    (stat.S_ISDIR, "folder"),
    (stat.S_ISFIFO, "pipe"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "device"),
    (stat.S_ISBLK, "device"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileKind:
    """A kind of input file, such as profiles, with what its messages say.

    Attributes
    ----------
    name : what messages call a file of this kind
    remedy : what to do about a file that is none
    max_bytes : the largest size; None for files that are mapped into memory, not read
    error : the class of the errors

    Examples
    --------
    >>> schedules = FileKind(name="schedule", remedy="give a CSV file")
    >>> schedules.read("/dev/zero")
    Traceback (most recent call last):
    simulator.errors.InputError: schedule '/dev/zero' is a device, not a regular file; give a CSV file
    """

    name: str
    remedy: str
    max_bytes: int | None = 1 << 20
    error: type[InputError] = InputError

    @contextmanager
    def open(self, path: str | Path) -> Iterator[BinaryIO]:
        """Open a regular file of an allowed size; a file that grows meanwhile is not noticed here."""
        with self._explained(path):
            place = os.path.expanduser(path)  # noqa: PTH111 pathlib raises where it knows no home
            self._check(path, os.stat(place))  # noqa: PTH116 to open a device may already do something
            number = os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(number, "rb") as stream:
                self._check(path, os.fstat(number))
                yield stream

    def read(self, path: str | Path) -> bytes:
        """The content of a regular file, at most `max_bytes`."""
        with self.open(path) as stream:
            content = stream.read() if self.max_bytes is None else stream.read(self.max_bytes + 1)
        if self.max_bytes is not None and len(content) > self.max_bytes:
            raise self._too_large(path, f"over {self.max_bytes}")
        return content

    def text(self, path: str | Path) -> str:
        """The text of a UTF-8 file, without a byte order mark."""
        return self.decode(self.read(path), path)

    def decode(self, content: bytes, place: str | Path) -> str:
        """The text of what stands in the file `place`."""
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise self.error(
                f"{self.name} {str(place)!r}: byte {error.start} is not UTF-8; save the file as UTF-8"
            ) from None

    def yaml(self, content: bytes | str, place: str | Path, *, strict: bool = True) -> Any:
        """Plain data of the YAML text of the file `place`.

        Parameters
        ----------
        strict
            No aliases, no repeated keys, and plain words mean what they look like (no base 60, octal, yes or no);
            otherwise YAML 1.1, where aliases may stand for `MAX_NODES` values in all.
        """
        text = content if isinstance(content, str) else self.decode(content, place)
        try:
            found = yaml.load(text, Loader=_StrictLoader if strict else _Bounded)  # noqa: S506 (stricter than SafeLoader)
        except Exception as error:  # noqa: BLE001 PyYAML raises whatever the constructor of a wrong value raises
            why: object = error
            if isinstance(error, LookupError | AttributeError):
                why = "a value does not have the type of its tag"
            raise self.error(
                f"{self.name} {str(place)!r} is not valid YAML: {' '.join(str(why).split())}; {self.remedy}"
            ) from None
        return found

    def json(self, content: bytes | str, place: str | Path, *, constants: bool = False) -> Any:
        """Data of the JSON text of the file `place`; a key may not stand twice in one object.

        Parameters
        ----------
        constants
            Allow NaN and Infinity, which JSON does not have.
        """
        text = content if isinstance(content, str) else self.decode(content, place)
        refused = None if constants else _refuse_constant
        try:
            found = json.loads(text, object_pairs_hook=_unrepeated, parse_int=_integer, parse_constant=refused)
            level = [found] if isinstance(found, dict | list) else []
            for _ in range(MAX_DEPTH):
                inner = (child for item in level for child in (item.values() if isinstance(item, dict) else item))
                level = [child for child in inner if isinstance(child, dict | list)]
            if level:
                raise RecursionError
            _check_letters(found, text)
        except json.JSONDecodeError as error:
            error = _same_in_every_python(error)
            why = f"line {error.lineno}, column {error.colno}: {error.msg}"
        except RecursionError:
            why = f"it is nested deeper than {MAX_DEPTH} levels"
        except ValueError as error:
            why = str(error)
        else:
            return found
        raise self.error(f"{self.name} {str(place)!r} is not valid JSON: {why}; {self.remedy}")

    def _check(self, path: str | Path, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode):
            kind = next((name for matches, name in _KINDS if matches(status.st_mode)), "special file")
            raise self.error(f"{self.name} {str(path)!r} is a {kind}, not a regular file; {self.remedy}")
        if self.max_bytes is not None and status.st_size > self.max_bytes:
            raise self._too_large(path, str(status.st_size))

    def _too_large(self, path: str | Path, size: str) -> InputError:
        return self.error(
            f"{self.name} {str(path)!r} has {size} bytes, and at most {self.max_bytes} are read; {self.remedy}"
        )

    @contextmanager
    def _explained(self, path: str | Path) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise self.error(f"{self.name} {str(path)!r} does not exist; {self.remedy}") from None
        except (OSError, UnicodeEncodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise self.error(f"{self.name} {str(path)!r} cannot be read: {why}; {self.remedy}") from None
        except ValueError as error:
            if "embedded null" not in str(error):  # byte, from Python 3.13 on character
                raise
            raise self.error(f"{self.name} {str(path)!r} cannot be read: {error}; {self.remedy}") from None


def is_regular(path: str | Path) -> bool:
    """Whether a regular file is there; False for a path that no file can have."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


# JSON

_COMMA_AT_END = re.compile(r",\s*[\]}]")


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"the number {text[:MAX_DIGITS]}… has more than {MAX_DIGITS} digits")
    return int(text)


def _same_in_every_python(error: json.JSONDecodeError) -> json.JSONDecodeError:
    """The error at a comma before a closing bracket, which Python names from 3.13 on, and until then what follows."""
    for place in (error.pos, len(error.doc[: error.pos].rstrip()) - 1):
        if place >= 0 and _COMMA_AT_END.match(error.doc, place):
            return json.JSONDecodeError("a comma before a closing bracket", error.doc, place)
    return error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number that JSON allows; write a finite number")


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"key {twice[:80]!r} stands {times} times in one object; keep one")
    return found


def _check_letters(value: object, text: str) -> None:
    """Raise UnicodeEncodeError, a ValueError, for halves of surrogate pairs, which only escapes can write."""
    if "\\u" in text or "\\U" in text:
        json.dumps(value, ensure_ascii=False, default=str).encode()


# YAML

# libyaml reads the text, where it is there, in a tenth of the time; nodes are made here, which tells aliases and depth.
_BASES: Any = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)


class _Bounded(*_BASES):  # type: ignore[misc]
    """SafeLoader that bounds depth and the number of values, aliases counted as what they stand for."""

    aliases = True

    def __init__(self, stream: str) -> None:
        Composer.__init__(self)
        _BASES[-1].__init__(self, stream)
        self.depth = self.deepest = self.nodes = 0
        self.anchored: dict[int, tuple[int, int]] = {}  # of a whole node with a name: its values and levels

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        line = event.start_mark.line + 1
        above, before = self.deepest, self.nodes
        self.depth += 1
        self.deepest = self.depth
        self._check_bounds()
        node = super().compose_node(parent, index)
        if isinstance(event, yaml.events.AliasEvent):
            if not self.aliases:
                raise yaml.YAMLError(f"line {line}: aliases (*name) are not allowed here")
            if id(node) not in self.anchored:
                raise yaml.YAMLError(f"line {line}: alias *{event.anchor} stands inside what it names")
            nodes, levels = self.anchored[id(node)]
            self.nodes += nodes
            self.deepest = self.depth + levels
        else:
            self.nodes += 1
            if event.anchor is not None:
                self.anchored[id(node)] = self.nodes - before, self.deepest - self.depth
        self._check_bounds()
        self.depth -= 1
        self.deepest = max(above, self.deepest)
        return node

    def _check_bounds(self) -> None:
        if self.deepest > MAX_DEPTH:
            raise yaml.YAMLError(f"nested deeper than {MAX_DEPTH} levels")
        if self.nodes > MAX_NODES:
            raise yaml.YAMLError(f"more than {MAX_NODES} values, aliases counted as what they stand for")

    def construct_yaml_int(self, node: Any) -> int:
        if len(node.value) > MAX_DIGITS:
            raise yaml.YAMLError(f"the number {node.value[:MAX_DIGITS]}… has more than {MAX_DIGITS} digits")
        return int(super().construct_yaml_int(node))


class _StrictLoader(_Bounded):
    """The same without aliases, repeated keys, dates and the surprises of YAML 1.1."""

    aliases = False

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: keys must be plain names")
            if key.value in seen:
                raise yaml.YAMLError(f"line {key.start_mark.line + 1}: key {key.value!r} stands there twice")
            seen.add(key.value)
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_Bounded.add_constructor("tag:yaml.org,2002:int", _Bounded.construct_yaml_int)
# Plain words mean what they look like: no base 60 (1:30), no octal (010), no yes/no, but 3e12 is a number.
_StrictLoader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"^(?:null|~|)$", ["n", "~", ""]),
    ("bool", r"^(?:true|false)$", list("tf")),
    ("int", r"^[-+]?(?:0|[1-9][0-9_]*)$", list("-+0123456789")),
    ("float", r"^[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\d+\.\d*|\.\d+|\.inf|\.nan)$", list("-+0123456789.")),
):
    _StrictLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), _first)
