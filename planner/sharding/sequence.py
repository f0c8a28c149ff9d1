"""Which dims of which tensors grow with the sequence, as `TensorSpec.batch_dims` says for the batch.

They are found by following the dims of the token inputs through the letters of the rule table, in both
directions: what is broadcast over the sequence, such as a table of positions, is found from its readers. The places
of an expert are for the tokens of a sequence, so their dim is one of them, though its size is rounded from the length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.graph.attention import MASKED, MASKED_BACKWARD
from planner.graph.operator_graph import PLACES, Node, OperatorGraph, TensorRef
from planner.sharding.rule_families import Family, view
from planner.sharding.rule_notation import FIXED, Call, CallLetters, Operand, call_of, labelled_inputs
from planner.sharding.rules import TABLE

TOKEN_KINDS = frozenset(("tokens", "next_tokens"))
ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu.default"
ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


@dataclass(frozen=True, slots=True)
class Span:
    """Where the sequence lies inside a dim: `length` steps of `stride` elements each, inside what it was merged with.

    The dim of ``(batch, length, hidden)`` has stride 1; merged to ``(batch, length * hidden)``, `hidden`.
    """

    stride: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceCut:
    """How ranks of a context axis share a dim: it holds sequences of `length` steps, each of `stride` elements.

    Each rank has one of equal pieces in a row, or with ``chunks`` 2 one from either end; ``axis`` is the number of the
    mesh axis.
    """

    axis: int
    length: int
    stride: int
    chunks: int


Spans = dict[TensorRef, dict[int, Span]]


def sequence_length(graph: OperatorGraph) -> int | None:
    """Tokens of a sample, or ``None`` for a network that reads no sequences."""
    lengths = {graph.nodes[ref.node].outputs[0].shape[dim] for ref, dim in _roots(graph)}
    return lengths.pop() if len(lengths) == 1 else None


def sequence_dims(graph: OperatorGraph) -> Mapping[TensorRef, tuple[int, ...]]:
    """List the dims that grow with the sequence of every tensor that has such, also those merged with the batch.

    >>> from planner.networks import load_network
    >>> graph = load_network("zoo:gpt2-tiny").capture()
    >>> dims = sequence_dims(graph)
    >>> product = next(i for i, node in enumerate(graph.nodes) if node.op == "aten.addmm.default")
    >>> dims[TensorRef(product)], graph.nodes[product].outputs[0].shape
    ((0,), (64, 128))
    """
    return {ref: tuple(sorted(found)) for ref, found in sequence_spans(graph).items()}


def sequence_spans(graph: OperatorGraph) -> Spans:
    """Find the dims that grow with the sequence, and where in them the sequence lies."""
    spans: Spans = {}
    length = sequence_length(graph)
    if length is None or length == 1:
        return spans
    for ref, dim in _roots(graph):
        spans.setdefault(ref, {})[dim] = Span(1, length)
    calls = [(index, node, call_of(graph, node)) for index, node in enumerate(graph.nodes) if node.op in TABLE]
    links = [(_tensors(index, node), call, _links(node.op, call)) for index, node, call in calls]
    changed = True
    while changed:
        found = [_follow(tensors, call, classes, spans) for tensors, call, classes in links]
        found += [_follow(tensors, call, classes, spans) for tensors, call, classes in reversed(links)]
        changed = any(found)
    return spans


def _roots(graph: OperatorGraph) -> Iterator[tuple[TensorRef, int]]:
    """Dims of the token inputs behind the batch."""
    for item in graph.inputs:
        spec = graph.nodes[item.node].outputs[0]
        if item.kind in TOKEN_KINDS and len(spec.shape) == 2:
            yield TensorRef(item.node), 1


def _tensors(index: int, node: Node) -> tuple[TensorRef, ...]:
    return (*node.tensor_inputs, *(TensorRef(index, output) for output in range(len(node.outputs))))


Class = tuple[tuple[int, int], ...]
"""Dims of one call that go together: tensor (inputs, then outputs) and dim."""


def _links(op: str, call: Call) -> tuple[Class, ...] | None:
    """Dims that go together, or ``None`` for a view, whose dims regroup."""
    family = TABLE[op]
    if family is view:
        return None
    labels = _labels(op, call, family)
    found: dict[object, list[tuple[int, int]]] = {}
    for tensor, (label, operand) in enumerate(labels):
        for dim, letter in enumerate(label[: operand.rank]):
            size = operand.extents[dim]
            # Dims that must not be sharded go together where they stand at the same place with the same size.
            key: object = letter if letter != FIXED else (dim, operand.rank, size)
            if size > 1:
                found.setdefault(key, []).append((tensor, dim))
    return tuple(tuple(members) for members in found.values() if len(members) > 1)


_ATTENTION: dict[str, tuple[tuple[str, ...], ...]] = {
    ATTENTION: (("bhqd", "bhkd", "bhkd"), ("bhqd", "bhq")),
    ATTENTION_BACKWARD: (("bhqd", "bhqd", "bhkd", "bhkd", "bhqd", "bhq"), ("bhqd", "bhkd", "bhkd")),
}
_ATTENTION[MASKED] = ((*_ATTENTION[ATTENTION][0], *("",) * 5, "h"), _ATTENTION[ATTENTION][1])
_ATTENTION[MASKED_BACKWARD] = tuple(
    (*labels, *more) for labels, more in zip(_ATTENTION[ATTENTION_BACKWARD], ((*("",) * 5, "h"), ("h",)), strict=True)
)


def _attention(op: str, call: Call) -> CallLetters:
    """Letters of every dim of an attention, also of those that cannot be sharded without messages."""
    arguments, outputs = _ATTENTION[op]
    mask = call.kwargs.get("attn_mask")
    keywords = {"attn_mask": "bhqk"[4 - mask.rank :]} if isinstance(mask, Operand) else {}
    return CallLetters(arguments=arguments, outputs=outputs, keywords=keywords)


def _labels(op: str, call: Call, family: Family) -> list[tuple[str, Operand]]:
    """Letters of the tensor inputs and outputs of a call."""
    layout = _attention(op, call) if op in _ATTENTION else family(call)
    labels = [(label, operand) for _, operand, label in labelled_inputs(call, layout)]
    labels += [
        ((label or "").partition("|")[0], operand) for label, operand in zip(layout.outputs, call.outputs, strict=False)
    ]
    return labels


def _follow(tensors: Sequence[TensorRef], call: Call, classes: tuple[Class, ...] | None, spans: Spans) -> bool:
    """Carry spans over from each tensor of a call to the others; whether anything new was found."""
    if classes is None:
        source, target = tensors[0], tensors[-1]
        left, right = call.tensor(0).extents, call.outputs[0].extents
        forward = _regroup(spans.get(source, {}), left, right)
        return _add(spans, target, forward) | _add(spans, source, _regroup(spans.get(target, {}), right, left))
    new = False
    if call.op == PLACES:
        given, place, kept, token = tensors
        if 1 in spans.get(given, {}):
            places = call.args[3]
            assert isinstance(places, int)
            for ref, found in ((place, spans[given][1]), (kept, spans[given][1]), (token, Span(1, places))):
                new |= _add(spans, ref, {1: found})
        return new
    for members in classes:
        span = next((spans[tensors[t]][d] for t, d in members if d in spans.get(tensors[t], {})), None)
        if span is not None:
            for tensor, dim in members:
                new |= _add(spans, tensors[tensor], {dim: span})
    return new


def _add(spans: Spans, ref: TensorRef, found: Mapping[int, Span]) -> bool:
    known = spans.get(ref, {})
    missing = {dim: span for dim, span in found.items() if dim not in known}
    if missing:
        spans[ref] = known | missing
    return bool(missing)


def _regroup(found: Mapping[int, Span], before: tuple[int, ...], after: tuple[int, ...]) -> dict[int, Span]:
    """Find the sequence among regrouped dims: elements keep their order, so also how far its steps lie apart.

    Where the sequence itself is cut into several dims, the leftmost one is taken: its chunks are the sequence's.
    """
    regrouped: dict[int, Span] = {}
    for dim, span in found.items():
        stride = span.stride * prod(before[dim + 1 :])
        end = stride * span.length
        for other, size in enumerate(after):
            inside = prod(after[other + 1 :])
            start = max(stride, inside)
            if size > 1 and start < min(end, inside * size) and start % inside == 0:
                regrouped[other] = Span(start // inside, min(end, inside * size) // start)
                break
    return regrouped
