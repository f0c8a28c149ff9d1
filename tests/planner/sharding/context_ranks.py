"""A whole training step on emulated ranks of a context axis: node by node, all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.sharding.context import Algorithm, context_rules, positions_of
from planner.sharding.local_context import (
    exchanged_attention,
    exchanged_attention_backward,
    ring_attention,
    ring_attention_backward,
)
from planner.sharding.local_operator import call_operator, prepare
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.sequence import ATTENTION, ATTENTION_BACKWARD, Span, sequence_length, sequence_spans

Pieces = list[Tensor]


class Ranks:
    """The ranks of one context axis as threads that meet at every message."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = Barrier(size, timeout=60)
        self.board: list[Any] = [None] * size
        self.sent: list[int] = [0] * size

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        with ThreadPoolExecutor(self.size) as pool:
            return [future.result() for future in [pool.submit(work, rank) for rank in range(self.size)]]

    def share(self, rank: int, value: Any) -> list[Any]:
        self.board[rank] = value
        self.barrier.wait()
        everything = list(self.board)
        self.barrier.wait()
        return everything

    def pass_on(self, rank: int) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
        def send(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            self.sent[rank] += sum(t.numel() for t in tensors)
            received: tuple[Tensor, ...] = self.share(rank, tensors)[rank - 1]
            return received

        return send

    def exchange(self, rank: int) -> Callable[[Tensor, int, int], Tensor]:
        def swap(tensor: Tensor, split: int, join: int) -> Tensor:
            self.sent[rank] += tensor.numel()
            pieces = self.share(rank, tensor.chunk(self.size, split))
            return torch.cat([piece[rank] for piece in pieces], join)

        return swap


class Step:
    """One step of a graph beside its emulation; ``whole`` and ``pieces`` hold every tensor."""

    def __init__(self, graph: OperatorGraph, algorithm: Algorithm, size: int, *, causal: bool) -> None:
        self.graph, self.algorithm, self.size, self.causal = graph, algorithm, size, causal
        self.rules = context_rules(graph, algorithm)
        self.spans = sequence_spans(graph)
        self.ranks = Ranks(size)
        self.whole: dict[TensorRef, Tensor] = {}
        self.pieces: dict[TensorRef, Pieces] = {}
        self.kept: dict[int, list[Any]] = {}
        self.traffic: dict[str, int] = {}
        for index, node in enumerate(graph.nodes):
            self._run(index, node)

    def positions(self, rank: int) -> Tensor:
        length = sequence_length(self.graph)
        assert length is not None
        chunked = self.causal and self.algorithm == "ring"
        return torch.tensor(positions_of(length, rank, self.size, causal=chunked))

    def cut(self, ref: TensorRef, placement: int) -> Pieces:
        tensor = self.whole[ref]
        if placement == REPLICATE:
            return [tensor] * self.size
        span = self.spans[ref][placement]
        return [_taken(tensor, placement, span, self.positions(rank)) for rank in range(self.size)]

    def difference(self, ref: TensorRef, placement: int) -> float:
        """Largest difference of the ranks' pieces from the whole tensor, relative to the largest element of either."""
        whole, pieces = self.whole[ref].double(), [piece.double() for piece in self.pieces[ref]]
        if placement == PARTIAL:
            apart = (torch.stack(pieces).sum(0) - whole).abs()
        else:
            expected = self.cut(ref, placement)
            assert all(p.shape == e.shape for p, e in zip(pieces, expected, strict=True)), self.graph.nodes[ref.node].op
            apart = torch.stack([(p - e).abs().max() for p, e in zip(pieces, expected, strict=True)])
        largest = max(float(tensor.abs().max()) for tensor in (whole, *pieces))
        return float(apart.max()) / max(largest, 1e-30)

    def _run(self, index: int, node: Node) -> None:
        rule, refs = self.rules[index], node.tensor_inputs
        stored = node.op in (Role.PARAMETER, Role.INPUT, Role.CONSTANT)
        results = (
            _stored(self.graph, index) if stored else call_operator(self.graph, node, [self.whole[r] for r in refs])
        )
        self.whole.update((TensorRef(index, o), t) for o, t in enumerate(results))
        if stored or node.role is Role.CONSTANT:
            outputs = [
                [self.cut(TensorRef(index, o), p)[k] for o, p in enumerate(rule.outputs)] for k in range(self.size)
            ]
        else:
            inputs = [
                self.cut(r, p) if self.graph.nodes[r.node].role is Role.CONSTANT else self.pieces[r]
                for r, p in zip(refs, rule.inputs, strict=True)
            ]
            outputs = self._parts(index, node, [[tensor[k] for tensor in inputs] for k in range(self.size)])
        for output in range(len(node.outputs)):
            self.pieces[TensorRef(index, output)] = [parts[output] for parts in outputs]

    def _parts(self, index: int, node: Node, tensors: list[list[Tensor]]) -> list[Sequence[Tensor]]:
        if node.op in (ATTENTION, ATTENTION_BACKWARD) and self.rules[index].messages:
            before = sum(self.ranks.sent)
            results = self.ranks.run(lambda rank: self._attend(index, node, rank, tensors[rank]))
            self.traffic[node.name] = (sum(self.ranks.sent) - before) // self.size
            return results
        rules = (self.rules[index],)
        return [
            prepare(self.graph, node, rules, (self.size,), (rank,))(tensors[rank], _never) for rank in range(self.size)
        ]

    def _attend(self, index: int, node: Node, rank: int, tensors: list[Tensor]) -> Sequence[Tensor]:
        scale = dict(node.kwargs).get("scale")
        assert scale is None or isinstance(scale, float)
        backward = node.op == ATTENTION_BACKWARD
        if self.algorithm == "ring":
            places = self.positions if self.causal else None
            pass_on = self.ranks.pass_on(rank)
            if backward:
                gradient, query, key, value, output, normaliser = tensors
                saved = gradient, query, key, value, output, normaliser
                return ring_attention_backward(saved, places, rank=rank, size=self.size, scale=scale, pass_on=pass_on)
            query, key, value = tensors
            return ring_attention(query, key, value, places, rank=rank, size=self.size, scale=scale, pass_on=pass_on)
        order = torch.cat([self.positions(r) for r in range(self.size)]) if self.causal else None
        exchange = self.ranks.exchange(rank)
        if backward:
            assert node.forward is not None
            normaliser, kept = self.kept[node.forward][rank]
            return exchanged_attention_backward(tensors[0], kept, normaliser, order, scale=scale, exchange=exchange)
        output, normaliser, kept = exchanged_attention(*tensors[:3], order, scale=scale, exchange=exchange)
        self.kept.setdefault(index, [None] * self.size)[rank] = (normaliser, kept)
        everyone = torch.cat(self.ranks.share(rank, normaliser), 1)
        return output, everyone[:, :, self.positions(rank)]


def _stored(graph: OperatorGraph, index: int) -> tuple[Tensor, ...]:
    """Random parameters and tokens."""
    spec = graph.nodes[index].outputs[0]
    generator = torch.Generator().manual_seed(index)
    bounds: Mapping[int, int | None] = {item.node: item.high for item in graph.inputs}
    if spec.dtype == "int64":
        return (torch.randint(0, bounds.get(index) or 2, spec.shape, generator=generator),)
    return (0.3 * torch.randn(spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)),)


def _taken(tensor: Tensor, dim: int, span: Span, positions: Tensor) -> Tensor:
    """A rank's part of the sequence inside a dim."""
    apart = tensor.unflatten(dim, (-1, span.length, span.stride))
    return apart.index_select(dim + 1, positions).flatten(dim, dim + 2)


def _never(tensor: Tensor, axis: int) -> Tensor:
    raise AssertionError("only attention sends messages on a context axis")
