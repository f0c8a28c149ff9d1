"""Bytes that stand only while a unit goes backward: gradients on their way, from operator to operator."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import Role, TensorRef
from planner.graph.recompute import MODES
from planner.search.problem.parts import Parts
from planner.search.units.unit_model import UnitModel
from simulator.program import Kernel, Phase

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def gradients_in_flight(model: UnitModel, parts: Parts, states: Mapping[int, IntArray], mode: IntArray) -> FloatArray:
    """Most bytes of gradients of activations that stand at once, less what was kept and is released by then.

    A gradient stands from the operator that writes it to the last one that reads it, or a view of it; what another unit
    reads stands to the end, and what the unit behind sends back from the start. Gradients of parameters are counted
    where they are stored, and copies in other placements only while an operator reads them.

    Parameters
    ----------
    states : mapping of int to array, shape (n,)
        State of each variable of the unit in every assignment.
    mode : array, shape (n,)
        Codes of their recompute modes: what only operators that run again read is released before any gradient.

    Returns
    -------
    array, shape (n,)
    """
    graph = model.graph
    count = len(next(iter(states.values()), np.zeros(1, dtype=np.int64)))
    owner = _views(model)
    order = [i for i in sorted(model.nodes) if _goes_back(model, i)]
    final = _of_parameters(model)
    last: dict[TensorRef, int] = {}
    for place, index in enumerate(order):
        node = graph.nodes[index]
        for ref in node.tensor_inputs:
            last[_base(owner, ref)] = place
        for output in range(len(node.outputs)):
            ref = TensorRef(index, output)
            outside = any(user not in model.nodes for user in graph.consumers.get(ref, ()))
            last[_base(owner, ref)] = len(order) if outside and ref not in final else place
    change = np.zeros((len(order) + 2, count))
    brief = np.zeros((len(order) + 1, count))
    made = set(order)
    arrived = {r for i in order for r in graph.nodes[i].tensor_inputs if _arrives(model, r)} - final
    for ref in arrived:
        change[0] += _bytes(parts, states, ref, model.exit, count)
        change[last[ref] + 1] -= _bytes(parts, states, ref, model.exit, count)
    for place, index in enumerate(order):
        node, variable = graph.nodes[index], model.decisions.of_node[index]
        for output in range(len(node.outputs)):
            ref = TensorRef(index, output)
            if ref in final or ref in owner:
                continue
            size = _bytes(parts, states, ref, variable, count)
            change[place] += size
            change[last[ref] + 1] -= size
        for ref in dict.fromkeys(node.tensor_inputs):
            if ref.node in made and ref not in owner:
                brief[place] += _moved(parts, states, ref, model.decisions.of_node[ref.node], variable, count)
    for ref in {_base(owner, saved) for saved in model.saved}:
        if ref in last and (ref == model.entry_tensor or ref.node in model.nodes):
            writer = model.entry if ref == model.entry_tensor else model.decisions.of_node[ref.node]
            change[last[ref] + 1] -= _bytes(parts, states, ref, writer, count)
    for code in (1, 2):
        for ref in {_base(owner, kept) for kept in model.kept(MODES[code])} - last.keys():
            size = _bytes(parts, states, ref, model.decisions.of_node[ref.node], count)
            change[0] -= np.where(mode == code, size, 0.0)
    level: FloatArray = np.cumsum(change, axis=0)[: len(order) + 1] + brief
    peak: FloatArray = np.maximum(level.max(axis=0), 0.0)
    return peak


def _of_parameters(model: UnitModel) -> set[TensorRef]:
    """Gradients of parameters, and the terms of those with several uses."""
    graph = model.graph
    found: set[TensorRef] = set()
    waiting = [parameter.gradient for parameter in graph.parameters if parameter.gradient is not None]
    while waiting:
        ref = waiting.pop()
        found.add(ref)
        if graph.nodes[ref.node].role is Role.GRADIENT_SUM:
            waiting += graph.nodes[ref.node].tensor_inputs
    return found


def _views(model: UnitModel) -> dict[TensorRef, TensorRef]:
    """What each view of the unit, forward and backward, is a view of."""
    nodes = ((i, model.graph.nodes[i]) for i in sorted(model.nodes))
    return {
        TensorRef(index, output): node.tensor_inputs[0]
        for index, node in nodes
        if node.role is Role.OPERATOR and node.kernel is Kernel.VIEW and node.tensor_inputs
        for output in range(len(node.outputs))
    }


def _goes_back(model: UnitModel, index: int) -> bool:
    node = model.graph.nodes[index]
    return node.phase is Phase.BACKWARD and node.role in (Role.OPERATOR, Role.GRADIENT_SUM)


def _arrives(model: UnitModel, ref: TensorRef) -> bool:
    node = model.graph.nodes[ref.node]
    return node.phase is Phase.BACKWARD and node.role is not Role.CONSTANT and ref.node not in model.nodes


def _base(owner: Mapping[TensorRef, TensorRef], ref: TensorRef) -> TensorRef:
    while ref in owner:
        ref = owner[ref]
    return ref


def _bytes(
    parts: Parts, states: Mapping[int, IntArray], ref: TensorRef, variable: int | None, count: int
) -> FloatArray:
    """Bytes (n,) of a tensor as a variable writes it; whole where no variable of the unit decides."""
    if variable in states and variable is not None and ref in parts.states(variable).variable.choices[0].writes:
        return np.asarray(parts.written_bytes(ref, variable)[states[variable]], dtype=np.float64)
    return np.full(count, float(parts.graph.spec(ref).size_bytes))


def _moved(
    parts: Parts, states: Mapping[int, IntArray], ref: TensorRef, writer: int, reader: int, count: int
) -> FloatArray:
    """Bytes (n,) of a copy that an operator reads in another placement than it was written in."""
    if writer == reader or writer not in states or reader not in states:
        return np.zeros(count)
    there = parts.states(reader)
    if ref not in there.variable.choices[0].reads or ref not in parts.states(writer).variable.choices[0].writes:
        return np.zeros(count)
    rank = len(parts.graph.spec(ref).shape)
    here = parts.states(writer).numbers(ref, rank, reads=False)[states[writer]]
    differs = here != there.numbers(ref, rank, reads=True)[states[reader]]
    return np.asarray(np.where(differs, parts.read_bytes(ref, reader)[states[reader]], 0.0), dtype=np.float64)
