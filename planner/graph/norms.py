"""How root-mean-square norms run, and a graph in which each of them is one operator each way.

Networks write these norms in single operators, each of which passes through memory: square, mean, inverse root and two
products, and their derivatives. Software with a kernel for them (Apex's ``FusedRMSNorm``, FlashAttention's
``rms_norm``, Transformer Engine) reads and writes a layer's values once forward, keeps nothing but its input, and
backward reads input and gradient and writes one gradient:

    y = w x r,   r = (mean(x^2) + e)^(-1/2),   dx = r (w g - n mean(w g n)),   dw = sum(g n),   n = x r

(Zhang and Sennrich, arXiv:1910.07467). Layer norms are one operator in every graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.graph.rewriting import INVERSE_ROOT, Rewriter
from simulator.errors import InputError
from simulator.program import Kernel, Phase

FUSED = "fused"
KINDS = (FUSED, "unfused")

RMS_NORM = "meshwright.rms_norm.default"
"""``(x, weight, epsilon)``, over the last dim."""
RMS_NORM_BACKWARD = "meshwright.rms_norm_backward.default"
"""Gradients of values and weight for the gradient of the result, values, weight and epsilon."""


def check_norms(kind: str) -> str:
    """The kind, if it is one of `KINDS` or empty; InputError if not."""
    if kind and kind not in KINDS:
        raise InputError(f"norms {kind!r} is not one of {', '.join(KINDS)}; choose one, or leave it out")
    return kind


def with_norms(graph: OperatorGraph, kind: str) -> OperatorGraph:
    """The graph, not folded, of a network whose root-mean-square norms run as said; as it is unless that is fused."""
    if check_norms(kind) != FUSED:
        return graph
    writer = _NormWriter(graph, norms=tuple(norms_in(graph)))
    for index in range(len(graph.nodes)):
        writer.copy(index)
    return writer.finished()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfusedNorm:
    """A norm in single operators.

    ``forward`` and ``backward`` are its nodes in order, the result last; ``gradient`` is what comes back for the
    result, ``of_values`` and ``of_weight`` are what goes on: derivatives of values by both uses, and of the weight.
    """

    values: TensorRef
    weight: TensorRef
    epsilon: float
    forward: tuple[int, ...]
    backward: tuple[int, ...] = ()
    gradient: TensorRef | None = None
    of_values: tuple[TensorRef, ...] = ()
    of_weight: TensorRef | None = None


def norms_in(graph: OperatorGraph) -> Iterator[UnfusedNorm]:
    """Norms that nothing but themselves looks into."""
    derivatives: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if node.phase is Phase.BACKWARD and node.role is Role.OPERATOR and node.forward is not None:
            derivatives.setdefault(node.forward, []).append(index)
    for index, node in enumerate(graph.nodes):
        if node.op == INVERSE_ROOT and node.phase is Phase.FORWARD and node.role is Role.OPERATOR:
            norm = _forward(graph, index)
            backward = () if norm is None else sorted(i for place in norm.forward for i in derivatives.get(place, ()))
            norm = norm and _with_derivatives(graph, norm, tuple(backward))
            if norm is not None:
                yield norm


def _forward(graph: OperatorGraph, root: int) -> UnfusedNorm | None:
    """``weight * (x * rsqrt(mean(x ** 2) + epsilon))`` around an inverse root."""
    added = _producer(graph, graph.nodes[root].args[0], "aten.add.Tensor", "aten.add.Scalar")
    mean = added and _producer(graph, added[1].args[0], "aten.mean.dim")
    square = mean and _producer(graph, mean[1].args[0], "aten.pow.Tensor_Scalar")
    if not added or not mean or not square or square[1].args[1] != 2:
        return None
    epsilon, values = added[1].args[1], square[1].args[0]
    over_last = mean[1].args[1:] in (((-1,), True), ((len(mean[1].outputs[0].shape) - 1,), True))
    scaled = _only_product(graph, TensorRef(root))
    result = scaled and _only_product(graph, TensorRef(scaled[0]))
    if not isinstance(epsilon, float) or not isinstance(values, TensorRef) or not over_last or not result:
        return None
    assert scaled is not None  # there is none behind it otherwise
    last, weight = result[0], result[1]
    width = graph.spec(values).shape[-1:]
    if scaled[1] != values or graph.spec(weight).shape != width or any(graph.spec(weight).batch_dims):
        return None
    return UnfusedNorm(
        values=values, weight=weight, epsilon=epsilon, forward=(square[0], mean[0], added[0], root, scaled[0], last)
    )


def _producer(graph: OperatorGraph, ref: object, *ops: str) -> tuple[int, Node] | None:
    """The operator that makes a tensor that nothing else reads forward, if it is one of `ops`."""
    if not isinstance(ref, TensorRef) or graph.nodes[ref.node].op not in ops or len(_readers(graph, ref)) > 1:
        return None
    return ref.node, graph.nodes[ref.node]


def _only_product(graph: OperatorGraph, ref: TensorRef) -> tuple[int, TensorRef] | None:
    """The product that alone reads a tensor forward, and the other factor."""
    readers = _readers(graph, ref)
    if len(readers) != 1 or graph.nodes[readers[0]].op != "aten.mul.Tensor":
        return None
    factors = graph.nodes[readers[0]].args
    others = [factor for factor in factors if factor != ref]
    return (readers[0], others[0]) if len(others) == 1 and isinstance(others[0], TensorRef) else None


def _readers(graph: OperatorGraph, ref: TensorRef) -> list[int]:
    return [user for user in graph.consumers.get(ref, ()) if graph.nodes[user].phase is Phase.FORWARD]


def _with_derivatives(graph: OperatorGraph, norm: UnfusedNorm, backward: tuple[int, ...]) -> UnfusedNorm | None:
    """The norm with the way back through it, None where something else takes part in that."""
    inside = {*norm.forward, *backward}
    if any(user not in inside for index in norm.forward[:-1] for user in graph.consumers.get(TensorRef(index), ())):
        return None
    if not backward:
        return norm
    read = {ref for index in backward for ref in graph.nodes[index].tensor_inputs if ref.node not in inside}
    read -= {norm.values, norm.weight}
    left = [TensorRef(i) for i in backward if _leaves(graph, TensorRef(i), inside)]
    shapes = graph.spec(norm.values).shape, graph.spec(norm.weight).shape
    of_values = tuple(ref for ref in left if graph.spec(ref).shape == shapes[0])
    of_weight = [ref for ref in left if graph.spec(ref).shape == shapes[1] and ref not in of_values]
    summed = all(graph.nodes[user].role is Role.GRADIENT_SUM for ref in of_values[1:] for user in graph.consumers[ref])
    if len(read) != 1 or len(of_values) + len(of_weight) < len(left) or len(of_weight) > 1 or not summed:
        return None
    return UnfusedNorm(
        values=norm.values, weight=norm.weight, epsilon=norm.epsilon, forward=norm.forward, backward=backward,
        gradient=read.pop(), of_values=of_values, of_weight=of_weight[0] if of_weight else None,
    )  # fmt: skip


def _leaves(graph: OperatorGraph, ref: TensorRef, inside: set[int]) -> bool:
    readers = graph.consumers.get(ref, ())
    return not readers or any(user not in inside for user in readers)


@dataclass
class _NormWriter(Rewriter):
    norms: tuple[UnfusedNorm, ...] = ()
    left_out: set[TensorRef] = field(default_factory=set)
    """Gradients that another one has in it."""
    names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.results = {norm.forward[-1]: norm for norm in self.norms}
        self.returns = {
            next(i for i in norm.backward if i > norm.gradient.node): norm for norm in self.norms if norm.gradient
        }
        """Norms by the first operator on their way back that finds the gradient made."""
        self.inside = {index for norm in self.norms for index in (*norm.forward, *norm.backward)}

    def copy(self, index: int) -> None:
        """Take a node over, those of a norm as one."""
        node = self.graph.nodes[index]
        if index in self.results:
            self._forward(node, self.results[index])
        elif index in self.returns:
            self._backward(node, self.returns[index])
        elif node.role is Role.GRADIENT_SUM and self.left_out.intersection(node.tensor_inputs):
            self._sum(index, node)
        elif index not in self.inside:
            super().copy(index)

    def _forward(self, like: Node, norm: UnfusedNorm) -> None:
        args = self.refs[norm.values], self.refs[norm.weight], norm.epsilon
        name = self._named(like, "rms_norm")
        made = self.emit(like, name, RMS_NORM, Kernel.NORMALIZATION, args, *like.outputs)
        self.places |= dict.fromkeys(norm.forward, made.node)
        self.refs[TensorRef(norm.forward[-1])] = made

    def _backward(self, like: Node, norm: UnfusedNorm) -> None:
        assert norm.gradient is not None  # it is listed by its gradient
        values, weight = self.refs[norm.values], self.refs[norm.weight]
        made = self.emit(
            like, self._named(like, "backward/rms_norm_backward"), RMS_NORM_BACKWARD, Kernel.NORMALIZATION,
            (self.refs[norm.gradient], values, weight, norm.epsilon), self.spec(values), self.spec(weight),
            forward=self.places[norm.forward[-1]],
        )  # fmt: skip
        self.places |= dict.fromkeys(norm.backward, made.node)
        if norm.of_weight is not None:
            self.refs[norm.of_weight] = TensorRef(made.node, 1)
        for ref in norm.of_values[:1]:
            self.refs[ref] = made
        self.left_out.update(norm.of_values[1:])

    def _sum(self, index: int, node: Node) -> None:
        """A sum one of whose parts is in the other one; where both are, the sum is."""
        kept = [ref for ref in node.tensor_inputs if ref not in self.left_out]
        if not kept:
            self.left_out.add(TensorRef(index))
            return
        self.refs[TensorRef(index)] = self.refs[kept[0]]
        self.places[index] = self.refs[kept[0]].node

    def _named(self, like: Node, name: str) -> str:
        """A name of the module that no other of its norms has."""
        path = f"{like.module}/{name}" if like.module else name
        found, count = path, 0
        while found in self.names:
            count += 1
            found = f"{path}.{count}"
        self.names.add(found)
        return found
