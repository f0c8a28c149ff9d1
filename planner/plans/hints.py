"""Hints: placements that a user gives to some operators, by pattern of their names.

A hint speaks of one mesh axis, or says in how many parts dims are cut (`planner.sharding.cuts`). Its pattern is
that of `fnmatch`. `planner.search.problem.hints` finds the operators that a hint is for.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.plans import mindspore
from planner.sharding.cuts import OperatorCuts
from planner.sharding.placement import Placement, parse_placement, placement_name
from simulator.checks import strategy
from simulator.errors import InputError
from simulator.input_file import FileKind

AXES = ("data", "context", "expert", "tensor")
ANYTHING = "*"
HINTS = FileKind(name="hints", remedy="give a YAML list of hints (docs/search.md)", max_bytes=16 << 20)

Placed = tuple[Placement | None, ...]
"""Placements of tensors in order; None says nothing about one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """Placements of the inputs and outputs of the operators that `pattern` names, along mesh axis `axis`.

    Empty ``inputs`` or ``outputs`` say nothing about them. With ``cuts`` in their place no axis is named. ``modules``
    are those that the hint is for, where it is for these alone. ``exact`` says that the pattern is the whole name of an
    operator, of whose own tensors the cuts are, even where it has no ``/``.
    """

    pattern: str
    axis: str = ""
    inputs: Placed = ()
    outputs: Placed = ()
    cuts: OperatorCuts | None = None
    modules: frozenset[str] = frozenset()
    exact: bool = False

    def __post_init__(self) -> None:
        if self.cuts is not None:
            return
        if self.axis not in AXES:
            near = difflib.get_close_matches(self.axis, AXES, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"hint {self.pattern!r}: axis {self.axis!r} is not one of {', '.join(AXES)}{meant}")
        if not any(p is not None for p in (*self.inputs, *self.outputs)):
            raise InputError(f"hint {self.pattern!r} gives no placement; name that of an input or an output")

    @property
    def vagueness(self) -> tuple[int, int]:
        """Smaller for patterns that say more: fewer wildcards, then more letters."""
        wild = len(re.findall(r"[*?\[]", self.pattern))
        return wild, -len(self.pattern)

    @property
    def content(self) -> tuple[object, ...]:
        """What it says, whatever it is for; cuts are those of a module or of an operator."""
        return self.axis, self.inputs, self.outputs, self.cuts, self.of_module

    @property
    def of_module(self) -> bool:
        """Whether cuts are those of a module's tensors."""
        return self.cuts is not None and not self.exact and "/" not in self.pattern

    def __str__(self) -> str:
        if self.cuts is not None:
            return f"{self.pattern!r} ({self.cuts})"
        sides = (("inputs", self.inputs), ("outputs", self.outputs))
        said = ", ".join(f"{name} {placement_names(placed)}" for name, placed in sides if placed)
        return f"{self.pattern!r} ({self.axis}: {said})"


def hint(pattern: str, axis: str, *, inputs: Sequence[str] = (), outputs: Sequence[str] = ()) -> Hint:
    """Make a hint of placements by name; ``"*"`` says nothing about a tensor.

    >>> str(hint("blocks.*.expand", "tensor", outputs=["S(1)"]))
    "'blocks.*.expand' (tensor: outputs S(1))"
    """

    def read(names: Sequence[str]) -> Placed:
        return tuple(None if name == ANYTHING else parse_placement(name) for name in names)

    return Hint(pattern=pattern, axis=axis, inputs=read(inputs), outputs=read(outputs))


def load_hints(path: str | Path) -> tuple[Hint, ...]:
    """Read hints from a YAML list of ``{operators, axis, inputs, outputs}`` or ``{operators, in_strategy}``.

    A JSON strategy file of MindSpore is read as well: the parts that it cuts the inputs of operators in.

    Raises
    ------
    InputError
        For a file that cannot be read, is no such list, or names no placement; it says where.
    """
    text = HINTS.text(path)
    content = HINTS.json(text, path) if Path(path).suffix == ".json" else HINTS.yaml(text, path, strict=False)
    if mindspore.is_mindspore(content):
        found = mindspore.parts_by_operator(content, str(path)).items()
        return tuple(Hint(pattern=name, cuts=OperatorCuts(inputs=parts), exact=True) for name, parts in found if parts)
    if not isinstance(content, list):
        raise InputError(f"hints {str(path)!r}: write a list of hints, each with operators, axis and inputs or outputs")
    return tuple(_read(f"{path}: hint {number}", item) for number, item in enumerate(content, 1))


def _read_cuts(place: str, item: Mapping[str, object]) -> Hint:
    known = ("operators", "in_strategy", "out_strategy")
    unknown = next((key for key in item if key not in known), None)
    if unknown is not None or not isinstance(item.get("operators"), str) or "in_strategy" not in item:
        raise InputError(f"{place} has {unknown or 'no name or strategy'!r}; it takes {', '.join(known)}")

    def read(key: str) -> tuple[tuple[int, ...], ...]:
        rows = item[key]
        tuples = tuple(tuple(row) if isinstance(row, list) else row for row in rows) if isinstance(rows, list) else rows
        return strategy(f"{place}: {key}", tuples)

    outputs = read("out_strategy") if "out_strategy" in item else ()
    return Hint(pattern=str(item["operators"]), cuts=OperatorCuts(inputs=read("in_strategy"), outputs=outputs))


def _read(place: str, item: object) -> Hint:
    if isinstance(item, dict) and ("in_strategy" in item or "out_strategy" in item):
        return _read_cuts(place, item)
    known = ("operators", "axis", "inputs", "outputs")
    if not isinstance(item, dict) or not {"operators", "axis"} <= item.keys() <= set(known):
        raise InputError(f"{place} has other keys than {', '.join(known)}; operators and axis are needed")
    for key in ("operators", "axis"):
        if not isinstance(item[key], str):
            raise InputError(f"{place}: {key} {item[key]!r} is no text; write a name in quotes")
    for key in ("inputs", "outputs"):
        names = item.get(key, [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InputError(f"{place}: {key} {names!r} is no list of placements such as [R, 'S(1)', '*']")
    try:
        return hint(item["operators"], item["axis"], inputs=item.get("inputs", []), outputs=item.get("outputs", []))
    except InputError as error:
        raise InputError(f"{place}: {error}") from error


def placement_names(placed: Placed) -> str:
    """Placements by name, with ``*`` where nothing is said."""
    return ", ".join(ANYTHING if p is None else placement_name(p) for p in placed)
