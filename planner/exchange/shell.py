"""Options and variables of launch scripts: the command lines of a shell script without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.errors import InputError

MOST_LETTERS = 1 << 18
"""Letters of a script with its variables put in: a script may double a variable on every line."""
MOST_DIGITS = 15
# Groups end at the next bracket, so that no text is read twice.
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARITHMETIC = re.compile(r"\$\(\(([^()]*)\)\)")
_QUOTED = re.compile(rf"'[^']*'|\"[^\"]*\"|{_ARITHMETIC.pattern}")
_PRODUCT = re.compile(r"\s*\$?(\w+)\s*(?:([*/+-])\s*\$?(\w+)\s*)?")


@dataclass(frozen=True, kw_only=True)
class Script:
    """Options in order with their values (a flag has none), and variables."""

    options: Mapping[str, tuple[str, ...]]
    variables: Mapping[str, str] = field(default_factory=dict)


def read_script(text: str) -> Script:
    r"""Read the options of all commands of a script; variables that it sets are put in where they are used.

    Raises
    ------
    InputError
        The script with its variables put in has more than `MOST_LETTERS` letters.

    >>> read_script('N=2\nARGS=(\n  --size $((N * 4))  # eight\n  --fast\n)').options
    {'--size': ('8',), '--fast': ()}
    """
    variables: dict[str, str] = {}
    options: dict[str, tuple[str, ...]] = {}
    left = MOST_LETTERS
    _check_length(left - len(text))
    for line in _commands(text):
        assigned = _ASSIGNMENT.fullmatch(line.strip())
        if assigned and assigned[2].startswith("("):
            line, assigned = assigned[2].strip("()"), None
        value = _expanded(assigned[2] if assigned else line, variables, left)
        left -= len(value)
        _check_length(left)
        words = _words(value) if assigned else []
        if assigned and len(words) == 1 and not words[0].startswith("-"):
            variables[assigned[1]] = words[0]
        else:
            rest = value.strip().strip("\"'") if assigned else value
            options |= _options(_words(_expanded(rest, variables, left)))
    return Script(options=options, variables=variables)


def _commands(text: str) -> list[str]:
    """Lines without comments, continued ones and arrays in one."""
    found: list[str] = []
    open_line, depth = "", 0
    for raw in text.splitlines():
        line = re.sub(r"(^|\s)#.*", r"\1", raw).rstrip()
        depth += _array_depth(line)
        continued = line.endswith("\\")
        open_line += line.removesuffix("\\") + " "
        if not continued and depth <= 0:
            found.append(open_line)
            open_line, depth = "", 0
    return [line for line in (*found, open_line) if line.strip()]


def _array_depth(line: str) -> int:
    """Arrays that a line opens, less those that it closes; brackets in quotes are none."""
    bare = _QUOTED.sub("", line)
    return bare.count("(") - bare.count(")")


def _expanded(text: str, variables: Mapping[str, str], most: int) -> str:
    """Text with known variables and sums of two whole numbers put in; InputError where it has over `most` letters."""
    left = most

    def put(value: str) -> str:
        nonlocal left
        left -= len(value)
        _check_length(left)
        return value

    text = _ARITHMETIC.sub(lambda found: put(_computed(found[1], variables) or found[0]), text)
    return _VARIABLE.sub(lambda found: put(variables.get(found[1] or found[3], found[2] or found[0])), text)


def _check_length(left: int) -> None:
    if left < 0:
        raise InputError(
            f"the script with its variables put in has more than {MOST_LETTERS} letters; give the command that it runs"
        )


def _computed(text: str, variables: Mapping[str, str]) -> str:
    found = _PRODUCT.fullmatch(text)
    if found is None:
        return ""
    first, second = (variables.get(name or "", name or "") for name in (found[1], found[3]))
    if not all(number.isdecimal() and len(number) <= MOST_DIGITS for number in (first, second if found[2] else "0")):
        return ""
    if not found[2]:
        return first
    one, other = int(first), int(second)
    return str({"*": one * other, "+": one + other, "-": one - other, "/": one // (other or 1)}[found[2]])


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _options(words: list[str]) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = [value] if equals else []
        elif name and not word.startswith("$"):
            found[name].append(word)
    return {name: tuple(values) for name, values in found.items()}
