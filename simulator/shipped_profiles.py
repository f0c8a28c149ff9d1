"""The shipped profiles, and profiles that say only what is other than in one of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

from simulator.errors import ProfileError
from simulator.hardware import PROFILE_SUFFIX

BASE = "based_on"
MOST_BASES = 4
MAX_SOURCE = 1000
"""Letters of a source."""


def shipped_names() -> list[str]:
    """Names of the shipped profiles, sorted."""
    files = resources.files("hw_profiles").iterdir()
    return sorted(entry.name[: -len(PROFILE_SUFFIX)] for entry in files if entry.name.endswith(PROFILE_SUFFIX))


def shipped_text(name: str) -> bytes:
    """The text of a shipped profile.

    Raises
    ------
    ProfileError
        No profile has this name; the message suggests those of the device, or similar names.
    """
    names = shipped_names()
    if set(name.split(",")) <= set(names) and "," in name:
        raise ProfileError(
            f"--hw {name}: one cluster is planned at a time; list the nodes of a cluster of several types in a file "
            "(docs/how-to/my-cluster.md), or compare clusters with meshwright what-if"
        )
    if name not in names:
        near = _of_device(name, names) or difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known profiles: {', '.join(names)}"
        raise ProfileError(f"no hardware profile is named {name!r}; {hint} (or give the path of a YAML file)")
    return (resources.files("hw_profiles") / (name + PROFILE_SUFFIX)).read_bytes()


def _of_device(name: str, names: list[str]) -> list[str]:
    """Profiles of a device that is named instead of its cluster: ``ascend910c`` is in `cloudmatrix384`."""
    asked = _plain(name)
    if len(asked) < 3:
        return []
    heads = {one: shipped_text(one).decode()[:1500] for one in names}
    found = [one for one, text in heads.items() if asked in _plain(_said(text, r"^  name: *(.*)$"))]
    return (
        found or [one for one, text in heads.items() if asked in _plain(_said(text, r"(?s)^description:(.*?)^\w"))]
    )[:3]


def _said(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _plain(text: str) -> str:
    """Letters and digits, for comparing."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


def with_base(data: Mapping[str, Any], file: str, depth: int = 0) -> dict[str, Any]:
    """A profile's data over those of the shipped profile that it is ``based_on``, if it says one.

    Mappings are joined key by key, lists of as many mappings item by item; a number with its source is taken whole, and
    null takes a key away. What comes from the base is assumed, whatever it rests on there, and the intervals of
    predictions are of a device without rows of its own.

    Raises
    ------
    ProfileError
        There is no such profile.
    """
    own = dict(data)
    name = own.pop(BASE, None)
    if name is None:
        return own
    if not isinstance(name, str) or depth == MOST_BASES:
        raise ProfileError(f"profile {file}: {BASE} is {name!r}; name a shipped profile")
    base = with_base(yaml.load(shipped_text(name), Loader=yaml.CSafeLoader), name, depth + 1)
    assumed = _assumed(base, name)
    assumed["uncertainty"]["label"] = "extrapolated"
    found: dict[str, Any] = _joined(assumed, own)
    return found


def _assumed(value: Any, name: str) -> Any:
    """Data of a profile whose every source says that they are assumed."""
    if isinstance(value, list):
        return [_assumed(item, name) for item in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _assumed(item, name) for key, item in value.items()}
    if isinstance(found.get("source"), str):
        found["source"] = f"assumed: as for {name}; there {found['source']}"[:MAX_SOURCE]
    return found


def _joined(base: Any, own: Any) -> Any:
    if isinstance(base, Mapping) and isinstance(own, Mapping) and "value" not in own:
        found = {key: item for key, item in base.items() if own.get(key, item) is not None}
        return found | {key: _joined(base.get(key), item) for key, item in own.items() if item is not None}
    if isinstance(base, list) and isinstance(own, list) and len(base) == len(own):
        pairs = zip(base, own, strict=True)
        return [_joined(*pair) for pair in pairs]
    return own
