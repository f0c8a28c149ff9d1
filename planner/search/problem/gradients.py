"""Which gradient belongs to which forward tensor, and which sums gather the gradients of its uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from simulator.program import Kernel, Phase


@dataclass(frozen=True, slots=True)
class GradientFlow:
    """The gradient of a forward tensor after all its uses: its reference and the sums that make it."""

    gradient: TensorRef
    sums: tuple[int, ...] = ()


def owner_of(graph: OperatorGraph, index: int) -> int:
    """Forward operator whose strategy decides that of node `index`: a backward operator follows its own."""
    node = graph.nodes[index]
    follows = node.phase is Phase.BACKWARD and node.role is Role.OPERATOR and node.forward is not None
    if follows and node.forward is not None and graph.nodes[node.forward].role is Role.OPERATOR:
        return node.forward
    return index


def alike(graph: OperatorGraph, one: TensorRef, other: TensorRef) -> bool:
    """Whether two tensors have equal dims at every batch size, as a tensor and its gradient do."""
    a, b = graph.spec(one), graph.spec(other)
    return a.shape == b.shape and a.batch_dims == b.batch_dims


def gradient_flows(graph: OperatorGraph) -> dict[TensorRef, GradientFlow]:
    """Match forward tensors with their gradients where the graph determines them.

    The graph is walked from the loss back. A use with backward operators sends back one of their
    outputs; a use without (an addition) passes on the gradient of its own output. Where a tensor has
    several uses, a chain of gradient sums over what they send back is its gradient.
    """
    leaving = _leaving(graph)
    final = {TensorRef(p.node): p.gradient for p in graph.parameters}
    sums = {i: node for i, node in enumerate(graph.nodes) if node.role is Role.GRADIENT_SUM}
    candidates: dict[TensorRef, frozenset[TensorRef]] = {}
    flows: dict[TensorRef, GradientFlow] = {}
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if node.phase is not Phase.FORWARD or node.role is Role.CONSTANT:
            continue
        for output in range(len(node.outputs)):
            ref = TensorRef(index, output)
            sent = [_sent_back(graph, user, ref, leaving, candidates) for user in _forward_uses(graph, ref)]
            sent = [refs for refs in sent if refs]
            if len(sent) == 1:
                candidates[ref] = sent[0]
                if len(sent[0]) == 1:
                    flows[ref] = GradientFlow(next(iter(sent[0])))
            elif sent:
                end = final.get(ref)
                # Gradients of a weight and of a bias may look alike: that of a parameter is known.
                chain = _sums_of(end, sums) if end is not None and end.node in sums else ()
                if len(chain) != len(sent) - 1:
                    chain = _chain(frozenset().union(*sent), len(sent), sums, graph)
                if chain:
                    flows[ref] = GradientFlow(TensorRef(chain[-1]), chain)
                    candidates[ref] = frozenset((TensorRef(chain[-1]),))
    return flows


def _forward_uses(graph: OperatorGraph, ref: TensorRef) -> list[int]:
    return [u for u in graph.consumers.get(ref, ()) if graph.nodes[u].phase is Phase.FORWARD]


def _leaving(graph: OperatorGraph) -> dict[int, list[TensorRef]]:
    """Gradients that the backward operators of each forward operator send to others."""
    final = {p.gradient for p in graph.parameters}
    found: dict[int, list[TensorRef]] = {}
    for index, node in enumerate(graph.nodes):
        owner = owner_of(graph, index)
        if owner == index:
            continue
        sends = found.setdefault(owner, [])
        for output in range(len(node.outputs)):
            ref = TensorRef(index, output)
            if ref in final or any(owner_of(graph, u) != owner for u in graph.consumers.get(ref, ())):
                sends.append(ref)
    return found


def _sent_back(
    graph: OperatorGraph,
    user: int,
    ref: TensorRef,
    leaving: Mapping[int, list[TensorRef]],
    candidates: Mapping[TensorRef, frozenset[TensorRef]],
) -> frozenset[TensorRef]:
    """Tensors that may be the gradient `user` sends back for `ref`."""
    if user in leaving:
        return frozenset(r for r in leaving[user] if alike(graph, r, ref))
    outputs = [TensorRef(user, o) for o in range(len(graph.nodes[user].outputs))]
    passed = {r for out in outputs for r in candidates.get(out, ()) if alike(graph, r, ref)}
    if not passed and graph.nodes[user].kernel is Kernel.VIEW:
        # A view whose backward was simplified away: the gradient leaves whoever reads the view.
        later = {u for out in outputs for u in _forward_uses(graph, out)}
        passed = {r for u in later for r in leaving.get(u, ()) if alike(graph, r, ref)}
    return frozenset(passed)


def _sums_of(gradient: TensorRef, sums: Mapping[int, Node]) -> tuple[int, ...]:
    """The sums that a gradient is made of, in the order of execution."""
    found: set[int] = set()
    waiting = [gradient.node]
    while waiting:
        index = waiting.pop()
        if index in sums and index not in found:
            found.add(index)
            waiting += [ref.node for ref in sums[index].tensor_inputs]
    return tuple(sorted(found))


def _chain(sent: frozenset[TensorRef], uses: int, sums: Mapping[int, Node], graph: OperatorGraph) -> tuple[int, ...]:
    """Follow sums whose terms are all among `sent`, each term once, until every use is in."""
    open_terms, chain = set(sent), []
    for index, node in sums.items():
        terms = node.tensor_inputs
        if all(t in open_terms for t in terms):
            open_terms.difference_update(terms)
            open_terms.add(TensorRef(index))
            chain.append(index)
    while chain and len(chain) >= uses:
        chain.pop()
    return tuple(chain)
