"""A whole training step on emulated ranks of a context axis: node by node, all ranks in step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import torch
from torch import Tensor

from planner.graph.attention import MASKED
from planner.graph.operator_graph import Node, OperatorGraph, Role, TensorRef
from planner.sharding.context import Algorithm, context_rules, positions_of, sequence_cut
from planner.sharding.local_context import own_part
from planner.sharding.local_operator import prepare
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.sequence import ATTENTION, sequence_length
from tests.planner.sharding.alone import Alone, call_operator

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

    def of(self, rank: int) -> RankPeers:
        return RankPeers(self, rank)


class RankPeers(Alone):
    """What one rank sends to the others, counted."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks, self.rank = ranks, rank

    def pass_on(self, tensors: tuple[Tensor, ...], axis: int) -> Callable[[], tuple[Tensor, ...]]:
        self.ranks.sent[self.rank] += sum(t.numel() for t in tensors)
        sent = tuple(t.clone() for t in tensors)

        def arrive() -> tuple[Tensor, ...]:
            received: tuple[Tensor, ...] = self.ranks.share(self.rank, sent)[self.rank - 1]
            return received

        return arrive

    def exchange(
        self, tensors: tuple[Tensor, ...], axis: int, split: int, join: int, *, all_to_all: bool = True
    ) -> tuple[Tensor, ...]:
        self.ranks.sent[self.rank] += sum(t.numel() for t in tensors)
        size = self.ranks.size
        pieces = self.ranks.share(self.rank, [t.chunk(size, split) for t in tensors])
        return tuple(torch.cat([piece[i][self.rank] for piece in pieces], join) for i in range(len(tensors)))


class Step:
    """One step of a graph beside its emulation; ``whole`` and ``pieces`` hold every tensor."""

    def __init__(self, graph: OperatorGraph, algorithm: Algorithm, size: int, *, causal: bool) -> None:
        self.graph, self.algorithm, self.size, self.causal = graph, algorithm, size, causal
        self.rules = context_rules(graph, algorithm)
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
        cut = sequence_cut(self.graph, self.rules, ref, placement)
        return [own_part(tensor, placement, cut, rank, self.size) for rank in range(self.size)]

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
        rules, size = (self.rules[index],), self.size
        operators = [prepare(self.graph, node, rules, (size,), (rank,)) for rank in range(size)]
        if not rules[0].messages:
            return [operators[rank](tensors[rank], Alone()) for rank in range(size)]
        exchanging = self.algorithm == "all_to_all"
        if node.forward in self.kept and exchanging:
            tensors = [[mine[0], *kept, *mine[6:]] for mine, kept in zip(tensors, self.kept[node.forward], strict=True)]
        before = sum(self.ranks.sent)
        results = self.ranks.run(lambda rank: operators[rank](tensors[rank], self.ranks.of(rank)))
        self.traffic[node.name] = (sum(self.ranks.sent) - before) // size
        if node.op in (ATTENTION, MASKED) and exchanging:
            self.kept[index] = [[*result[2:], result[1]] for result in results]
            everyone = torch.cat([result[1] for result in results], 1)
            return [(result[0], everyone[:, :, self.positions(rank)]) for rank, result in enumerate(results)]
        copies = max(message.divisor for message in rules[0].messages)
        return results if node.op == ATTENTION or copies == 1 else self._told_apart(index, results, copies)

    def _told_apart(self, index: int, results: list[Sequence[Tensor]], copies: int) -> list[Sequence[Tensor]]:
        """Gradients of each of the heads that are copies of one, once their sums are known to be right."""
        apart = [self.cut(TensorRef(index, output), 2) for output in (1, 2)]
        for rank, (_, *found) in enumerate(results):
            for one, expected in zip(found[:2], (pieces[rank] for pieces in apart), strict=True):
                sums = (tensor.unflatten(1, (-1, copies)).sum(2) for tensor in (one, expected))
                torch.testing.assert_close(*sums, rtol=1e-10, atol=1e-12)
        return [(result[0], *(pieces[rank] for pieces in apart), *result[3:]) for rank, result in enumerate(results)]


def _stored(graph: OperatorGraph, index: int) -> tuple[Tensor, ...]:
    """Random parameters and tokens."""
    spec = graph.nodes[index].outputs[0]
    generator = torch.Generator().manual_seed(index)
    bounds: Mapping[int, int | None] = {item.node: item.high for item in graph.inputs}
    if spec.dtype == "int64":
        return (torch.randint(0, bounds.get(index) or 2, spec.shape, generator=generator),)
    return (0.3 * torch.randn(spec.shape, generator=generator, dtype=getattr(torch, spec.dtype)),)
