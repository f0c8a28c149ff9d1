"""The shipped profiles, and profiles that say only what differs from one of them, in files or key by key."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import yaml

from simulator.errors import ProfileError
from simulator.hardware import PROFILE_SUFFIX, is_profile_path
from simulator.input_file import FileKind

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


REACHED = 0.95
"""Share of a network's rate that messages reach, as on dgx-a100."""
KEYS: Mapping[str, str] = {
    "device.memory": "device.memory_bytes",
    "device.bandwidth": "device.memory_bandwidth_bytes_per_s",
    "device.power": "device.board_power_w",
    "nodes.nics": "topology.node.nics",
    "nodes.memory": "topology.host_memory_bytes",
    "nodes.links": "topology.levels.0.bandwidth_bytes_per_s",
}
"""Short names of keys. ``nodes.devices`` and ``nodes.network``, the rate of a node's port, change several."""
SHORT: Mapping[str, str] = {
    key.partition(".")[2]: key
    for key in ("nodes.network", "nodes.nics", "nodes.links", "device.memory", "device.bandwidth", "device.power")
}
"""The same keys without what they belong to, where one word tells them apart: ``network`` is ``nodes.network``."""
_SETTING = FileKind(name="--set", remedy="write a value of the kind that the base has", error=ProfileError)
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?\d+)?) *([a-zA-Zµ]*?)(/s|(?<=b)ps)?", re.IGNORECASE)
_SCALES: Mapping[str, float] = {
    "": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40,
}  # fmt: skip
_UNITS: Mapping[str, float] = {"": 1.0, "B": 1.0, "b": 1 / 8, "W": 1.0, "s": 1.0, "FLOPS": 1.0, "FLOP": 1.0}

MOST_DEVICES = 65_536
"""Devices of the largest node that is described: its profile lists the counts that a job may take."""


def quantity(text: str) -> float:
    """A number in SI units; bits are bytes.

    Raises
    ------
    ProfileError
        The text is no number with a known unit.

    >>> quantity("100Gb"), quantity("96GiB"), quantity("989.4TFLOPS"), quantity("3.2TB/s")
    (12500000000.0, 103079215104.0, 989400000000000.0, 3200000000000.0)
    """
    parts = _QUANTITY.fullmatch(text.strip())
    number, word = (parts[1], parts[2]) if parts else ("", "")
    for unit, size in sorted(_UNITS.items(), key=lambda item: -len(item[0])):
        if word.endswith(unit) and word.removesuffix(unit) in _SCALES:
            try:
                found = float(number) * _SCALES[word.removesuffix(unit)] * size
            except ValueError:
                break
            if math.isfinite(found):
                return found
            break
    raise ProfileError(f"{text!r} is no number with a unit; write for example 100Gb, 96GiB, 3.2TB/s, 989TFLOPS or 8")


def new_profile(name: str, base: str, settings: Sequence[str]) -> dict[str, Any]:
    """The content of a profile that is a shipped one with some numbers set.

    Parameters
    ----------
    settings
        ``KEY=VALUE``: a key of `KEYS`, ``nodes.devices``, ``nodes.network``, or the path of a number in the base, such
        as ``device.peak_flops.bfloat16`` or ``topology.levels.1.latency_s``.

    Raises
    ------
    ProfileError
        The name is taken, there is no such base or key, or a value is wrong.
    """
    if name in shipped_names():
        raise ProfileError(f"profile {name!r} is shipped; choose another name")
    if is_profile_path(base):
        raise ProfileError(f"--from {base!r} is a file; name a shipped profile, or copy the file and edit its numbers")
    known = with_base(yaml.load(shipped_text(base), Loader=yaml.CSafeLoader), base)
    found: dict[str, Any] = {"format": "meshwright-profile", "version": 1, "name": name, BASE: base}
    found["description"] = f"{' '.join(str(known['description']).split())} With {', '.join(settings) or 'nothing'} set."
    values = _by_key(settings)
    if "device.name" in values:
        found["device"] = {"name": values.pop("device.name")}
    for key, value, said in _numbers(values, known):
        _set(found, known, key, value, said)
    return found


