"""Changing numbers in the text of a profile: comments, order and everything else stay as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import yaml

from simulator.errors import ProfileError
from simulator.hardware import format_number


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
