"""The forward and backward operators of one micro-batch."""

from __future__ import annotations

from planner.graph.operator_graph import DTYPE_BYTES, Node, Role, TensorRef
from planner.instructions import (
    Communicate,
    Compute,
)
from planner.lowering.placed import PlacedGraph
from planner.lowering.writer import Draft, Writer
from planner.strategy.plan import NodeRules
from simulator.program import (
    Buffer,
    BufferKind,
    Collective,
    Kernel,
    Phase,
    Task,
)


class Body(Writer):
    """The forward and backward operators of one micro-batch, the same in every segment.

    ``items`` are drafts, and the gradients of parameters where they are complete.
    """

    def __init__(self, source: PlacedGraph) -> None:
        super().__init__(source)
        self.items: list[Draft | TensorRef] = []
        for parameter in self.graph.parameters:
            ref = TensorRef(parameter.node)
            for wanted in source.gathered(parameter.node):
                self.versions[ref][wanted] = source.value_name(ref, wanted)
        for index, node in enumerate(self.graph.nodes):
            if node.role in (Role.PARAMETER, Role.INPUT):
                continue
            self._compute(index, node)
            for output in range(len(node.outputs)):
                ref = TensorRef(index, output)
                if ref == self.graph.loss:
                    self._fetch(ref, source.replicated, Phase.FORWARD)
                if ref in source.gradient_of:
                    self._collect()
                    self.items.append(ref)
        self._collect()

    def _collect(self) -> None:
        self.items += self.drafts
        self.drafts = []

    def _compute(self, index: int, node: Node) -> None:
        source, recipe = self.source, self.source.recipe(index)
        names = tuple(
            self._fetch(ref, wanted, node.phase) for ref, wanted in zip(node.tensor_inputs, recipe.inputs, strict=True)
        )
        outputs, writes, owners = [], [], {}
        view = node.kernel is Kernel.VIEW and bool(names)
        for output, placements in enumerate(recipe.outputs):
            ref = TensorRef(index, output)
            name = source.written_name(ref) if ref in source.read else ""
            outputs.append(name)
            if name:
                kind = BufferKind.GRADIENT if ref in source.gradient_of else BufferKind.ACTIVATION
                writes.append(Buffer(name=name, size_bytes=0 if view else recipe.sizes[output], kind=kind))
                self.versions[ref] = {placements: name}
                if view:
                    owners[name] = names[0]
        task = Task(
            name=node.name,
            phase=node.phase,
            kernel=node.kernel,
            dtype=node.outputs[0].dtype,
            flops=recipe.flops,
            bytes_moved=recipe.bytes_moved,
            matmul=recipe.matmul,
        )
        rules = source.rules[index]
        instruction = Compute(node=index, inputs=names, outputs=tuple(outputs), rules=rules)
        self._add(task, instruction, names, tuple(writes), owners)
        if any(rule.reduced_elements for rule in rules):
            self._inner_reductions(node, rules, tuple(name for name in outputs if name))

    def _inner_reductions(self, node: Node, rules: NodeRules, outputs: tuple[str, ...]) -> None:
        """Time the collectives inside an operator right after it; the operator's instruction runs them."""
        for axis, rule in enumerate(rules):
            if rule.reduced_elements:
                payload = rule.reduced_elements * DTYPE_BYTES[node.outputs[0].dtype]
                inner = Communicate(
                    collective=Collective.ALL_REDUCE, axis=axis, sources=(), targets=(), gather_dims=(), split_dims=()
                )
                self._message(f"all_reduce inside {node.name}", node.phase, inner, payload, completes=outputs)
