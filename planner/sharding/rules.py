"""Which placements an operator may take along one mesh axis.

Rules of several axes compose: each axis splits what the axes outside it have left. A rule is exact in
real arithmetic when run by `planner.sharding.local_operator`; partial values are only passed through
operators that are linear and cheap, never through a matrix product or an attention.
"""

from __future__ import annotations

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.graph.recompute import KeptByGraph
from planner.sharding.placement import REPLICATE
from planner.sharding.rule_notation import InnerMessage, Rule, call_of, replicated, rules_of
from planner.sharding.rule_table import TABLE

__all__ = ["InnerMessage", "Rule", "has_rule", "rules_for"]


def rules_for(graph: OperatorGraph, node: Node) -> tuple[Rule, ...]:
    """List the rules of `node`, the fully replicated one first.

    Whether a sharded dim divides by the size of the axis is for the caller to check. Parameters may be
    stored sharded on any dim and inputs on the batch dim; constants are replicated, as is an operator
    without rules of its own (see `has_rule`). Those of a graph's nodes are found once and kept as long as the graph is.
    """
    made = _MADE.of(graph)
    found = made.get(id(node))
    if found is None:
        alike = _ALIKE.of(graph)
        key = (node.op, node.role, _sized(graph, node.args), _sized(graph, node.kwargs), node.outputs)
        if key not in alike:
            alike[key] = _rules_for(graph, node)
        # The node is kept beside its rules, so that no other one gets its number.
        found = made[id(node)] = node, alike[key]
    return found[1]


_MADE = KeptByGraph[int, tuple[Node, tuple[Rule, ...]]]()
_ALIKE = KeptByGraph[tuple[object, ...], tuple[Rule, ...]]()


def _sized(graph: OperatorGraph, argument: object) -> object:
    """An argument by the sizes of its tensors; a number that equals another of a different type is told apart."""
    if isinstance(argument, TensorRef):
        return graph.spec(argument)
    if isinstance(argument, tuple):
        return tuple(_sized(graph, item) for item in argument)
    return type(argument), argument


def _rules_for(graph: OperatorGraph, node: Node) -> tuple[Rule, ...]:
    if node.role in (Role.PARAMETER, Role.INPUT):
        return _stored(node)
    family = TABLE.get(node.op)
    if family is None or node.role is Role.CONSTANT:
        return (replicated(len(node.tensor_inputs), len(node.outputs)),)
    call = call_of(graph, node)
    return rules_of(call, family(call))


def has_rule(op: str) -> bool:
    """Whether `op` has rules of its own; if not it is replicated, and callers must say so."""
    return op in TABLE or op in (Role.PARAMETER, Role.INPUT, Role.CONSTANT)


def _stored(node: Node) -> tuple[Rule, ...]:
    """Parameters and inputs read nothing: only the placement in which they are held differs."""
    shape = node.outputs[0].shape
    dims: tuple[int, ...] = ()
    if node.role is Role.PARAMETER:
        dims = tuple(d for d, size in enumerate(shape) if size > 1)
    elif shape:
        dims = (0,)
    return tuple(Rule((), (placement,) * len(node.outputs), False) for placement in (REPLICATE, *dims))
