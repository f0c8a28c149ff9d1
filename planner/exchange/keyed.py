"""Nested documents by dotted keys: each key is read once, and what nobody asks for is listed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from planner.exchange.formats import CONFIGURATION, Written
from planner.exchange.training_config import LARGEST
from simulator.errors import InputError


class Document:
    """The values of a JSON or YAML file by dotted key.

    Parameters
    ----------
    raw
        What the file holds.
    source
        Its name, for messages.
    framework
        Whose configuration it is, for messages.

    Raises
    ------
    InputError
        The file is no mapping.

    Examples
    --------
    >>> found = Document({"training": {"steps": 10, "seed": 1}}, "a.yaml", "a framework")
    >>> found.number("training.steps"), found.number("training.batch", 8), found.unread()
    (10, 8, ('training.seed',))
    """

    def __init__(self, raw: object, source: str, framework: str) -> None:
        if not isinstance(raw, Mapping):
            raise InputError(f"{source} is no mapping of keys to values; give a configuration of {framework}")
        self.sections: Mapping[Any, Any] = raw
        self.values: dict[str, Any] = dict(_flat(raw, ""))
        self._source = source
        self._read: set[str] = set()

    @classmethod
    def json(cls, text: str, source: str, framework: str) -> Document:
        """Read JSON."""
        return cls(CONFIGURATION.json(text, source), source, framework)

    @classmethod
    def yaml(cls, text: str, source: str, framework: str) -> Document:
        """Read YAML."""
        return cls(CONFIGURATION.yaml(text, source, strict=False), source, framework)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; `default` where it is left out or null."""
        self._read.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def optional(self, key: str, least: int = 1) -> int | None:
        """A whole number; None where it is left out."""
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
            raise InputError(f"{self._source}: {key} = {value!r} is no whole number of at least {least}; correct it")
        return value

    def number(self, key: str, default: int = 1, least: int = 1) -> int:
        """A whole number."""
        found = self.optional(key, least)
        return default if found is None else found

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self._source}: {key} = {value!r} is neither true nor false; correct it")
        return value

    def word(self, key: str, words: Mapping[str, str], default: str) -> str:
        """One of the framework's words, as the one of ours that `words` has for it."""
        value = self.get(key, default)
        if str(value) not in words:
            raise InputError(f"{self._source}: {key} = {value!r} is not one of {', '.join(words)}; use one of them")
        return words[str(value)]

    def numbers(self, key: str) -> tuple[int, ...]:
        """Whole numbers in a list or in a text with commas; empty where it is left out."""
        value = self.get(key, [])
        items = value.split(",") if isinstance(value, str) else value
        try:
            found = tuple(int(item) for item in items)
        except (TypeError, ValueError, OverflowError):
            found = (-1,)
        if any(not 0 <= number <= LARGEST for number in found):
            raise InputError(f"{self._source}: {key} = {value!r:.60} is no list of whole numbers; correct it")
        return found

    def pass_over(self, prefix: str) -> None:
        """Count keys that begin so as read: they say nothing of the plan, and belong to it."""
        self._read.update(key for key in self.values if key.startswith(prefix))

    def unread(self) -> tuple[str, ...]:
        """Keys that nobody asked for."""
        return tuple(key for key in self.values if key not in self._read)


def _flat(raw: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in raw.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The document with these values by dotted key.

    >>> nested({"a.b": 1, "a.c": 2, "d": 3})
    {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        place = found
        for name in path:
            place = place.setdefault(name, {})
        place[last] = value
    return found


def yaml_file(comment: str, values: Mapping[str, Any]) -> Written:
    """The YAML file of values by dotted key, behind a comment."""
    return Written(text=f"# {comment}\n" + yaml.safe_dump(nested(values), sort_keys=False))


def json_file(about: str, values: Mapping[str, Any]) -> Written:
    """The JSON file of values; it has no comments, so that what it is stands in a key that frameworks pass over."""
    return Written(text=json.dumps({"meshwright": about, **values}, indent=2) + "\n")
