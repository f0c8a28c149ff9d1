"""A graph taken over node by node, some of its nodes replaced by others on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.graph.operator_graph import Argument, Node, OperatorGraph, TensorRef, TensorSpec
from simulator.program import Kernel


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
