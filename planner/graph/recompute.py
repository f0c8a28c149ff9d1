"""Which forward operators of a unit run again in the backward pass, and so need not keep their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar
from weakref import finalize

from planner.graph.layer_parts import in_parts
from planner.graph.operator_graph import Node, OperatorGraph, Role
from simulator.errors import InputError
from simulator.program import CONVOLUTIONS, Kernel, Phase

Key = TypeVar("Key")
Made = TypeVar("Made")


class KeptByGraph(Generic[Key, Made]):
    """What was made of each graph, by keys; graphs are told apart by identity, being too large to compare."""

    def __init__(self) -> None:
        self._made: dict[int, dict[Key, Made]] = {}

    def of(self, graph: OperatorGraph) -> dict[Key, Made]:
        """What was made of one graph so far, to be read and added to."""
        key = id(graph)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = {}
            finalize(graph, self._made.pop, key, None)
        return made

    def once(self, graph: OperatorGraph, key: Key, make: Callable[[], Made]) -> Made:
        """What was made of one graph by this key, made now if it was not yet."""
        made = self.of(graph)
        if key not in made:
            made[key] = make()
        return made[key]


_PARTS: KeptByGraph[tuple[str, ...], frozenset[int]] = KeptByGraph()

MODES = ("none", "selective", "full")
"""From keeping everything to keeping only the input of each unit."""

DEAR = CONVOLUTIONS | {Kernel.MATMUL, Kernel.ATTENTION, Kernel.EMBEDDING}
"""Operators whose results selective recomputation keeps, attention written out in products excepted."""


def recomputed(graph: OperatorGraph, nodes: Iterable[int], mode: str) -> tuple[int, ...]:
    """Forward operators of a unit that run again before its backward operators, in order.

    They are what the unit's backward operators read, and what that is made of, back to what the mode keeps: in both
    modes everything from outside the unit (its input, parameters, batch, constants); in ``"selective"`` also the
    results of dear operators: products with parameters, convolutions, lookups and fused attention. Products of two
    activations (scores of attention and what they weigh) run again, as in Korthikanti et al., arXiv:2205.05198. Where
    the graph names parts of layers (``selective``) these run again, whatever they cost, and nothing else.

    Parameters
    ----------
    graph : OperatorGraph
        Folded or not.
    nodes : iterable of int
        The unit's nodes, forward and backward.
    mode : str
        One of `MODES`.

    Raises
    ------
    InputError
        The mode is not one of `MODES`.
    """
    if mode not in MODES:
        raise InputError(f"recompute mode {mode!r} is not one of {', '.join(MODES)}; choose one of them")
    if mode == "none":
        return ()
    inside = sorted(set(nodes))
    again = _trained_forward(graph, inside)
    if mode == "selective" and graph.selective:
        again &= _PARTS.once(graph, graph.selective, lambda: in_parts(graph, graph.selective))
    elif mode == "selective":
        made_of_parameters = _made_of_parameters(graph, inside)
        again = {i for i in again if not _is_dear(graph.nodes[i], made_of_parameters)}
    backward = (i for i in inside if graph.nodes[i].phase is Phase.BACKWARD)
    wanted = {ref.node for i in backward for ref in graph.nodes[i].tensor_inputs}
    found: set[int] = set()
    for index in reversed(inside):
        if index in again and index in wanted:
            found.add(index)
            wanted.update(ref.node for ref in graph.nodes[index].tensor_inputs)
    return tuple(sorted(found))


def _trained_forward(graph: OperatorGraph, inside: list[int]) -> set[int]:
    """Forward operators that depend on parameters or on the unit's input: what is made of the batch alone is kept."""
    members, depends, found = set(inside), set[int](), set[int]()
    for index in inside:
        node = graph.nodes[index]
        if node.role is Role.PARAMETER:
            depends.add(index)
        elif (
            node.role is Role.OPERATOR
            and node.phase is Phase.FORWARD
            and any(ref.node in depends or ref.node not in members for ref in node.tensor_inputs)
        ):
            depends.add(index)
            found.add(index)
    return found


def _made_of_parameters(graph: OperatorGraph, inside: Iterable[int]) -> set[int]:
    """Parameters, and what views and copies make of them."""
    found = {p.node for p in graph.parameters}
    for index in inside:
        inputs = graph.nodes[index].tensor_inputs
        if inputs and all(ref.node in found for ref in inputs):
            found.add(index)
    return found


def _is_dear(node: Node, made_of_parameters: set[int]) -> bool:
    if node.kernel is Kernel.MATMUL:
        return any(ref.node in made_of_parameters for ref in node.tensor_inputs)
    return node.kernel in DEAR