def _by_key(settings: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = SHORT.get(key, key)
        if not equals or not value or key in found:
            raise ProfileError(f"--set {setting!r}: write KEY=VALUE, each key once, for example nodes.network=100Gb")
        found[key] = value
    return found


def _numbers(values: Mapping[str, str], known: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """Paths with their numbers, and what was said; those of nodes first, because others follow from them."""
    topology = known["topology"]
    devices, nics = topology["devices_per_node"]["value"], topology.get("node", {}).get("nics", {}).get("value", 1)
    found: list[tuple[str, Any, str]] = []
    if "nodes.devices" in values:
        said, old = f"nodes.devices={values['nodes.devices']}", devices
        devices = round(quantity(values["nodes.devices"]))
        if not 1 <= devices <= MOST_DEVICES:
            raise ProfileError(f"--set {said}: a node has at least one device and at most {MOST_DEVICES}")
        found += _sizes(topology, old, devices, said)
        if "nodes.nics" not in values and topology.get("node"):
            nics = math.gcd(nics, devices)
            found.append(("topology.node.nics", nics, said))
    if "nodes.nics" in values:
        nics = round(quantity(values["nodes.nics"]))
    if "nodes.network" in values:
        rate = quantity(values["nodes.network"])
        said = f"nodes.network={values['nodes.network']}: {nics} ports for {devices} devices, {REACHED:.0%} of it"
        outer = len(topology["levels"]) - 1
        found.append((f"topology.levels.{outer}.bandwidth_bytes_per_s", REACHED * rate * nics / devices, said))
    others = (item for item in values.items() if item[0] not in ("nodes.devices", "nodes.network"))
    return found + [(KEYS.get(key, key), value, f"{key}={value}") for key, value in others]


def _sizes(topology: Mapping[str, Any], old: int, new: int, said: str) -> list[tuple[str, Any, str]]:
    """Numbers that change with the devices of a node."""
    counts, most = topology["node_device_counts"]["value"], topology["max_devices"]["value"] // old * new
    every = counts == list(range(1, old + 1))
    found: list[tuple[str, Any, str]] = [
        ("topology.devices_per_node", new, said),
        ("topology.node_device_counts", [n for n in range(1, new + 1) if every or new % n == 0], said),
        ("topology.max_devices", most, said),
    ]
    sizes = [level["size"]["value"] for level in topology["levels"]]
    return found + [(f"topology.levels.{n}.size", size // old * new, said) for n, size in enumerate(sizes)]


def _set(found: dict[str, Any], known: Mapping[str, Any], path: str, value: Any, said: str) -> None:
    """Set the number at a path, as what the base has there."""
    place: Any = known
    for part in path.split("."):
        if isinstance(place, list) and part.isdigit() and int(part) < len(place):
            place = place[int(part)]
        else:
            place = place.get(part) if isinstance(place, Mapping) else None
        if place is None:
            break
    optional = path in KEYS.values()
    if not (isinstance(place, Mapping) and "value" in place) and not (place is None and optional):
        raise ProfileError(
            f"--set {said}: the base has no number {path!r}; use {', '.join(KEYS)}, device.name, nodes.devices, "
            "nodes.network or a path that `meshwright profiles show` lists"
        )
    was = place["value"] if place else 0.0
    number = _like(was, quantity(value) if isinstance(value, str) and isinstance(was, int | float) else value, said)
    _put(found, known, path.split("."), {"value": number, "source": f"assumed: set by hand, {said}"})


def _like(was: Any, value: Any, said: str) -> Any:
    """A value of the type that the base has."""
    if isinstance(was, bool | str | list) and isinstance(value, str):
        return _SETTING.yaml(value, said)
    if isinstance(was, int) and isinstance(value, float):
        if value != int(value):
            raise ProfileError(f"--set {said}: it must be a whole number")
        return int(value)
    return value


def _put(found: Any, known: Any, path: list[str], value: Any) -> None:
    """Put a value at a path of mappings and lists, which are made as the base has them."""
    first, *rest = path
    key: Any = int(first) if isinstance(known, list) else first
    inner = known[key] if isinstance(known, list) else known.get(first, {})
    if not rest:
        found[key] = value
        return
    if not isinstance(found, list):
        found.setdefault(key, [{} for _ in inner] if isinstance(inner, list) else {})
    _put(found[key], inner, rest, value)
