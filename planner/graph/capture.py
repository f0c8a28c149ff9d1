"""From torch's joint graph to an operator graph."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch._ops import OpOverload

from planner.graph.capture_errors import user_source
from planner.graph.cleaning import Recorder, clean, is_backward, is_gradient_sum, module_paths, reference, unique_name
from planner.graph.operator_graph import NetworkInput, Node, OperatorGraph, Parameter, Role, TensorRef
from planner.graph.operator_work import count_flops, kernel_class, operator_name
from planner.graph.tracing import MARKERS, Input, Trace, trace
from simulator.errors import NetworkError
from simulator.program import Kernel, Phase

"""Operator of a constant that is a buffer of the module; the node's name is the buffer's."""
_LOOKUPS = {"aten.embedding.default": 0, "aten.nll_loss_forward.default": -1}
"""Operators whose second tensor counts along a dim of the first, and that dim."""


def capture_module(
    make: Callable[[], nn.Module],
    inputs: Sequence[Input],
    *,
    name: str,
    notes: Sequence[str] = (),
    twice: bool = False,
) -> OperatorGraph:
    """Capture the loss and the gradients of the module that `make` returns, at batch 1, nothing folded.

    ``make`` is called under fake tensors, so that a network of any size costs no memory; ``inputs`` are
    what its ``forward`` takes, in order. The gradient of the loss with respect to itself is the constant
    ``aten.ones.default``. ``twice`` captures at two batch sizes and refuses a network whose numbers depend
    on the batch size otherwise than as multiples of it.
    """
    graph, marker = _capture_once(make, inputs, name, tuple(notes), MARKERS)
    if twice:
        others = tuple(m for m in MARKERS if m != marker)
        again, _ = _capture_once(make, inputs, name, tuple(notes), others)
        _check_equal(graph, again)
    return graph


def _capture_once(
    make: Callable[[], nn.Module], inputs: Sequence[Input], name: str, notes: tuple[str, ...], markers: Sequence[int]
) -> tuple[OperatorGraph, int]:
    traced = trace(make, inputs, name, markers)
    replaced = clean(traced.graph, traced.marker)
    _merge_tied(traced)
    forward_of = _forward_calls(traced.graph, replaced)
    return _Converter(traced=traced, inputs=inputs, network=name, forward_of=forward_of).convert(notes), traced.marker


def _check_equal(graph: OperatorGraph, again: OperatorGraph) -> None:
    for node, other in zip_longest(graph.nodes, again.nodes):
        if node != other:
            found = node or other
            place = f" at {found.source}" if found.source else ""
            raise NetworkError(
                f"network {graph.network!r} cannot be captured: {found.op}{place} depends on the batch size other than "
                "as a multiple of it; write the loss as a mean over the samples"
            )


def _forward_calls(graph: fx.Graph, replaced: Mapping[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    """Map each backward call to the first forward call of the same autograd sequence number.

    Calls that work in place carry a later number forward than backward: the next one is theirs.
    """
    by_sequence: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if _is_call(node) and not is_backward(node) and "seq_nr" in node.meta:
            by_sequence.setdefault(node.meta["seq_nr"], []).append(node)
    for node in replaced:
        if not is_backward(node) and node.meta.get("seq_nr") not in by_sequence:
            origin = _origin(_follow(node, replaced))
            if _is_call(origin):
                by_sequence.setdefault(node.meta["seq_nr"], []).append(origin)
    sequences = sorted(by_sequence)
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _is_call(node) and is_backward(node) and not is_gradient_sum(node) and "seq_nr" in node.meta:
            place = bisect_left(sequences, node.meta["seq_nr"])
            if place < len(sequences):
                found[node] = by_sequence[sequences[place]][0]
    return found


def _is_call(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem


def _follow(node: fx.Node, replaced: Mapping[fx.Node, fx.Node]) -> fx.Node:
    while node in replaced:
        node = replaced[node]
    return node


def _merge_tied(traced: Trace) -> None:
    """Let every use of a tied parameter read the same placeholder."""
    group_of = {name: names[0] for names in traced.names for name in names}
    first: dict[str, fx.Node] = {}
    for node in traced.graph.nodes:
        description = node.meta.get("desc")
        if node.op == "placeholder" and isinstance(description, ParamAOTInput):
            kept = first.setdefault(group_of[description.target], node)
            if kept is not node:
                node.replace_all_uses_with(kept)


@dataclass(kw_only=True)
class _Converter:
    """Turns one traced graph into records, in the order of execution."""

    traced: Trace
    inputs: Sequence[Input]
    network: str
    forward_of: Mapping[fx.Node, fx.Node]
    nodes: list[Node] = field(default_factory=list)
    index_of: dict[fx.Node, int] = field(default_factory=dict)
    varying: set[int] = field(default_factory=set)
    taken: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recorder = Recorder(self.traced.marker)

    def convert(self, notes: tuple[str, ...]) -> OperatorGraph:
        parameters = self._add_parameters()
        inputs = self._add_inputs()
        self._add_buffers()
        self._add_calls()
        loss, gradients = self._outputs()
        return OperatorGraph(
            network=self.network,
            fingerprint="",
            batch_size=1,
            nodes=tuple(self.nodes),
            parameters=tuple(
                Parameter(name=names[0], node=node, gradient=gradients.get(names[0]), aliases=names[1:])
                for names, node in parameters
            ),
            inputs=tuple(self._bounded(item) for item in inputs),
            loss=loss,
            notes=tuple(dict.fromkeys((*notes, *self.traced.notes))),
        )

    def _placeholders(self, kind: type) -> list[tuple[fx.Node, Any]]:
        nodes = [node for node in self.traced.graph.nodes if node.op == "placeholder"]
        return [(node, node.meta["desc"]) for node in nodes if isinstance(node.meta["desc"], kind)]

    def _append(self, source: fx.Node, node: Node, *, varies: bool) -> int:
        index = len(self.nodes)
        self.nodes.append(node)
        self.index_of[source] = index
        if varies:
            self.varying.add(index)
        return index

    def _add_placeholder(self, source: fx.Node, name: str, role: Role, module: str = "") -> int:
        node = Node(
            name=unique_name(name, self.taken),
            op=role.value,
            role=role,
            phase=Phase.FORWARD,
            kernel=Kernel.VIEW,
            outputs=self.recorder.specs(source.meta["val"]),
            module=module,
        )
        return self._append(source, node, varies=role is not Role.CONSTANT)

    def _add_parameters(self) -> list[tuple[tuple[str, ...], int]]:
        found = {description.target: node for node, description in reversed(self._placeholders(ParamAOTInput))}
        added = []
        for names in self.traced.names:
            candidates = [found[name] for name in names if name in found]
            source = next((node for node in candidates if node.users), candidates[0])
            module = names[0].rpartition(".")[0]
            index = self._add_placeholder(source, names[0], Role.PARAMETER, module)
            for node in candidates:
                self.index_of[node] = index
            added.append((names, index))
        return added

    def _add_inputs(self) -> tuple[NetworkInput, ...]:
        added = []
        for node, description in self._placeholders(PlainAOTInput):
            spec = self.inputs[description.idx]
            index = self._add_placeholder(node, spec.name, Role.INPUT)
            added.append(NetworkInput(name=spec.name, node=index, kind=spec.kind, high=spec.high))
        return tuple(added)

    def _bounded(self, item: NetworkInput) -> NetworkInput:
        """Bound an integer input by the embedding it looks up in or the classes it is compared with."""
        refs, bound = {TensorRef(item.node)}, item.high
        for index, node in enumerate(self.nodes):
            tensors = node.tensor_inputs
            if node.op in _LOOKUPS and len(tensors) > 1 and tensors[1] in refs:
                table = self.nodes[tensors[0].node].outputs[tensors[0].output]
                bound = table.shape[_LOOKUPS[node.op]]
            elif node.kernel is Kernel.VIEW and tensors and tensors[0] in refs:
                refs.add(TensorRef(index))
        return replace(item, high=bound)

    def _add_buffers(self) -> None:
        for node, description in self._placeholders(BufferAOTInput):
            if node.users:
                self._add_placeholder(node, description.target, Role.CONSTANT, description.target.rpartition(".")[0])

    def _add_calls(self) -> None:
        wanted = [node for node in self.traced.graph.nodes if _is_call(node)]
        producers = {node: [_origin(p) for p in node.all_input_nodes] for node in wanted}
        order = {node: position for position, node in enumerate(wanted)}
        for found in producers.values():
            found.sort(key=lambda p: order.get(p, -1))
        paths = module_paths(wanted, self.forward_of, producers)
        for node in wanted:
            for tangent, _ in self._placeholders(TangentAOTInput):
                if is_backward(node) and tangent not in self.index_of:
                    self._add_tangent(tangent)
            self._add_call(node, paths[node])

    def _add_tangent(self, source: fx.Node) -> None:
        node = Node(
            name=unique_name("loss_gradient", self.taken),
            op="aten.ones.default",
            role=Role.CONSTANT,
            phase=Phase.BACKWARD,
            kernel=Kernel.COPY,
            args=((),),
            kwargs=(("dtype", "torch.float32"),),
            outputs=self.recorder.specs(source.meta["val"]),
        )
        self._append(source, node, varies=False)

    def _add_call(self, source: fx.Node, module: str) -> None:
        self._check_operator(source)
        args, kwargs = self.recorder.arguments(source, self.index_of)
        outputs = self.recorder.specs(source.meta["val"])
        op = str(source.target)
        backward, adds = is_backward(source), is_gradient_sum(source)
        producers = [_origin(p) for p in source.all_input_nodes]
        varies = any(self.index_of[p] in self.varying for p in producers)
        constant = not varies and not any(any(spec.batch_dims) for spec in outputs)
        role = Role.CONSTANT if constant else Role.GRADIENT_SUM if adds else Role.OPERATOR
        short = "gradient_sum" if adds else f"backward/{operator_name(op)}" if backward else operator_name(op)
        forward = self.forward_of.get(source)
        node = Node(
            name=unique_name(f"{module}/{short}" if module else short, self.taken),
            op=op,
            role=role,
            phase=Phase.BACKWARD if backward else Phase.FORWARD,
            kernel=kernel_class(op, _values(source.args)),
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            forward=self.index_of.get(forward) if forward is not None and role is Role.OPERATOR else None,
            module=module,
            source=user_source(source.meta.get("stack_trace") or ""),
            flops=self._flops(source),
        )
        self._append(source, node, varies=varies)

    def _check_operator(self, source: fx.Node) -> None:
        target = source.target
        reason = ""
        if not isinstance(target, OpOverload):
            reason = "is no tensor operator; write it with plain torch operators"
        elif torch.Tag.nondeterministic_seeded in target.tags and kernel_class(str(target)) is not Kernel.ATTENTION:
            reason = "draws random numbers, which differ between devices; leave it out of the forward pass"
        elif any(tensor.layout != torch.strided for tensor in _tensors(source.meta["val"])):
            reason = "makes a sparse tensor, which no placement describes; keep tensors dense"
        if reason:
            place = user_source(source.meta.get("stack_trace") or "")
            raise NetworkError(f"network {self.network!r} cannot be captured: {target} at {place} {reason}")

    def _flops(self, source: fx.Node) -> float:
        values = _values(source.args)
        total = count_flops(source.target, values, dict(source.kwargs), source.meta["val"])  # type: ignore[arg-type]
        while total and total % self.traced.marker == 0:
            total /= self.traced.marker
        return total

    def _outputs(self) -> tuple[TensorRef, dict[str, TensorRef]]:
        output = next(node for node in self.traced.graph.nodes if node.op == "output")
        group_of = {name: names[0] for names in self.traced.names for name in names}
        losses: list[fx.Node] = []
        gradients: dict[str, TensorRef] = {}
        for value, description in zip(output.args[0], output.meta["desc"], strict=True):
            if isinstance(description, PlainAOTOutput):
                if not isinstance(value, fx.Node):
                    raise NetworkError(
                        f"network {self.network!r} returns {value!r}; its forward pass must return one scalar tensor, "
                        "the mean loss"
                    )
                losses.append(value)
            elif value is not None and not isinstance(description, GradAOTOutput):
                raise NetworkError(
                    f"network {self.network!r} changes {description.expr()} in its forward pass; a captured step "
                    "keeps no state besides parameters: remove the assignment"
                )
            elif value is not None and isinstance(description.grad_of, ParamAOTInput):
                gradients[group_of[description.grad_of.target]] = reference(value, self.index_of)
        shapes = [tuple(loss.meta["val"].shape) for loss in losses]
        if shapes != [()]:
            raise NetworkError(
                f"network {self.network!r} returns {len(losses)} tensors of shapes {shapes} at batch "
                f"{self.traced.marker}; its forward pass must return one scalar, the mean loss"
            )
        return reference(losses[0], self.index_of), gradients


def _origin(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in (value if isinstance(value, list | tuple) else [value]) if isinstance(item, torch.Tensor)]


def _values(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.meta["val"]
    if isinstance(value, (tuple, list)):
        return tuple(_values(item) for item in value)
    return value
