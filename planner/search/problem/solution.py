"""What a search returns: a state for every variable, and the strategies that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from planner.graph.folding import block_index, template_name
from planner.graph.operator_graph import Run
from planner.plans.plan import LayerRules, NodeRules
from planner.search.problem.problem import Problem, choices_of

Assignment = Mapping[int, int]
"""State of each variable, by number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """States that minimise the objective under the memory limit.

    ``assignment`` holds every variable once; ``layers[r][i]`` are the states of run r's second block
    in layer i + 1, for the variables that belong to it. ``states`` counts those of all variables, ``states_left``
    those after reductions; ``width`` neighbours and ``largest_table`` entries are the most of one elimination step.
    """

    assignment: Assignment
    layers: tuple[tuple[Assignment, ...], ...]
    objective_s: float
    memory_bytes: float
    lower_bound_s: float
    width: int
    states: int = 0
    states_left: int = 0
    largest_table: int = 0

    @property
    def gap(self) -> float:
        """Relative distance to the bound."""
        return 0.0 if self.objective_s <= 0 else max(0.0, 1.0 - self.lower_bound_s / self.objective_s)


def parts_of(problem: Problem, solution: Solution) -> dict[str, float]:
    """Seconds of the objective by what devices do, named as parts of a simulated step; nothing in it overlaps."""
    inner = {variable for layers in solution.layers for states in layers for variable in states}
    once = {variable: state for variable, state in solution.assignment.items() if variable not in inner}
    compute, update = problem.parts_s([once, *(states for layers in solution.layers for states in layers)])
    return {
        "compute_s": compute,
        "exposed_communication_s": solution.objective_s - compute - update,
        "bubble_s": 0.0,
        "optimizer_s": update,
    }


def node_rules(problem: Problem, solution: Solution) -> tuple[dict[str, NodeRules], tuple[LayerRules, ...]]:
    """Strategies by node name: those outside runs of equal blocks, and those of each range of layers."""
    graph = problem.graph
    inside = {i for run in graph.runs for i in (*run.first, *run.second)}
    outside = [i for i in range(len(graph.nodes)) if i not in inside]
    layers: list[LayerRules] = []
    for run, states in zip(graph.runs, solution.layers, strict=True):
        offset = block_index(graph.nodes[run.first[0]].name, run.prefix)
        rules = [_rules(problem, run.first, solution.assignment, run)]
        for place, state in enumerate(states):
            alike = place > 0 and state == states[place - 1]
            rules.append(rules[-1] if alike else _rules(problem, run.second, state, run))
        for same, members in groupby(enumerate(rules), key=lambda item: item[1]):
            numbers = [i for i, _ in members]
            layers.append(
                LayerRules(prefix=run.prefix, first=offset + numbers[0], last=offset + numbers[-1], rules=same)
            )
    return _rules(problem, outside, solution.assignment), tuple(layers)


def _rules(
    problem: Problem, nodes: list[int] | tuple[int, ...], assignment: Assignment, run: Run | None = None
) -> dict[str, NodeRules]:
    found = {}
    for index in nodes:
        variable = problem.decisions.of_node[index]
        if variable < 0:
            continue
        position = problem.decisions.variables[variable].nodes.index(index)
        chosen = choices_of(problem, variable, assignment[variable])
        name = problem.graph.nodes[index].name
        found[template_name(name, run.prefix) if run else name] = tuple(c.rules[position] for c in chosen)
    return found
