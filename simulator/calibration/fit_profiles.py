"""Numbers of the shipped profiles, fitted to published measurements and written into the profile files.

Every fit minimises the mean of ``|ln(predicted / measured)|``, which outliers move little, with the very
functions that the simulator uses. The source of each number names its rows, and median and 90th percentile of the
relative error ``exp(|ln(predicted / measured)|) - 1``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import yaml

from simulator.calibration.fit_collectives import fit_collectives
from simulator.calibration.fit_operators import Fields, operator_fits
from simulator.calibration.fits import FittedValues, fit_rows
from simulator.errors import ProfileError
from simulator.hardware import PROFILE_SUFFIX, format_number
from simulator.profile_file import parse_profile
from simulator.whole_file import write_whole


def with_fields(text: str, fields: Mapping[str, object]) -> str:
    """`text`, the YAML of a profile, with the content of each field, by its dotted path, replaced or added.

    Entries of lists are counted from 0: ``topology.levels.0.latency_s``.
    """
    for place, content in fields.items():
        text = _with_field(text, place, content)
    return text


def _with_field(text: str, place: str, content: object) -> str:
    node: yaml.Node | None = yaml.compose(text, Loader=yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader)
    parts = place.split(".")
    if node is None:
        raise ProfileError("the profile is empty; give a whole one")
    for depth, part in enumerate(parts):
        child = _child(node, part)
        if child is None:
            return _added(text, node, parts[depth:], content)
        node = child
    start = node.start_mark.index
    return text[:start] + flow(content) + text[_end(node) :]


def _child(node: yaml.Node | None, part: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for key, value in node.value if key.value == part), None)
    if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
        found: yaml.Node = node.value[int(part)]
        return found
    return None


def _end(node: yaml.Node) -> int:
    """Where the text of `node` ends: a block ends with its last part, before blank lines and comments."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    end: int = node.end_mark.index
    return end


def _added(text: str, node: yaml.Node | None, parts: Sequence[str], content: object) -> str:
    """A new key at the end of a mapping that is written as a block, with the mappings around its content."""
    if not isinstance(node, yaml.MappingNode) or node.flow_style or not node.value:
        raise ProfileError(
            f"the profile has no block of keys to add {'.'.join(parts)} to; write its parent with one key a line"
        )
    indent = node.value[0][0].start_mark.column
    lines = [f"{' ' * (indent + 2 * depth)}{part}:" for depth, part in enumerate(parts)]
    end = _end(node)
    return f"{text[:end]}\n" + "\n".join(lines) + f" {flow(content)}{text[end:]}"


def flow(content: object) -> str:
    """`content` on one line of YAML."""
    if isinstance(content, Mapping):
        return "{" + ", ".join(f"{key}: {flow(value)}" for key, value in content.items()) + "}"
    if isinstance(content, (list, tuple)):
        return "[" + ", ".join(flow(value) for value in content) + "]"
    if isinstance(content, bool) or not isinstance(content, (int, float)):
        return json.dumps(content, ensure_ascii=False)
    number = format_number(content)
    if isinstance(content, int):
        return number
    # A point and a sign, without which YAML 1.1 readers take it for text or a whole number.
    mantissa, mark, exponent = number.partition("e")
    point = "" if "." in mantissa else ".0"
    return f"{mantissa}{point}e{int(exponent):+d}" if mark else f"{mantissa}{point}"


@dataclass(frozen=True, kw_only=True)
class ProfileFit:
    """Fitted fields of one profile, the fits behind them, and the whole profile's text with them."""

    profile: str
    fields: Fields
    fits: tuple[FittedValues, ...]
    text: str


def fitted_profiles() -> tuple[str, ...]:
    """Names of the shipped profiles that published measurements speak for."""
    return tuple(rows.profile for rows in fit_rows())


def fit_profile(folder: Path, profile: str) -> ProfileFit:
    """All fits of one shipped profile.

    Parameters
    ----------
    folder
        Folder of measurements that holds ``operators/``.

    Raises
    ------
    InputError
        When no rows are known for the profile, or a measurement file is wrong (file, line and column are named).
    """
    operators = operator_fits(folder, profile)
    collectives, fits = fit_collectives(folder, profile)
    fields = {**operators.fields, **collectives}
    shipped = resources.files("hw_profiles") / (profile + PROFILE_SUFFIX)
    text = with_fields(shipped.read_text(encoding="utf-8"), fields)
    parse_profile(text.encode(), f"{profile}{PROFILE_SUFFIX}")
    return ProfileFit(profile=profile, fields=fields, fits=(*operators.fits, *fits), text=text)


def shipped_folder() -> Path:
    """Folder of the shipped profiles."""
    return Path(str(resources.files("hw_profiles")))


def write_fitted(fit: ProfileFit, folder: Path) -> Path:
    """Write the profile with its fitted numbers into `folder`, whole or not at all; returns the file."""
    path = folder / (fit.profile + PROFILE_SUFFIX)
    write_whole(path, fit.text)
    return path
