"""Parts of transformer layers that Megatron-LM computes again by name (``--recompute-modules``).

What belongs to a part is told by what operators do and by the modules that they are in, so that one rule serves
networks from anywhere:

- ``core_attn``: scores of attention that are written out, up to what they weigh. A fused kernel keeps nothing that
  could be computed again.
- ``layernorm``: norms of a layer, but those inside attention and experts.
- ``mla_up_proj``: of latent attention, what makes queries, keys and values of their compressed forms: norms, products
  and rotary positions.
- ``mlp``: feed-forward networks of layers without experts.
- ``moe``: router, experts, and what brings tokens there and back.
- ``moe_act``: what experts do between their products.
- ``shared_experts``: those that every token goes to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

from planner.graph.experts import experts_of
from planner.graph.operator_graph import Node, OperatorGraph, Role
from simulator.program import Kernel, Phase

_ATTENTION = re.compile(r"(^|\.)(\w*_)?(attn|attention)(\.|$)")
_LAYER = re.compile(r"(.*?\.\d+)(\.|$)")
_NORM = re.compile(r"(^|\.)(\w*norm\w*|ln_?\w*)$", re.IGNORECASE)
_SHARED = re.compile(r"(^|\.)shared_experts?(\.|$)|(^|\.)shared_mlp(\.|$)")


def with_selective(graph: OperatorGraph, modules: Iterable[str]) -> OperatorGraph:
    """The same network, of which selective recomputation computes these parts of layers again.

    Parameters
    ----------
    modules : iterable of str
        Some of `MODULES`; none for all that is cheap (`planner.graph.recompute`).
    """
    named = tuple(sorted(modules))
    return graph if named == graph.selective else replace(graph, selective=named)


def in_parts(graph: OperatorGraph, modules: Iterable[str]) -> frozenset[int]:
    """Forward operators of these parts of layers."""
    found: set[int] = set()
    for name in modules:
        found |= MODULES[name](graph)
    return frozenset(found)


def _forward(graph: OperatorGraph) -> Iterable[tuple[int, Node]]:
    return ((i, n) for i, n in enumerate(graph.nodes) if n.role is Role.OPERATOR and n.phase is Phase.FORWARD)


def _within(graph: OperatorGraph, holds: Callable[[str], object]) -> set[int]:
    return {index for index, node in _forward(graph) if holds(node.module)}


def _behind(graph: OperatorGraph, starts: set[int], ends: set[int], inside: Callable[[str], object]) -> set[int]:
    """Operators inside that are made of some, these included, up to the ends, which are not."""
    found = set(starts)
    for index, node in _forward(graph):
        if index not in ends and inside(node.module) and any(ref.node in found for ref in node.tensor_inputs):
            found.add(index)
    return found


def _of_parameters(graph: OperatorGraph) -> set[int]:
    """Parameters, and what is made of them alone."""
    found = {parameter.node for parameter in graph.parameters}
    for index, node in _forward(graph):
        if node.tensor_inputs and all(ref.node in found for ref in node.tensor_inputs):
            found.add(index)
    return found


def _core_attention(graph: OperatorGraph) -> set[int]:
    weights = _of_parameters(graph)
    pairs = [
        index
        for index, node in _forward(graph)
        if node.kernel is Kernel.MATMUL
        and _ATTENTION.search(node.module)
        and not any(ref.node in weights for ref in node.tensor_inputs)
    ]
    scores = {index for place, index in enumerate(pairs) if place % 2 == 0}
    weighed = set(pairs) - scores
    return weighed | _behind(graph, scores, weighed, _ATTENTION.search)


def _norms(graph: OperatorGraph) -> set[int]:
    def is_norm(module: str) -> bool:
        return bool(_NORM.search(module)) and not _ATTENTION.search(module.rpartition(".")[0])

    return _within(graph, is_norm)


def _up_projections(graph: OperatorGraph) -> set[int]:
    weights = _of_parameters(graph)
    ends = {
        index
        for index, node in _forward(graph)
        if node.kernel is Kernel.ATTENTION
        or (node.kernel is Kernel.MATMUL and not any(ref.node in weights for ref in node.tensor_inputs))
    }
    norms = _within(graph, lambda module: _NORM.search(module) and _ATTENTION.search(module.rpartition(".")[0]))
    found: set[int] = set()
    for module in {graph.nodes[index].module for index in norms}:
        starts = {index for index in norms if graph.nodes[index].module == module}
        made = _behind(graph, starts, ends, _ATTENTION.search)
        if any(graph.nodes[index].kernel is Kernel.MATMUL for index in made):
            found |= made
    return found


def _mixtures(graph: OperatorGraph) -> tuple[str, ...]:
    """Modules that have routers and experts, each with a dot behind it."""
    experts = experts_of(graph)
    products = {node.module for _, node in _forward(graph) if experts and _is_grouped(graph, node)}
    routers = {
        node.module
        for _, node in _forward(graph)
        if node.op == "aten.topk.default" and graph.spec(node.tensor_inputs[0]).shape[-1] == experts
    }
    found = set()
    for product in products:
        parts = product.split(".")
        shared = [_common(parts, router.split(".")) for router in routers]
        found.add(".".join(parts[: max(shared, default=len(parts))]) + ".")
    return tuple(found)


def _common(one: list[str], other: list[str]) -> int:
    """How many parts two paths begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _is_grouped(graph: OperatorGraph, node: Node) -> bool:
    return (
        node.kernel is Kernel.MATMUL and "expert" in node.module and len(graph.spec(node.tensor_inputs[-1]).shape) == 3
    )


