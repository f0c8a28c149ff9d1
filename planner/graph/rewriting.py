"""A graph taken over node by node, some of its nodes replaced by others, and its nodes that stay in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Argument, Node, OperatorGraph, Role, TensorRef, TensorSpec
from simulator.program import Kernel, Phase


@dataclass
class Rewriter:
    """The copy so far of a graph that is not folded.

    ``refs`` and ``places`` are where the old graph's tensors and nodes are now.
    """

    graph: OperatorGraph
    nodes: list[Node] = field(default_factory=list)
    refs: dict[TensorRef, TensorRef] = field(default_factory=dict)
    places: dict[int, int] = field(default_factory=dict)

    def copy(self, index: int) -> None:
        """Take a node over as it is."""
        node = self.graph.nodes[index]
        self.places[index] = len(self.nodes)
        forward = None if node.forward is None else self.places[node.forward]
        args = tuple(self.argument(argument) for argument in node.args)
        kwargs = tuple((key, self.argument(argument)) for key, argument in node.kwargs)
        self.refs |= {TensorRef(index, o): TensorRef(len(self.nodes), o) for o in range(len(node.outputs))}
        self.nodes.append(replace(node, args=args, kwargs=kwargs, forward=forward))

    def emit(
        self, like: Node, name: str, op: str, kernel: Kernel, args: Sequence[Argument], *specs: TensorSpec,
        forward: int | None = None, flops: float = 0.0,
    ) -> TensorRef:  # fmt: skip
        """Append a new node in the place of `like`, whose arguments are tensors of the copy; its first output."""
        node = replace(
            like, name=name, op=op, kernel=kernel, args=tuple(args), kwargs=(), outputs=specs, forward=forward,
            flops=flops,
        )  # fmt: skip
        self.nodes.append(node)
        return TensorRef(len(self.nodes) - 1)

    def argument(self, argument: Argument) -> Argument:
        """An argument of the old graph in the copy."""
        if isinstance(argument, TensorRef):
            return self.refs[argument]
        return tuple(self.argument(item) for item in argument) if isinstance(argument, tuple) else argument

    def spec(self, ref: TensorRef) -> TensorSpec:
        """Shape and dtype of a tensor of the copy."""
        return self.nodes[ref.node].outputs[ref.output]

    def finished(self) -> OperatorGraph:
        """The graph with everything that was taken over."""
        return replace(
            self.graph,
            nodes=tuple(self.nodes),
            parameters=tuple(
                replace(p, node=self.places[p.node], gradient=None if p.gradient is None else self.refs[p.gradient])
                for p in self.graph.parameters
            ),
            inputs=tuple(replace(i, node=self.places[i.node]) for i in self.graph.inputs),
            loss=self.refs[self.graph.loss],
        )


INVERSE_ROOT = "aten.rsqrt.default"
"""A module that calls this operator itself is such a norm."""
STEPWISE = frozenset({Kernel.ELEMENTWISE, Kernel.REDUCTION, Kernel.COPY, Kernel.VIEW})


def wide_nodes(graph: OperatorGraph) -> frozenset[int]:
    """Nodes whose results stay in float32 in half the width, by number: the statistics of root-mean-square norms.

    Squares, their mean and the cube of its inverse root leave the range of float16 and have few digits in bfloat16, so
    all implementations of these norms compute them in float32. Kernels read and write narrow numbers all the same.

    Forward these are the inverse root and what only leads to it. Backward, what computes the gradients of those,
    up to the operators whose results the rest of the network reads.
    """
    norms = {node.module for node in graph.nodes if node.op == INVERSE_ROOT and node.role is Role.OPERATOR}
    if not norms:
        return frozenset()
    inside = [
        index
        for index, node in enumerate(graph.nodes)
        if node.role is Role.OPERATOR and node.module in norms and node.kernel in STEPWISE
    ]
    forward: set[int] = set()
    for index in reversed(inside):
        node = graph.nodes[index]
        if node.phase is Phase.FORWARD:
            readers = [user for user in _readers(graph, index) if graph.nodes[user].phase is Phase.FORWARD]
            if node.op == INVERSE_ROOT or (readers and forward.issuperset(readers)):
                forward.add(index)
    backward: set[int] = set()
    """Backward, what reads numbers in float32, or narrow ones as if they were."""
    for index in reversed(inside):
        node = graph.nodes[index]
        if node.phase is Phase.BACKWARD and (node.forward in forward or _only_for(graph, index, backward)):
            backward.add(index)
    return frozenset(forward | {index for index in backward if _only_for(graph, index, backward)})


def _only_for(graph: OperatorGraph, index: int, users: set[int]) -> bool:
    readers = _readers(graph, index)
    return bool(readers) and users.issuperset(readers)


def _readers(graph: OperatorGraph, index: int) -> list[int]:
    outputs = range(len(graph.nodes[index].outputs))
    return [user for output in outputs for user in graph.consumers.get(TensorRef(index, output), ())]
