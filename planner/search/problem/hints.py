"""Hints: placements that a user gives to some operators, by pattern of their names.

A hint speaks of one mesh axis, or says in how many parts dims are cut (`planner.search.problem.cuts`). Its pattern is
that of `fnmatch`; with a ``/`` it is matched with names of operators (``blocks.*.expand/addmm``), else with names of
parameters and inputs, and with the module of products, convolutions and attentions (``blocks.*.expand``). Layers of a
run are matched one by one, by the names they would have unfolded.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import prod
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from planner.exchange.mindspore.checks import strategy
from planner.exchange.mindspore.errors import ContextError
from planner.graph.operator_graph import Node, OperatorGraph, Role
from planner.plans import mindspore
from planner.search.problem.cuts import OperatorCuts, main_operator, operand_cuts
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Cost, Problem
from planner.search.problem.solution import block_index, template_name
from planner.sharding.placement import MeshAxis, Placement, parse_placement, placement_name
from planner.sharding.rules import Rule
from simulator.errors import InputError, UnsupportedError
from simulator.program import Phase

AXES = ("data", "context", "expert", "tensor")
ANYTHING = "*"

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
        said = ", ".join(f"{name} {_names(placed)}" for name, placed in sides if placed)
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
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"hints {str(path)!r} cannot be read: {' '.join(str(error).split())}") from error
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


def _names(placed: Placed) -> str:
    return ", ".join(ANYTHING if p is None else placement_name(p) for p in placed)


# Which operators a hint is for


@dataclass(frozen=True, slots=True)
class Target:
    """A hint (its number) for the node at `position` of a variable's nodes."""

    hint: int
    position: int


Targets = Mapping[int, Mapping[int, tuple[Target, ...]]]
"""For each hinted variable the targets in each layer; outside runs, and in a first block, the layer is 0."""


def targets(parts: Parts, hints: Sequence[Hint]) -> Targets:
    """Find the variables that hints are for.

    Raises
    ------
    InputError
        For a hint that matches nothing, or gives another number of placements than an operator has tensors.
    """
    found: dict[int, dict[int, tuple[Target, ...]]] = {}
    graph, decisions = parts.graph, parts.decisions
    names = list(_named(graph)) if hints else []
    for number, item in enumerate(hints):
        matched = False
        for index, layer, name in _matching(graph, item, names):
            matched = True
            if item.cuts is None:
                _check_count(item, graph.nodes[index], name)
            variable = decisions.of_node[index]
            position = decisions.variables[variable].nodes.index(index)
            layers = found.setdefault(variable, {})
            layers[layer] = (*layers.get(layer, ()), Target(number, position))
        if not matched:
            raise _no_match(item, [name for _, layer, name in names if layer <= 1])
    return found


def _matching(
    graph: OperatorGraph, item: Hint, names: Sequence[tuple[int, int, str]]
) -> Iterator[tuple[int, int, str]]:
    """Node, layer and name of all that a hint is for."""
    matching = re.compile(translate(item.pattern)).match
    if item.of_module:
        yield from _modules(graph, item, names)
        return
    for index, layer, name in names:
        if item.exact:
            if name == item.pattern:
                yield index, layer, name
            continue
        if not matching(name if "/" in item.pattern else name.partition("/")[0]):
            continue
        if "/" in item.pattern or "/" not in name or graph.nodes[index].flops:
            yield index, layer, name


