"""Data parallelism for all operators but the configured ones: what MindSpore calls semi-automatic parallelism."""

from __future__ import annotations

import copy
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from planner.search.problem.parts import Parts
from planner.search.problem.problem import Cost, Problem
from planner.search.problem.states import States
from planner.search.problem.variables import Kind
from planner.sharding.placement import PARTIAL
from simulator.program import Phase

FREE_AXES = frozenset({"tensor"})
"""Axes along which the batch may lie here, though other searches keep it off them."""


def rest_by_data(problem: Problem, configured: Collection[int]) -> Problem:
    """The problem in which every operator that is not configured shards the batch (`states_by_data`)."""
    unary = list(problem.unary)
    for number, allowed in states_by_data(problem.parts, configured).items():
        unary[number] = Cost(np.where(allowed, unary[number].time, np.inf), unary[number].memory)
    result = copy.copy(problem)
    result.unary = tuple(unary)
    return result


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
