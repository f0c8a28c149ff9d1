"""Tables of embeddings that may live in the memory of the host, and the operators that work on them there."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph, Role, TensorRef
from simulator.errors import InputError

LOOKUP = "aten.embedding.default"
LOOKUP_BACKWARD = "aten.embedding_dense_backward.default"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTables:
    """What lives and runs on the host, by node.

    Attributes
    ----------
    parameters : the tables
    shared : those that operators on the device read as well, which get a copy for each pass of their unit
    lookups : operators that read rows of a table; what they return goes to the device
    gradients : operators that make, or sum, gradients of a table; what they return stays on the host
    """

    parameters: frozenset[int] = frozenset()
    shared: frozenset[int] = frozenset()
    lookups: frozenset[int] = frozenset()
    gradients: frozenset[int] = frozenset()

    def holds(self, ref: TensorRef) -> bool:
        """Whether a tensor is in the memory of the host."""
        return ref.node in self.parameters or ref.node in self.gradients

    def runs(self, node: int) -> bool:
        """Whether the host runs an operator."""
        return node in self.lookups or node in self.gradients


NO_TABLES = HostTables()


def host_tables(graph: OperatorGraph) -> HostTables:
    """Tables of a graph, folded or not, with what the host does on them.

    Raises
    ------
    InputError
        The network looks nothing up in a trained table.
    """
    parameters: set[int] = set()
    shared: set[int] = set()
    lookups: set[int] = set()
    gradients: set[int] = set()
    for parameter in graph.parameters:
        users = graph.consumers.get(TensorRef(parameter.node), ())
        reading = {user for user in users if graph.nodes[user].op == LOOKUP}
        if not reading or parameter.gradient is None:
            continue
        if len(reading) < len(users):
            shared.add(parameter.node)
        parameters.add(parameter.node)
        lookups |= reading
        gradients |= _gradients(graph, parameter.gradient)
    if not parameters:
        raise InputError(
            f"host_embeddings: {graph.network} looks nothing up in a trained table; leave host_embeddings out"
        )
    return HostTables(
        parameters=frozenset(parameters),
        shared=frozenset(shared),
        lookups=frozenset(lookups),
        gradients=frozenset(gradients),
    )


def _gradients(graph: OperatorGraph, gradient: TensorRef) -> set[int]:
    """Operators on the host behind the gradient of a table: gradients of look-ups, and sums with what others made."""
    found: set[int] = set()
    waiting = [gradient.node]
    while waiting:
        index = waiting.pop()
        node = graph.nodes[index]
        if node.role is Role.GRADIENT_SUM:
            found.add(index)
            waiting += [ref.node for ref in node.tensor_inputs]
        elif node.op == LOOKUP_BACKWARD:
            found.add(index)
    return found
