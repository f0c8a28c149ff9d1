"""Hints: placements that a user gives to some operators, by pattern of their names.

A hint speaks of one mesh axis, or says in how many parts dims are cut (`planner.sharding.cuts`). Its pattern is
that of `fnmatch`; with a ``/`` it is matched with names of operators (``blocks.*.expand/addmm``), else with names of
parameters and inputs, and with the module of products, convolutions and attentions (``blocks.*.expand``). Layers of a
run are matched one by one, by the names they would have unfolded.
"""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from math import prod

import numpy as np
from numpy.typing import NDArray

from planner.graph.folding import block_index, template_name
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.plans.hints import Hint, placement_names
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Cost, Problem
from planner.search.problem.states import States
from planner.search.problem.variables import Kind
from planner.sharding.cuts import main_operator, operand_cuts
from planner.sharding.placement import PARTIAL, MeshAxis
from planner.sharding.rules import Rule
from simulator.errors import ContextError, InputError, UnsupportedError
from simulator.program import Phase

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
    states, mesh = parts.states(variable), parts.setting.costs.mesh
    index = states.variable.nodes[target.position]
    rules = [choice.rules[target.position] for choice in states.variable.choices]
    kept = _cuts_kept(parts.graph, index, item, mesh.sizes, f"strategy of {parts.graph.nodes[index].name!r}")
    allowed = np.array([kept([rules[c] for c in chosen]) for chosen in states.choice.T.tolist()])
    if not allowed.any():
        offered = "; ".join(dict.fromkeys(map(_described, rules)))
        shape = " × ".join(f"{axis.name} {axis.size}" for axis in mesh.axes) or "one device"
        raise ContextError(
            f"hint {item}: {parts.graph.nodes[index].name!r} cannot be cut so on {shape}; along one axis it offers "
            f"{offered}"
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
                sizes = tuple(axis.size for axis in axes)
                kept = _cuts_kept(graph, index, item, sizes, repr(graph.nodes[index].name))(chosen)
            else:
                along = next((rule for rule, axis in zip(chosen, axes, strict=True) if axis.name == item.axis), None)
                kept = along is None or _agrees(item, along)
            if not kept:
                return item, name
    return None


def _cuts_kept(
    graph: OperatorGraph, index: int, item: Hint, sizes: tuple[int, ...], what: str
) -> Callable[[Sequence[Rule]], bool]:
    """Whether the rules of an operator along axes of those sizes cut it as a hint has it."""
    assert item.cuts is not None  # the caller has looked
    wanted = operand_cuts(graph, index, item.cuts, of_module=item.of_module, devices=prod(sizes), what=what)
    sides = (("inputs", wanted.inputs), ("outputs", wanted.outputs))

    def kept(chosen: Sequence[Rule]) -> bool:
        return all(
            prod(size for size, rule in zip(sizes, chosen, strict=True) if getattr(rule, side)[place] == dim) == number
            for side, operands in sides
            for place, parts in enumerate(operands)
            for dim, number in enumerate(parts or ())
        )

    return kept


def _agrees(item: Hint, rule: Rule) -> bool:
    return all(
        wanted is None or wanted == placed
        for hinted, rules in ((item.inputs, rule.inputs), (item.outputs, rule.outputs))
        for wanted, placed in zip(hinted, rules, strict=False)
    )


def _described(rule: Rule) -> str:
    return f"{placement_names(rule.inputs) or 'nothing'} → {placement_names(rule.outputs)}"


def constrained(problem: Problem, hints: Sequence[Hint]) -> Problem:
    """The problem with all states forbidden that some hint forbids: for an exact search under pins of operators.

    Raises
    ------
    InputError, UnsupportedError
        As `allowed_states`.
    """
    return _with_states(problem, allowed_states(problem.parts, hints))


def _with_states(problem: Problem, states: Mapping[int, NDArray[np.bool_]]) -> Problem:
    """The problem in which the variables that are given take allowed states only."""
    unary = list(problem.unary)
    for variable, allowed in states.items():
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


FREE_AXES = frozenset({"tensor"})
"""Axes along which the batch may lie here, though other searches keep it off them."""


def rest_by_data(problem: Problem, configured: Collection[int]) -> Problem:
    """The problem in which every operator that is not configured shards the batch (`states_by_data`)."""
    return _with_states(problem, states_by_data(problem.parts, configured))


def states_by_data(parts: Parts, configured: Collection[int]) -> dict[int, NDArray[np.bool_]]:
    """States in which what is not configured shards the batch, over all ranks where it divides, shape (states,).

    What reads no batch, and parameters that configured operators read, are left to the search; other parameters are
    whole on the tensor axis.

    Parameters
    ----------
    configured
        Variables that hints speak of.
    """
    free = {*configured, *_made_for(parts, configured)}
    rest = (number for number in range(len(parts.decisions.variables)) if number not in free)
    return {number: _allowed(parts, parts.states(number)) for number in rest}


def _made_for(parts: Parts, configured: Collection[int]) -> set[int]:
    """Variables of parameters, and of what is made of parameters alone, that configured operators read."""
    graph, of_node = parts.graph, parts.decisions.of_node
    wanted = [i for v in configured for i in parts.decisions.variables[v].nodes if _forward(graph, i)]
    found: set[int] = set()
    while wanted:
        for ref in graph.nodes[wanted.pop()].tensor_inputs:
            if of_node[ref.node] >= 0 and of_node[ref.node] not in found and not any(graph.spec(ref).batch_dims):
                found.add(of_node[ref.node])
                wanted.append(ref.node)
    return found


def _forward(graph: OperatorGraph, index: int) -> bool:
    return graph.nodes[index].phase is Phase.FORWARD


def _allowed(parts: Parts, states: States) -> NDArray[np.bool_]:
    """States with the batch over as many ranks as it divides by, and nothing else sharded; all for stations."""
    variable, graph, names = states.variable, parts.graph, parts.names
    everything = np.ones(len(states), dtype=np.bool_)
    if variable.kind in (Kind.STATION, Kind.INPUT):
        return everything
    if variable.kind is Kind.PARAMETER:
        placed = states.placements(TensorRef(variable.nodes[0]), reads=False)
        whole = everything.copy()
        for axis, name in enumerate(names):
            whole &= (placed[axis] < 0) | (name == "data")
        return whole if whole.any() else everything
    sizes = np.array(parts.sizes, dtype=np.int64)
    allowed, ways = everything.copy(), np.zeros((len(sizes), len(states)), dtype=np.bool_)
    batched = False
    for position, index in enumerate(variable.nodes):
        node = graph.nodes[index]
        if node.role is not Role.OPERATOR or node.phase is not Phase.FORWARD:
            continue
        specs = [*(graph.spec(ref) for ref in node.tensor_inputs), *node.outputs]
        rules = [(*c.rules[position].inputs, *c.rules[position].outputs) for c in variable.choices]
        for place, spec in enumerate(specs):
            row = np.array([rule[place] for rule in rules], dtype=np.int64)[states.choice]
            batch = [dim for dim, grows in enumerate(spec.batch_dims) if grows]
            is_input = place < len(node.tensor_inputs)
            allowed &= (np.isin(row, batch) | (row < 0)).all(axis=0)
            allowed &= ~((row == PARTIAL).any(axis=0) & is_input & bool(batch))
            if batch:
                batched = True
                ways |= np.isin(row, batch)
    if not batched:
        return everything
    if not allowed.any():
        return everything
    over = np.where(ways, sizes[:, None], 1).prod(axis=0)
    widest: NDArray[np.bool_] = allowed & (over == over[allowed].max())
    return widest
