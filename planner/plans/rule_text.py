"""One rule as a line of a strategy file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from planner.sharding.placement import parse_placement, placement_name
from planner.sharding.rules import InnerMessage, Rule
from simulator.errors import InputError
from simulator.program import Collective

_ARROW = " -> "
_NOTHING = "()"
_RULE = re.compile(
    r"(?:([^;>]+) -> )?([^;>]+?)(; (?:split|whole) work)?(?:; reduces ([1-9][0-9]{0,15}))?((?:; [a-z_]+ of [^;]+)*)"
)
_MESSAGE = re.compile(
    r"([a-z_]+) of (?:tensors ([0-9]{1,3}(?:\+[0-9]{1,3})*))?(?: and )?(?:([1-9][0-9]{0,15}) numbers)?"
    r"(?: / ([1-9][0-9]{0,8}))?( in turns)?( beside)?( uncut)?"
)


def rule_to_text(rule: Rule) -> str:
    """Write a rule as one line.

    >>> rule_to_text(Rule((0, -1), (0,), splits_work=True))
    'S(0), R -> S(0)'
    >>> rule_to_text(Rule((0, -1), (0, -1), splits_work=True, reduced_elements=128))
    'S(0), R -> S(0), R; reduces 128'
    """
    text = _side(rule.inputs) + _ARROW + _side(rule.outputs) if rule.inputs else _side(rule.outputs)
    if rule.splits_work != _splits_by_default(rule.inputs, rule.outputs):
        text += "; split work" if rule.splits_work else "; whole work"
    if rule.reduced_elements:
        text += f"; reduces {rule.reduced_elements}"
    return text + "".join(f"; {message_to_text(message)}" for message in rule.messages)


def message_to_text(message: InnerMessage) -> str:
    """Write a collective inside an operator.

    >>> message_to_text(InnerMessage(Collective.SEND, tensors=(1, 2), circulating=True, overlapped=True))
    'send of tensors 1+2 in turns beside'
    """
    parts = [f"tensors {'+'.join(map(str, message.tensors))}"] if message.tensors else []
    parts += [f"{message.elements} numbers"] if message.elements else []
    text = f"{message.collective.value} of {' and '.join(parts)}"
    text += f" / {message.divisor}" if message.divisor != 1 else ""
    return text + " in turns" * message.circulating + " beside" * message.overlapped + " uncut" * message.uncut


def _message_from_text(text: str) -> InnerMessage:
    match = _MESSAGE.fullmatch(text)
    names = {collective.value: collective for collective in Collective}
    if (
        match is None
        or match[1] not in names
        or not (match[2] or match[3])
        or (" and " in text) != bool(match[2] and match[3])
    ):
        raise InputError(f"message {text!r} does not read like 'send of tensors 1+2 in turns beside'; correct it")
    return InnerMessage(
        names[match[1]],
        elements=int(match[3] or 0),
        tensors=tuple(map(int, match[2].split("+"))) if match[2] else (),
        divisor=int(match[4] or 1),
        circulating=match[5] is not None,
        overlapped=match[6] is not None,
        uncut=match[7] is not None,
    )


@lru_cache(maxsize=65536)
def rule_from_text(text: str) -> Rule:
    """Read what `rule_to_text` wrote.

    >>> rule_from_text("S(0), R -> S(0); reduces 128")
    Rule(inputs=(0, -1), outputs=(0,), splits_work=True, reduced_elements=128)
    """
    match = _RULE.fullmatch(text)
    if match is None:
        raise InputError(f"rule {text!r} does not read like 'S(0), R -> S(0)'; correct it")
    inputs, outputs = _placements_of(match[1] or _NOTHING), _placements_of(match[2])
    default = _splits_by_default(inputs, outputs)
    messages = tuple(_message_from_text(part) for part in match[5].split("; ")[1:])
    splits = default if match[3] is None else match[3] == "; split work"
    return Rule(inputs, outputs, splits_work=splits, reduced_elements=int(match[4] or 0), messages=messages)


def _side(placements: Iterable[int]) -> str:
    return ", ".join(placement_name(p) for p in placements) or _NOTHING


def _placements_of(side: str) -> tuple[int, ...]:
    return () if side == _NOTHING else tuple(parse_placement(item) for item in side.split(", "))


def _splits_by_default(inputs: tuple[int, ...], outputs: tuple[int, ...]) -> bool:
    return bool(inputs) and any(p >= 0 for p in (*inputs, *outputs))
