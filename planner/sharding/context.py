"""The rule of every operator along a context axis, on which the sequence is sharded everywhere.

Tokens, labels and activations are sharded on their sequence dim; a dim that merges batch and sequence is cut
along the sequence, so that every rank keeps its part of every sample and views need no message. Parameters are
whole, and the gradient terms of the ranks are partial: they add up over the axis once a step. A loss is partial
too, for a mean divides by the count of the whole sequence. Constants (positions, rotary tables, masks of
positions) are computed whole on every rank and sliced where they meet the sequence. Predicted tokens are an
input of their own, so nothing is shifted across ranks.

Experts have an equal part of their places for the tokens of each rank, which gives them out among its own: no message,
and the same result as long as no expert is out of places.

Attention alone needs other ranks' tokens. By ``ring`` keys and values go round while queries stay: with a causal
mask each rank holds two chunks of the sequence, one counted from its start and one from its end (`positions_of`),
so that all ranks have equal work in every turn. By ``all_to_all`` the sequence is exchanged for heads before
attention and back after it; the exchanged query, key, value and output are what is kept for the backward pass.
Attention over a part of the keys (`planner.graph.masked_attention`) runs by ``all_to_all`` alone, as in Transformer
Engine, whose rings know neither sinks nor windows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.graph.attention import MASKED, MASKED_BACKWARD
from planner.graph.operator_graph import PLACES, Argument, Node, OperatorGraph, Role, TensorRef
from planner.sharding.placement import PARTIAL, REPLICATE, Placement, placement_name
from planner.sharding.rule_families import created, view
from planner.sharding.rule_notation import InnerMessage, Rule, replicated
from planner.sharding.rules import TABLE, rules_for
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD, SequenceCut, Span, sequence_length, sequence_spans
from simulator.checks import near_divisors
from simulator.errors import UnsupportedError
from simulator.program import Collective, Kernel

Algorithm = Literal["ring", "all_to_all"]
ALGORITHMS: tuple[Algorithm, ...] = ("ring", "all_to_all")
_LENGTH_DIM = 2
_PLACES_DIM = 1
_LOOKUPS = ("aten.gather.default", "aten.scatter_add.default")
"""Operators that read their index as second tensor."""
_CAUSAL = {ATTENTION: 4, ATTENTION_BACKWARD: 7}
_DROPOUT = {ATTENTION: 3, ATTENTION_BACKWARD: 6}
_KEY_VALUE = {ATTENTION: (1, 2), ATTENTION_BACKWARD: (2, 3), MASKED: (1, 2), MASKED_BACKWARD: (2, 3)}
_BACKWARD = (ATTENTION_BACKWARD, MASKED_BACKWARD)
_COPYING = frozenset(("aten.view.default", "aten._unsafe_view.default", "aten.clone.default", "aten.unsqueeze.default"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextAxis:
    """What a network does on a context axis of any size.

    ``rules`` are aligned with ``graph.nodes``. Each rank holds ``chunks`` equal pieces of each of the ``lengths``, and
    an equal part of the ``places`` that experts have for the tokens of a sequence; ``heads`` are the numbers of heads
    that are dealt out over the ranks of this and the tensor axis (none for a ring).
    """

    algorithm: Algorithm
    rules: tuple[Rule, ...]
    lengths: tuple[int, ...]
    places: tuple[int, ...]
    chunks: int
    heads: tuple[int, ...]

    def obstacle(self, size: int, tensor: int = 1) -> str | None:
        """Say why an axis of `size` ranks, beside a tensor axis of `tensor` ranks, is impossible; None if it is not."""
        for length in self.lengths:
            if length % (size * self.chunks):
                parts = f"{size * self.chunks} equal parts" + (f", {self.chunks} a rank" if self.chunks > 1 else "")
                near = near_divisors(size, length // self.chunks)
                return f"context={size} cuts {length} tokens into {parts}; use {near}"
        for places in self.places:
            if places % size:
                near = near_divisors(size, places)
                return f"context={size} does not divide the {places} places that experts have for tokens; use {near}"
        for heads in self.heads:
            if heads % (size * tensor):
                product = f"context={size} × tensor={tensor}" if tensor > 1 else f"context={size}"
                return f"{product} does not divide {heads} heads, which all_to_all exchanges; use fewer, or ring"
        return None


def context_rules(graph: OperatorGraph, algorithm: Algorithm = "ring") -> tuple[Rule, ...]:
    """Find the rule of every node along a context axis; raises as `context_axis` does."""
    return context_axis(graph, algorithm).rules


def context_axis(graph: OperatorGraph, algorithm: Algorithm = "ring") -> ContextAxis:
    """Follow the sequence through the graph.

    Raises
    ------
    UnsupportedError
        If the network reads no sequences, or an operator cannot work on part of one; the message names it.
    """
    if sequence_length(graph) is None:
        raise UnsupportedError(
            f"network {graph.network!r} reads no token sequences of one length; leave the context axis out (cp=1)"
        )
    return _SequenceFollower(graph, algorithm).axis()


def positions_of(length: int, rank: int, size: int, *, causal: bool) -> tuple[int, ...]:
    """Positions of the tokens that a rank holds: under a causal mask one chunk from either end, else one chunk.

    >>> positions_of(8, 0, 2, causal=True), positions_of(8, 1, 2, causal=True)
    ((0, 1, 6, 7), (2, 3, 4, 5))
    """
    if not causal:
        part = length // size
        return tuple(range(rank * part, (rank + 1) * part))
    part = length // (2 * size)
    return (*range(rank * part, (rank + 1) * part), *range(length - (rank + 1) * part, length - rank * part))


class _SequenceFollower:
    """Finds rules node by node; ``placed`` holds the placement of every tensor so far."""

    def __init__(self, graph: OperatorGraph, algorithm: Algorithm) -> None:
        self.graph = graph
        self.algorithm = algorithm
        self.spans = sequence_spans(graph)
        self.placed: dict[TensorRef, Placement] = {}

    def axis(self) -> ContextAxis:
        rules = []
        for index, node in enumerate(self.graph.nodes):
            rule = self._rule(index, node)
            self.placed.update((TensorRef(index, output), p) for output, p in enumerate(rule.outputs))
            rules.append(rule)
        places = _places(self.graph)
        return ContextAxis(
            algorithm=self.algorithm,
            rules=tuple(rules),
            lengths=tuple(sorted({span.length for found in self.spans.values() for span in found.values()} - places)),
            places=tuple(sorted(places)),
            chunks=_chunks(self.graph, self.algorithm),
            heads=tuple(sorted(set(self._heads()))) if self.algorithm == "all_to_all" else (),
        )

    def _rule(self, index: int, node: Node) -> Rule:
        if node.role is Role.CONSTANT:
            return replicated(len(node.tensor_inputs), len(node.outputs))
        outputs = tuple(self._expected(node, TensorRef(index, o)) for o in range(len(node.outputs)))
        if node.role is Role.PARAMETER and outputs[0] is not None:
            raise self._refusal(node, "is a parameter with a dim along the sequence")
        if node.role in (Role.PARAMETER, Role.INPUT):
            return Rule((), tuple(REPLICATE if p is None else p for p in outputs), splits_work=False)
        inputs = tuple(self._read(node, ref) for ref in node.tensor_inputs)
        for rule in self._candidates(node, inputs, outputs):
            if rule.inputs == inputs and all(
                here == wanted if wanted is not None else here in (REPLICATE, PARTIAL)
                for here, wanted in zip(rule.outputs, outputs, strict=True)
            ):
                return rule
        names = ", ".join(map(placement_name, inputs)) or "nothing"
        raise self._refusal(node, f"cannot work on part of the sequence (it would read {names})")

    def _expected(self, node: Node, ref: TensorRef) -> Placement | None:
        """Sequence dim of a tensor, or None where it has none."""
        found = self.spans.get(ref, {})
        if len(found) > 1:
            raise self._refusal(node, "makes a tensor with two dims along the sequence")
        return next(iter(found), None)

    def _read(self, node: Node, ref: TensorRef) -> Placement:
        """Placement in which a tensor is read; a constant is sliced to fit."""
        if self.graph.nodes[ref.node].role is not Role.CONSTANT:
            return self.placed[ref]
        expected = self._expected(node, ref)
        return REPLICATE if expected is None else expected

    def _candidates(
        self, node: Node, inputs: tuple[Placement, ...], outputs: tuple[Placement | None, ...]
    ) -> Iterator[Rule]:
        if node.op in _CAUSAL and _LENGTH_DIM in inputs:
            if {*inputs, *outputs} == {_LENGTH_DIM} and not _argument(node, _DROPOUT[node.op]):
                yield Rule(inputs, inputs[: len(outputs)], splits_work=True, messages=self._messages(node))
            return
        if node.op in (MASKED, MASKED_BACKWARD):
            yield from self._masked(node, inputs, outputs)
            return
        if node.op == PLACES or (node.op in _LOOKUPS and self._own_places(node)):
            yield Rule(inputs, (_PLACES_DIM,) * len(outputs), splits_work=True)
        if TABLE.get(node.op) is created and outputs[0] is not None:
            yield Rule(inputs, (outputs[0],), splits_work=True)  # what is there gives the dtype alone
        if TABLE.get(node.op) is view and inputs[0] >= 0 and outputs[0] is not None:
            yield Rule(inputs, (outputs[0],), splits_work=True)
        yield from rules_for(self.graph, node)

    def _own_places(self, node: Node) -> bool:
        """Whether what a look-up reads at are the places of experts, which count a rank's own tokens."""
        source = self.graph.nodes[node.tensor_inputs[1].node]
        while source.kernel is Kernel.VIEW and source.tensor_inputs:
            source = self.graph.nodes[source.tensor_inputs[0].node]
        return source.op == PLACES and node.args[1] == _PLACES_DIM

    def _masked(
        self, node: Node, inputs: tuple[Placement, ...], outputs: tuple[Placement | None, ...]
    ) -> Iterator[Rule]:
        """Attention over a part of the keys: its sinks are whole, the terms of their gradient partial."""
        backward = node.op == MASKED_BACKWARD
        cut = 6 if backward else 3
        if self.algorithm != "all_to_all" or {*inputs[:cut], *outputs[: 3 if backward else 2]} != {_LENGTH_DIM}:
            return
        made = (_LENGTH_DIM,) * (3 if backward else 2)
        sinks = inputs[cut:]
        made += (PARTIAL if sinks else REPLICATE,) * backward
        if sinks in ((), (REPLICATE,)):
            yield Rule(inputs, made, splits_work=True, messages=self._messages(node))

    def _messages(self, node: Node) -> tuple[InnerMessage, ...]:
        """Collectives inside an attention or its gradient; heads that are copies of one are sent once."""
        divisor, backward = _copies(self.graph, node), node.op in _BACKWARD
        if self.algorithm == "ring":
            around = (2, 3, 7, 8) if backward else (1, 2)
            ring = InnerMessage(Collective.SEND, tensors=around, divisor=divisor, circulating=True, overlapped=True)
            home = InnerMessage(Collective.SEND, tensors=(7, 8), divisor=divisor)
            return (ring, home) if backward else (ring,)
        made = len(node.tensor_inputs)  # number of the first output behind the inputs
        alone, shared, last = ((0,), (made + 1, made + 2), (made,)) if backward else ((0,), (1, 2), (made,))
        exchange = Collective.ALL_TO_ALL
        return (
            InnerMessage(exchange, tensors=alone),
            InnerMessage(exchange, tensors=shared, divisor=divisor),
            InnerMessage(exchange, tensors=last),
        )

    def _heads(self) -> Iterator[int]:
        for heads, copies in attention_heads(self.graph):
            yield from (heads, heads // copies)

    def _refusal(self, node: Node, why: str) -> UnsupportedError:
        place = f" ({node.op}{f' at {node.source}' if node.source else ''})"
        return UnsupportedError(
            f"network {self.graph.network!r} cannot be sharded along its sequence: {node.name}{place} {why}; "
            "leave the context axis out (cp=1)"
        )


def sequence_cut(graph: OperatorGraph, rules: Sequence[Rule], ref: TensorRef, dim: int, axis: int = 0) -> SequenceCut:
    """How ranks of a context axis share a dim along the sequence, given the rule of every node on the axis."""
    length = sequence_length(graph)
    assert length is not None  # a network on a context axis reads sequences
    rings = (m.collective is Collective.SEND for rule in rules for m in rule.messages)
    chunks = _chunks(graph, "ring") if any(rings) else 1
    whole = graph.spec(ref).shape[dim] == length
    span = Span(1, length) if whole else sequence_spans(graph)[ref][dim]
    if span.length in _places(graph):
        chunks = 1
    return SequenceCut(axis=axis, length=span.length, stride=span.stride, chunks=chunks)


def _places(graph: OperatorGraph) -> set[int]:
    """Places that experts have for the tokens of a sequence, where they are fewer than these."""
    found = {place for node in graph.nodes if node.op == PLACES and isinstance(place := node.args[3], int)}
    return {place for place in found if place != sequence_length(graph)}


def copies_among(divisor: int, heads: int) -> int:
    """How many of so many heads on a rank are copies of one, where `divisor` are in the whole network.

    >>> copies_among(4, 8), copies_among(4, 2), copies_among(4, 3)
    (4, 2, 1)
    """
    if heads % divisor == 0:
        return divisor
    return heads if divisor % heads == 0 else 1


def _chunks(graph: OperatorGraph, algorithm: Algorithm) -> int:
    causal = any(node.op in _CAUSAL and bool(_argument(node, _CAUSAL[node.op])) for node in graph.nodes)
    return 2 if algorithm == "ring" and causal else 1


def attention_heads(graph: OperatorGraph) -> Iterator[tuple[int, int]]:
    """Heads of each attention, and how many of them in a row are copies of one head of keys and values."""
    for node in graph.nodes:
        if node.op in (ATTENTION, MASKED):
            yield graph.spec(node.tensor_inputs[0]).shape[1], _copies(graph, node)


def _copies(graph: OperatorGraph, node: Node) -> int:
    found = {_expanded(graph, node.tensor_inputs[position]) for position in _KEY_VALUE[node.op]}
    return found.pop() if len(found) == 1 else 1


def _expanded(graph: OperatorGraph, ref: TensorRef) -> int:
    """How many copies of a tensor lie in one that is made of them."""
    while True:
        node = graph.nodes[ref.node]
        if node.op == "aten.expand.default":
            return node.outputs[0].elements // graph.spec(node.tensor_inputs[0]).elements
        if node.op not in _COPYING:
            return 1
        ref = node.tensor_inputs[0]


def _argument(node: Node, position: int) -> Argument:
    return node.args[position] if position < len(node.args) else None