def _modules(graph: OperatorGraph, item: Hint, names: Sequence[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """The one operator of each module that cuts are for.

    Raises
    ------
    ContextError
        A module has several operators, or one of the listed modules has none.
    """
    matching = re.compile(translate(item.pattern)).match
    members: dict[str, list[tuple[int, int, str]]] = {}
    for entry in names:
        module, slash, _ = entry[2].partition("/")
        if slash and (module in item.modules if item.modules else matching(module)):
            members.setdefault(module, []).append(entry)
    missing = next(iter(sorted(item.modules - members.keys())), None)
    if missing is not None:
        inside = sorted({name.partition("/")[0] for _, _, name in names if name.startswith(f"{missing}.")})
        inner = f"; shard the modules inside it: {', '.join(inside[:6])}" if inside else "; leave the strategy out"
        raise ContextError(f"shard of {missing!r} ({item.cuts}): no operator is its own{inner}")
    for module, entries in members.items():
        main = main_operator(graph, [index for index, _, _ in entries])
        if main is None:
            own = ", ".join(name for _, _, name in entries)
            raise ContextError(
                f"hint {item}: module {module!r} has several operators ({own}), and a strategy is for one; name one of "
                "them in a hints file, or shard the calls one by one"
            )
        yield next(entry for entry in entries if entry[0] == main)


def _named(graph: OperatorGraph) -> Iterator[tuple[int, int, str]]:
    """Node, layer and unfolded name of all that can be hinted."""
    runs = {i: run for run in graph.runs for i in run.second}
    for index, node in enumerate(graph.nodes):
        if node.role not in (Role.OPERATOR, Role.PARAMETER, Role.INPUT) or node.phase is not Phase.FORWARD:
            continue
        run = runs.get(index)
        if run is None:
            yield index, 0, node.name
            continue
        offset = block_index(graph.nodes[run.first[0]].name, run.prefix)
        before, after = template_name(node.name, run.prefix).split("*", 1)
        for layer in range(1, run.count):
            yield index, layer, f"{before}{offset + layer}{after}"


def _check_count(item: Hint, node: Node, name: str) -> None:
    for what, placed, count in (
        ("inputs", item.inputs, len(node.tensor_inputs)),
        ("outputs", item.outputs, len(node.outputs)),
    ):
        if placed and len(placed) != count:
            raise InputError(
                f"hint {item}: {len(placed)} {what}, but {name!r} ({node.op}) has {count}; give {count}, '*' for any"
            )


def _no_match(item: Hint, names: Sequence[str]) -> InputError:
    known = dict.fromkeys([*(name.partition("/")[0] for name in names), *names])
    near = difflib.get_close_matches(item.pattern, known, 3, 0.4)
    meant = f"; near are {', '.join(near)}" if near else ""
    return InputError(f"hint {item} matches no operator, parameter or input{meant}")


# What a hint leaves to choose


def mask_of(parts: Parts, variable: int, target: Target, item: Hint) -> NDArray[np.bool_]:
    """States of a variable that a hint allows, shape (states,); all where the mesh has no such axis.

    Raises
    ------
    InputError
        If it allows none.
    """
    if item.cuts is not None:
        return _cuts_mask(parts, variable, target, item)
    states = parts.states(variable)
    if item.axis not in parts.names:
        return np.ones(len(states), dtype=np.bool_)
    agrees = np.array([_agrees(item, c.rules[target.position]) for c in states.variable.choices])
    row = states.choice[parts.names.index(item.axis)]
    allowed: NDArray[np.bool_] = agrees[row]
    if not allowed.any():
        node = parts.graph.nodes[states.variable.nodes[target.position]]
        offered = dict.fromkeys(_described(states.variable.choices[c].rules[target.position]) for c in row)
        why = "what it asks for does not divide, or a pin forbids it" if agrees.any() else "no rule is like that"
        raise InputError(f"hint {item}: {node.name!r} cannot take it: {why}; it offers {'; '.join(offered)}")
    return allowed


def check_cuts(parts: Parts, hints: Sequence[Hint]) -> None:
    """Raise ContextError where an operator cannot be cut as a hint has it on the mesh of `parts`."""
    given = [hint for hint in hints if hint.cuts]
    for variable, layers in targets(parts, given).items():
        for target in {target for found in layers.values() for target in found}:
            mask_of(parts, variable, target, given[target.hint])


def _cuts_mask(parts: Parts, variable: int, target: Target, item: Hint) -> NDArray[np.bool_]:
    assert item.cuts is not None  # the caller has looked
    states, mesh = parts.states(variable), parts.setting.costs.mesh
    index = states.variable.nodes[target.position]
    node = parts.graph.nodes[index]
    wanted = operand_cuts(
        parts.graph, index, item.cuts, of_module=item.of_module, devices=mesh.size, what=f"strategy of {node.name!r}"
    )
    allowed = np.ones(len(states), dtype=np.bool_)
    sizes = np.array(mesh.sizes, dtype=np.int64)[:, None]
    for side, operands in (("inputs", wanted.inputs), ("outputs", wanted.outputs)):
        for place, cut in enumerate(operands):
            if cut is None:
                continue
            row = np.array([getattr(c.rules[target.position], side)[place] for c in states.variable.choices])
            placed = row[states.choice]
            for dim, number in enumerate(cut):
                allowed &= np.where(placed == dim, sizes, 1).prod(axis=0) == number
    if not allowed.any():
        offered = dict.fromkeys(_described(c.rules[target.position]) for c in states.variable.choices)
        shape = " × ".join(f"{axis.name} {axis.size}" for axis in mesh.axes) or "one device"
        raise ContextError(
            f"hint {item}: {node.name!r} cannot be cut so on {shape}; along one axis it offers {'; '.join(offered)}"
        )
    return allowed


def first_not_kept(
    graph: OperatorGraph, rules: Mapping[str, Sequence[Rule]], axes: Sequence[MeshAxis], hints: Sequence[Hint]
) -> tuple[Hint, str] | None:
    """The first hint that strategies of a plan, by unfolded name, do not keep, and the name of what it is for.

    Parameters
    ----------
    graph
        The plan's network at its micro-batch.
    axes
        Of the plan's mesh.
    """
    names = list(_named(graph))
    for item in hints:
        for index, _, name in _matching(graph, item, names):
            chosen = rules[name]
            if item.cuts is not None:
                kept = _cut_so(graph, index, item, chosen, tuple(axis.size for axis in axes))
            else:
                along = next((rule for rule, axis in zip(chosen, axes, strict=True) if axis.name == item.axis), None)
                kept = along is None or _agrees(item, along)
            if not kept:
                return item, name
    return None


def _cut_so(graph: OperatorGraph, index: int, item: Hint, chosen: Sequence[Rule], sizes: tuple[int, ...]) -> bool:
    """Whether the rules of an operator along all axes cut it as a hint has it."""
    assert item.cuts is not None  # the caller has looked
    what = repr(graph.nodes[index].name)
    wanted = operand_cuts(graph, index, item.cuts, of_module=item.of_module, devices=prod(sizes), what=what)
    for side, operands in (("inputs", wanted.inputs), ("outputs", wanted.outputs)):
        for place, parts in enumerate(operands):
            placed = [getattr(rule, side)[place] for rule in chosen]
            made = [
                prod(size for size, p in zip(sizes, placed, strict=True) if p == dim) for dim in range(len(parts or ()))
            ]
            if parts is not None and tuple(made) != parts:
                return False
    return True


def _agrees(item: Hint, rule: Rule) -> bool:
    return all(
        wanted is None or wanted == placed
        for hinted, rules in ((item.inputs, rule.inputs), (item.outputs, rule.outputs))
        for wanted, placed in zip(hinted, rules, strict=False)
    )


def _described(rule: Rule) -> str:
    return f"{_names(rule.inputs) or 'nothing'} → {_names(rule.outputs)}"


def constrained(problem: Problem, hints: Sequence[Hint]) -> Problem:
    """The problem with all states forbidden that some hint forbids: for an exact search under pins of operators.

    Raises
    ------
    InputError, UnsupportedError
        As `allowed_states`.
    """
    unary = list(problem.unary)
    for variable, allowed in allowed_states(problem.parts, hints).items():
        unary[variable] = Cost(np.where(allowed, unary[variable].time, np.inf), unary[variable].memory)
    result = copy.copy(problem)
    result.unary = tuple(unary)
    return result


def allowed_states(parts: Parts, hints: Sequence[Hint]) -> dict[int, NDArray[np.bool_]]:
    """States that all hints together allow of each variable that they are for, shape (states,).

    Raises
    ------
    InputError
        If hints contradict each other at one operator.
    UnsupportedError
        If they tell layers of a run apart, other than the first from the rest.
    """
    found = {}
    for variable, layers in targets(parts, hints).items():
        _check_layers(parts, variable, layers, hints)
        allowed = np.ones(len(parts.states(variable)), dtype=np.bool_)
        for target in next(iter(layers.values())):
            allowed &= mask_of(parts, variable, target, hints[target.hint])
            if not allowed.any():
                asked = " and ".join(str(hints[t.hint]) for t in next(iter(layers.values())))
                name = parts.graph.nodes[parts.decisions.variables[variable].nodes[0]].name
                raise InputError(f"hints {asked} contradict each other at {name!r}; leave one of them out")
        found[variable] = allowed
    return found


def told_apart(graph: OperatorGraph, hints: Sequence[Hint]) -> tuple[int, ...]:
    """Numbers of the runs of a folded graph some of whose layers, the first left aside, have hints that others lack.

    Raises
    ------
    ContextError
        As `targets`.
    """
    names, found = list(_named(graph)) if hints else [], set[int]()
    for item in hints:
        layers: dict[int, set[int]] = {}
        for index, layer, _ in _matching(graph, item, names):
            if layer:
                layers.setdefault(index, set()).add(layer)
        for number, run in enumerate(graph.runs):
            if any(len(layers.get(index, ())) not in (0, run.count - 1) for index in run.second):
                found.add(number)
    return tuple(sorted(found))


def _check_layers(parts: Parts, variable: int, layers: Mapping[int, tuple[Target, ...]], hints: Sequence[Hint]) -> None:
    """Refuse hints that only some of the layers of a second block have."""
    nodes = parts.decisions.variables[variable].nodes
    run = next((run for run in parts.graph.runs if nodes and nodes[0] in run.second), None)
    said = {frozenset((hints[t.hint].content, t.position) for t in found) for found in layers.values()}
    if run is None or (len(layers) == run.count - 1 and len(said) == 1):
        return
    given = [{target.hint for target in targets} for targets in layers.values()]
    number = next(h for h in sorted(set().union(*given)) if sum(h in said for said in given) < run.count - 1)
    times = sum(number in said for said in given)
    raise UnsupportedError(
        f"hint {hints[number]} is for {times} of the layers of {run.prefix!r}: the exact search has hints "
        f"for the first layer and for all {run.count - 1} others; use --search-mode "
        f"sharding_propagation in plans of one stage, or a pattern such as {run.prefix}.*"
    )
