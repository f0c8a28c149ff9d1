"""What recomputation and gathering by units make of a graph: which unit a node is in, what runs again."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from planner.graph.chain import Chain, chain
from planner.graph.operator_graph import OperatorGraph, Role
from planner.graph.recompute import recomputed
from simulator.program import Kernel, Phase

NOWHERE = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The units of a graph as lowering sees them.

    ``of_node`` is the unit of each forward and backward operator, `NOWHERE` for what no unit owns. ``again`` are the
    forward operators that run again before the backward operators of each unit, ``mode`` its recomputation.
    """

    names: tuple[str, ...]
    of_node: tuple[int, ...]
    again: tuple[tuple[int, ...], ...]
    mode: tuple[str, ...]


def no_units(graph: OperatorGraph) -> Units:
    """The whole graph as one unit that keeps everything."""
    return Units(names=("",), of_node=(0,) * len(graph.nodes), again=((),), mode=("none",))


def units_of(
    graph: OperatorGraph,
    modes: Mapping[str, str],
    sharded: frozenset[int],
    offloaded: Container[str] = (),
    found: Chain | None = None,
) -> Units:
    """Units of an unfolded graph.

    Parameters
    ----------
    modes : mapping of str to str
        Recompute mode of the units that compute again, by name.
    sharded : frozenset of int
        Parameters that are gathered unit by unit: what is made of them alone is made again as well.
    offloaded : container of str
        Units that have activations on the host: views of these are taken again.
    """
    found = chain(graph) if found is None else found
    of_node = [NOWHERE] * len(graph.nodes)
    again, mode = [], []
    for number, unit in enumerate(found.units):
        owned = [i for i in unit.nodes if graph.nodes[i].role in (Role.OPERATOR, Role.GRADIENT_SUM)]
        for index in owned:
            of_node[index] = number if of_node[index] == NOWHERE else of_node[index]
        mode.append(modes.get(unit.name, "none"))
        rerun = {*recomputed(graph, unit.nodes, mode[-1]), *_made_of(graph, unit.nodes, sharded)}
        if unit.name in offloaded:
            rerun |= _views_read_back(graph, unit.nodes, rerun)
        again.append(tuple(sorted(rerun)))
    return Units(
        names=tuple(unit.name for unit in found.units), of_node=tuple(of_node), again=tuple(again), mode=tuple(mode)
    )


def _made_of(graph: OperatorGraph, nodes: tuple[int, ...], sharded: frozenset[int]) -> set[int]:
    """Forward operators made of gathered parameters alone that backward operators read."""
    if not sharded:
        return set()
    made = set(sharded)
    inside = sorted(nodes)
    for index in inside:
        node = graph.nodes[index]
        inputs = node.tensor_inputs if node.phase is Phase.FORWARD and node.role is Role.OPERATOR else ()
        if inputs and all(ref.node in made for ref in inputs):
            made.add(index)
    backward = (i for i in inside if graph.nodes[i].phase is Phase.BACKWARD)
    wanted = {ref.node for i in backward for ref in graph.nodes[i].tensor_inputs}
    found: set[int] = set()
    for index in reversed(inside):
        if index in made and index in wanted and index not in sharded:
            found.add(index)
            wanted.update(ref.node for ref in graph.nodes[index].tensor_inputs)
    return found


def _views_read_back(graph: OperatorGraph, nodes: tuple[int, ...], rerun: set[int]) -> set[int]:
    """Views of the forward pass of a unit that its backward operators, or those that run again, read."""
    inside = sorted(nodes)
    users = [i for i in inside if graph.nodes[i].phase is Phase.BACKWARD or i in rerun]
    wanted = {ref.node for i in users for ref in graph.nodes[i].tensor_inputs}
    found: set[int] = set()
    for index in reversed(inside):
        node = graph.nodes[index]
        view = node.role is Role.OPERATOR and node.kernel is Kernel.VIEW and bool(node.tensor_inputs)
        if view and node.phase is Phase.FORWARD and index in wanted:
            found.add(index)
            wanted.update(ref.node for ref in node.tensor_inputs)
    return found
