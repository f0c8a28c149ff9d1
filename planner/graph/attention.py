"""How attention runs, and a graph in which it is written out in products with the scores between them in memory.

The graph of a network has fused attention: one kernel each way, which keeps no scores. Software without one multiplies
queries with keys, makes weights of the scores and multiplies these with the values; the weights are kept for the
backward pass (Vaswani et al., arXiv:1706.03762, section 3.2.1). ``fused_softmax`` scales, hides later tokens and
normalises in one kernel (Megatron-LM's ``FusedScaleMaskSoftmax``), ``unfused`` in one kernel each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from planner.graph.operator_graph import Argument, Node, OperatorGraph, TensorRef, TensorSpec
from planner.graph.rewriting import Rewriter
from simulator.errors import InputError, UnsupportedError
from simulator.program import Kernel

FUSED = ("flash", "flash2", "vendor")
"""Fused kernels, by the names of `simulator.kernels`."""
WRITTEN_OUT = ("fused_softmax", "unfused")
KINDS = (*WRITTEN_OUT, *FUSED)

SCORES = "meshwright.scores.default"
"""``x @ y^T`` of the last two dims, ``(batch, heads, rows, columns)``; heads of `y` may each serve several of `x`."""
WEIGHTED = "meshwright.weighted.default"
"""``x @ y``, as `SCORES`."""
GATHERED = "meshwright.gathered.default"
"""``x^T @ y``, added up over the heads that share one of the result."""
HIDDEN = "meshwright.hidden.default"
"""Scores of later tokens become minus infinity; so far no gradient comes from there."""
SOFTMAX = "meshwright.scaled_softmax.default"
"""Scores times a factor, without later tokens where the flag behind it says so, and normalised."""
SOFTMAX_BACKWARD = "meshwright.scaled_softmax_backward.default"
"""Gradient of `SOFTMAX` for gradient, result and factor."""
MASKED = "meshwright.masked_attention.default"
"""Fused attention over a part of the keys (`planner.graph.masked_attention`)."""
MASKED_BACKWARD = "meshwright.masked_attention_backward.default"
"""Gradients of query, key, value and sinks."""
_FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def check_attention(kind: str) -> str:
    """The kind, if it is one of `KINDS` or empty; InputError if not."""
    if kind and kind not in KINDS:
        raise InputError(f"attention {kind!r} is not one of {', '.join(KINDS)}; choose one, or leave it out")
    return kind


def with_attention(graph: OperatorGraph, kind: str) -> OperatorGraph:
    """The graph, not folded, of a network whose attention is of a kind: as it is where that is fused, or none is named.

    Raises
    ------
    UnsupportedError
        Attention has a mask of its own; or there is none to write out.
    """
    if check_attention(kind) not in WRITTEN_OUT:
        return graph
    writer = _AttentionWriter(graph, kind=kind)
    for index in range(len(graph.nodes)):
        writer.copy(index)
    if not writer.parts:
        raise UnsupportedError(f"attention {kind}: {graph.network} has no attention to write out; leave it out")
    return writer.finished()


@dataclass(frozen=True, slots=True)
class _Attention:
    """Nodes of one attention: scores, what makes weights of them, their last one, and what they weigh."""

    scores: int
    weights: int
    weighted: int
    scale: float


@dataclass
class _AttentionWriter(Rewriter):
    kind: str = ""
    parts: dict[int, _Attention] = field(default_factory=dict)

    def copy(self, index: int) -> None:
        """Take a node over, written out if it is one of attention."""
        node = self.graph.nodes[index]
        if node.op == _FORWARD:
            self._attention(index, node)
        elif node.op == _BACKWARD:
            self._gradients(index, node)
        else:
            super().copy(index)

    def _emit(
        self, like: Node, name: str, op: str, kernel: Kernel, args: Sequence[Argument], spec: TensorSpec,
        *, forward: int | None = None, flops: float = 0.0,
    ) -> TensorRef:  # fmt: skip
        path = f"{like.name}/{name}" if name else like.name
        return self.emit(like, path, op, kernel, args, spec, forward=forward, flops=flops)

    def _product(
        self, like: Node, name: str, op: str, factors: tuple[TensorRef, TensorRef], spec: TensorSpec,
        forward: int | None = None,
    ) -> TensorRef:  # fmt: skip
        left, right = (self.spec(ref).shape for ref in factors)
        sides = (left[-1], left[-2], right[-2] if op == SCORES else right[-1])
        flops = 2.0 * prod(left[:-2]) * prod(sides)
        return self._emit(like, name, op, Kernel.MATMUL, factors, spec, forward=forward, flops=flops)

    def _attention(self, index: int, node: Node) -> None:
        keywords = dict(node.kwargs)
        if keywords.get("attn_mask") is not None or (len(node.args) > 3 and node.args[3]):
            raise UnsupportedError(
                f"attention {self.kind}: {node.name} has a mask or dropout of its own, which is not written out; "
                "leave it out"
            )
        query, key, value = (self.refs[ref] for ref in node.tensor_inputs[:3])
        causal = bool(node.args[4]) if len(node.args) > 4 else bool(keywords.get("is_causal"))
        asked, wide = self.spec(query), self.spec(key)
        given = keywords.get("scale")
        scale = float(given) if isinstance(given, int | float) else float(asked.shape[-1]) ** -0.5
        met = replace(
            asked, shape=(*asked.shape[:-1], wide.shape[-2]), batch_dims=(*asked.batch_dims[:-1], wide.batch_dims[-2])
        )
        scores = self._product(node, "scores", SCORES, (query, key), met)
        if self.kind == "fused_softmax":
            weights = self._emit(node, "weights", SOFTMAX, Kernel.SOFTMAX, (scores, scale, causal), met)
        else:
            scaled = self._emit(node, "scaled", "aten.mul.Tensor", Kernel.ELEMENTWISE, (scores, scale), met)
            seen = self._emit(node, "seen", HIDDEN, Kernel.ELEMENTWISE, (scaled,), met) if causal else scaled
            weights = self._emit(node, "weights", "aten._softmax.default", Kernel.SOFTMAX, (seen, -1, False), met)
        self.places[index] = len(self.nodes)
        self.refs[TensorRef(index)] = self._product(node, "", WEIGHTED, (weights, value), node.outputs[0])
        self.parts[index] = _Attention(scores.node, weights.node, self.places[index], scale)

    def _gradients(self, index: int, node: Node) -> None:
        assert node.forward is not None  # a gradient is of an attention before it
        known = self.parts[node.forward]
        gradient, query, key, value = (self.refs[ref] for ref in node.tensor_inputs[:4])
        weights, met = TensorRef(known.weights), self.nodes[known.weights].outputs[0]
        of_value = self._product(node, "value", GATHERED, (weights, gradient), node.outputs[2], known.weighted)
        of_weights = self._product(node, "weights", SCORES, (gradient, value), met, known.weighted)
        if self.kind == "fused_softmax":
            of_scores = self._emit(
                node, "scores", SOFTMAX_BACKWARD, Kernel.SOFTMAX, (of_weights, weights, known.scale), met,
                forward=known.weights,
            )  # fmt: skip
        else:
            args = (of_weights, weights, -1, "torch.float32")
            softmax = "aten._softmax_backward_data.default"
            steep = self._emit(node, "softmax", softmax, Kernel.SOFTMAX, args, met, forward=known.weights)
            of_scores = self._emit(
                node, "scores", "aten.mul.Tensor", Kernel.ELEMENTWISE, (steep, known.scale), met,
                forward=self._scaled(known),
            )  # fmt: skip
        of_query = self._product(node, "query", WEIGHTED, (of_scores, key), node.outputs[0], known.scores)
        self.places[index] = len(self.nodes)
        of_key = self._product(node, "", GATHERED, (of_scores, query), node.outputs[1], known.scores)
        self.refs |= {TensorRef(index, o): ref for o, ref in enumerate((of_query, of_key, of_value))}

    def _scaled(self, known: _Attention) -> int:
        """The node that scales scores: it follows them."""
        return known.scores + 1