def _in_mixture(graph: OperatorGraph) -> Callable[[str], bool]:
    roots = _mixtures(graph)
    return lambda module: f"{module}.".startswith(roots) if roots else False


def _mixture(graph: OperatorGraph) -> set[int]:
    return _within(graph, _in_mixture(graph))


def _between_products(graph: OperatorGraph) -> set[int]:
    """Of grouped products what one is made of that is made of another."""
    found: set[int] = set()
    for root in _mixtures(graph):
        own = [(index, node) for index, node in _forward(graph) if f"{node.module}.".startswith(root)]
        products = {index for index, node in own if _is_grouped(graph, node)}
        found |= _between(own, products) - products
    return found


def _feed_forward(graph: OperatorGraph) -> set[int]:
    """Of each layer the products outside attention and experts, and what lies between them."""
    inside, weights = _in_mixture(graph), _of_parameters(graph)
    layers: dict[str, list[tuple[int, Node]]] = {}
    for index, node in _forward(graph):
        layer = _LAYER.match(node.module)
        if layer and not inside(node.module) and not _ATTENTION.search(node.module):
            layers.setdefault(layer[1], []).append((index, node))
    found: set[int] = set()
    for own in layers.values():
        products = {i for i, n in own if n.kernel is Kernel.MATMUL and any(r.node in weights for r in n.tensor_inputs)}
        found |= _between(own, products)
    return found


def _between(own: Sequence[tuple[int, Node]], ends: set[int]) -> set[int]:
    """Of some operators those that are made of ends and that ends are made of, these included."""
    behind, before = set(ends), set(ends)
    for index, node in own:
        if any(ref.node in behind for ref in node.tensor_inputs):
            behind.add(index)
    for index, node in reversed(own):
        if index in before:
            before.update(ref.node for ref in node.tensor_inputs)
    return behind & before


def _shared_experts(graph: OperatorGraph) -> set[int]:
    return _within(graph, _SHARED.search)


MODULES: Mapping[str, Callable[[OperatorGraph], set[int]]] = {
    "core_attn": _core_attention,
    "layernorm": _norms,
    "mla_up_proj": _up_projections,
    "mlp": _feed_forward,
    "moe": _mixture,
    "moe_act": _between_products,
    "shared_experts": _shared_experts,
}
"""Parts of layers by Megatron-LM's names (`planner.plans.pins.RecomputeModule`), and what finds their operators."""
