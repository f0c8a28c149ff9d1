"""Runs whose two captured blocks offer different choices.

A block next to something else (a loss that takes no partial sums) may have fewer choices than blocks next to each
other. Such a block is taken out of its run, so that all blocks of the run are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.graph.folding import block_index, template_name, without_ends
from planner.graph.operator_graph import OperatorGraph, Run
from planner.graph.unfolding import run_start, unfold_run
from planner.plans.plan import LayerRules, NodeRules
from planner.search.problem.variables import Decisions, Variable, decisions

ENDS = ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0))
"""Blocks taken out at the front and at the back, in the order of trying."""


def aligned(graph: OperatorGraph) -> tuple[OperatorGraph, Decisions]:
    """Shorten every run until its blocks offer the same choices, unfold it where none do; the graph, its decisions."""
    made, number = decisions(graph), 0
    while number < len(graph.runs):
        if _alike(made, graph.runs[number]):
            number += 1
            continue
        graph, made = _shortened(graph, number)
    return graph, made


def _shortened(graph: OperatorGraph, number: int) -> tuple[OperatorGraph, Decisions]:
    for front, back in ENDS:
        shorter = without_ends(graph, number, front, back)
        if shorter is not None:
            made = decisions(shorter)
            # A shorter run stands last in the graph; one written out is none.
            if len(shorter.runs) < len(graph.runs) or _alike(made, shorter.runs[-1]):
                return shorter, made
    whole = unfold_run(graph, number)
    return whole, decisions(whole)


def apart(graph: OperatorGraph, numbers: Sequence[int]) -> OperatorGraph:
    """The graph with some of its runs written out."""
    for number in sorted(numbers, reverse=True):
        graph = unfold_run(graph, number)
    return graph


def in_runs(
    graph: OperatorGraph, rules: Mapping[str, NodeRules], layers: Sequence[LayerRules]
) -> tuple[dict[str, NodeRules], tuple[LayerRules, ...]]:
    """Name rules of a shortened graph by the runs of `graph`, which it was: a block taken out is a range of its own."""
    outside, parts = dict(rules), list(layers)
    for run in graph.runs:
        head, start = f"{run.prefix}.", run_start(graph, run)
        alone: dict[int, dict[str, NodeRules]] = {}
        for name, chosen in rules.items():
            if name.startswith(head) and name[len(head)].isdigit():
                index = block_index(name, run.prefix)
                if start <= index < start + run.count:
                    alone.setdefault(index, {})[template_name(name, run.prefix)] = chosen
                    del outside[name]
        parts += [LayerRules(prefix=run.prefix, first=i, last=i, rules=own) for i, own in alone.items()]
    order = {run.prefix: n for n, run in enumerate(graph.runs)}
    return outside, _joined(sorted(parts, key=lambda part: (order[part.prefix], part.first)))


def _joined(parts: Sequence[LayerRules]) -> tuple[LayerRules, ...]:
    """Neighbouring ranges of equal rules as one."""
    joined: list[LayerRules] = []
    for part in parts:
        if joined and (joined[-1].prefix, joined[-1].rules) == (part.prefix, part.rules):
            part = replace(joined.pop(), last=part.last)
        joined.append(part)
    return tuple(joined)


def _alike(made: Decisions, run: Run) -> bool:
    """Whether each variable of the second block has the choices of the one where it stands in the first."""
    position = dict(zip(run.second, run.first, strict=True))
    stations = {(v.tensor.node, v.tensor.output): v for v in made.variables if v.tensor is not None}
    for variable in made.variables:
        if variable.tensor is not None and variable.tensor.node in position:
            twin = stations.get((position[variable.tensor.node], variable.tensor.output))
        elif variable.tensor is None and variable.nodes[0] in position:
            twin = made.variables[made.of_node[position[variable.nodes[0]]]]
        else:
            continue
        if twin is None or _offers(variable) != _offers(twin):
            return False
    return True


def _offers(variable: Variable) -> list[tuple[object, ...]]:
    if variable.tensor is None:
        return [choice.rules for choice in variable.choices]
    return [(choice.reads[variable.tensor], *choice.writes.values()) for choice in variable.choices]
