"""Numeric check of rules: cut random tensors as a rule says, run every rank's part, put them together, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from math import inf
from threading import Barrier

import torch
from torch import Tensor

from planner.graph.operator_graph import Argument, Node, OperatorGraph, TensorRef, TensorSpec
from planner.sharding.local_operator import prepare
from planner.sharding.placement import PARTIAL, Placements
from planner.sharding.rule_notation import Rule
from tests.planner.sharding.alone import Alone, call_operator

Coordinates = tuple[int, ...]
_POSITIVE = ("rsqrt", "sqrt", "log", "log2", "log10", "log1p", "pow", "reciprocal", "div", "xlogy", "fmod", "remainder")
_UNDEFINED = ("empty", "new_empty", "new_empty_strided", "empty_like")


def rule_error(
    graph: OperatorGraph, node: Node, rules: tuple[Rule, ...], sizes: tuple[int, ...], seed: int = 0
) -> float:
    """Largest difference between a sharded and a whole run of `node`, relative to the largest element.

    One rule and one size for each mesh axis. The graph should be in float64: then an exact rule gives
    some 1e-15. Wrong shapes, numbers that are not finite where they should be, and integers that
    differ give infinity. `divides` says whether the sizes fit.
    """
    inputs = random_inputs(graph, node, seed)
    whole: tuple[Tensor | None, ...] = call_operator(graph, node, inputs)
    ranks = list(product(*(range(size) for size in sizes)))
    pieces = [cut(tensor, tuple(rule.inputs[i] for rule in rules), sizes, seed + i) for i, tensor in enumerate(inputs)]
    results = _run_ranks(graph, node, rules, sizes, {rank: [piece[rank] for piece in pieces] for rank in ranks})
    worst = 0.0
    for i, expected in enumerate(whole):
        if expected is None or node.outputs[i].shape == (0,):
            continue
        placements = tuple(rule.outputs[i] for rule in rules)
        found, spread = assemble({rank: results[rank][i] for rank in ranks}, placements, sizes)
        worst = max(worst, _difference(expected, found, spread, node.op))
    return worst


def divides(graph: OperatorGraph, node: Node, rules: tuple[Rule, ...], sizes: tuple[int, ...]) -> bool:
    """Whether every sharded dim of every tensor divides by the axes that shard it."""
    specs = [graph.spec(ref) for ref in node.tensor_inputs]
    placed = [(spec, [rule.inputs[i] for rule in rules]) for i, spec in enumerate(specs)]
    placed += [(spec, [rule.outputs[i] for rule in rules]) for i, spec in enumerate(node.outputs)]
    for spec, placements in placed:
        shape = list(spec.shape)
        for placement, size in zip(placements, sizes, strict=True):
            if placement >= 0 and (shape[placement] % size or not shape[placement]):
                return False
            if placement >= 0:
                shape[placement] //= size
    return True


def distinct_nodes(graph: OperatorGraph) -> Iterator[Node]:
    """Operators of a graph, one of each set of arguments and tensor specs."""
    seen: set[object] = set()
    for node in graph.nodes:
        specs = tuple(graph.spec(ref) for ref in node.tensor_inputs)
        key = (node.op, _anonymous(node.args), tuple((k, _anonymous(v)) for k, v in node.kwargs), specs, node.outputs)
        if node.op.count(".") and key not in seen:
            seen.add(key)
            yield node


def _anonymous(argument: Argument) -> object:
    """Arguments with their types (1 is not True) and without the numbers of nodes."""
    if isinstance(argument, TensorRef):
        return TensorRef
    if isinstance(argument, tuple):
        return tuple(_anonymous(item) for item in argument)
    return type(argument), argument


def random_inputs(graph: OperatorGraph, node: Node, seed: int) -> list[Tensor]:
    """Tensors such as `node` could meet: finite results, indices in range."""
    generator = torch.Generator().manual_seed(seed)
    refs = node.tensor_inputs
    drawn: dict[TensorRef, Tensor] = {}
    for position, ref in enumerate(refs):
        if ref not in drawn:
            drawn[ref] = _draw(graph.spec(ref), node, position, _index_bound(graph, node), generator)
    return [drawn[ref] for ref in refs]


def _draw(spec: TensorSpec, node: Node, position: int, bound: int, generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, spec.shape, generator=generator).bool()
    if dtype.is_complex:
        return torch.randn(spec.shape, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(0, bound, spec.shape, generator=generator, dtype=dtype)
    values = torch.randn(spec.shape, generator=generator, dtype=dtype)
    name = node.op.split(".")[1]
    if name.startswith("binary_cross_entropy"):
        return values.sigmoid()
    return values.abs() + 0.5 if name in _POSITIVE else values


def _index_bound(graph: OperatorGraph, node: Node) -> int:
    """Number of values that integer inputs of an operator may take."""
    name = node.op.split(".")[1]
    specs = [graph.spec(ref) for ref in node.tensor_inputs]
    if name == "embedding_dense_backward":
        return node.outputs[0].shape[0]
    if name in ("gather", "scatter", "scatter_add"):
        dim = node.args[1]
        assert isinstance(dim, int)
        return specs[0].shape[dim] if specs[0].shape else 1
    if name == "expert_places":
        experts = node.args[2]
        assert isinstance(experts, int)
        return experts
    if name == "nll_loss_forward":
        return specs[0].shape[-1]
    if name == "nll_loss_backward":
        return specs[1].shape[-1]
    if name == "max_pool2d_with_indices_backward":
        return specs[1].shape[-1] * specs[1].shape[-2]
    if name in ("embedding", "index", "index_put", "index_select", "_unsafe_index", "_unsafe_index_put"):
        return min(specs[0].shape) if name != "embedding" else specs[0].shape[0]
    return 5


def cut(tensor: Tensor, placements: Placements, sizes: tuple[int, ...], seed: int = 0) -> dict[Coordinates, Tensor]:
    """Each rank's piece of a tensor; the terms of a partial one are random."""
    if not placements:
        return {(): tensor}
    placement, size = placements[0], sizes[0]
    if placement >= 0:
        parts: Sequence[Tensor] = [part.contiguous() for part in tensor.chunk(size, placement)]
    elif placement == PARTIAL:
        generator = torch.Generator().manual_seed(seed)
        terms = torch.randn((size - 1, *tensor.shape), generator=generator, dtype=torch.float64).to(tensor.dtype)
        parts = [*terms, tensor - terms.sum(0, dtype=tensor.dtype)]
    else:
        parts = [tensor] * size
    return {
        (place, *rest): piece
        for place, part in enumerate(parts)
        for rest, piece in cut(part, placements[1:], sizes[1:], seed + 1).items()
    }


def assemble(
    pieces: Mapping[Coordinates, Tensor], placements: Placements, sizes: tuple[int, ...]
) -> tuple[Tensor, float]:
    """Whole tensor of the ranks' pieces, and the largest difference between copies that should be equal."""
    if not placements:
        return pieces[()], 0.0
    inner = [
        assemble({rank[1:]: piece for rank, piece in pieces.items() if rank[0] == place}, placements[1:], sizes[1:])
        for place in range(sizes[0])
    ]
    parts, spread = [part for part, _ in inner], max(difference for _, difference in inner)
    if placements[0] >= 0:
        return torch.cat(parts, placements[0]), spread
    if placements[0] == PARTIAL:
        return torch.stack(parts).sum(0, dtype=parts[0].dtype), spread
    apart = [float((part - parts[0]).abs().max()) for part in parts if part.dtype.is_floating_point and part.numel()]
    unequal = any(p.shape != parts[0].shape or not (p.is_floating_point() or p.equal(parts[0])) for p in parts)
    return parts[0], max([spread, *apart, inf if unequal else 0.0])


def _difference(expected: Tensor, found: Tensor, spread: float, op: str) -> float:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return inf
    if op.split(".")[1] in _UNDEFINED or not expected.numel():
        return 0.0
    if expected.is_complex():
        parts = [torch.view_as_real(tensor.resolve_conj()) for tensor in (expected, found)]
        return _difference(parts[0], parts[1], spread, op)
    if not expected.is_floating_point():
        return 0.0 if expected.equal(found) else inf
    if not (expected.isfinite() == found.isfinite()).all():
        return inf
    finite = expected.isfinite()
    scale = max(float(expected[finite].abs().max()), 1e-30) if finite.any() else 1.0
    apart = float((expected - found)[finite].abs().max()) if finite.any() else 0.0
    return max(apart, spread) / scale


def _run_ranks(
    graph: OperatorGraph,
    node: Node,
    rules: tuple[Rule, ...],
    sizes: tuple[int, ...],
    tensors: Mapping[Coordinates, list[Tensor]],
) -> dict[Coordinates, tuple[Tensor, ...]]:
    """Run every rank's part; ranks that add up among each other run in threads."""
    operators = {rank: prepare(graph, node, rules, sizes, rank) for rank in tensors}
    if not any(rule.reduced_elements or rule.messages for rule in rules):
        return {rank: operators[rank](tensors[rank], Alone()) for rank in tensors}
    exchange, barrier = dict[Coordinates, Tensor](), Barrier(len(tensors), timeout=60)
    with ThreadPoolExecutor(len(tensors)) as pool:
        running = {
            rank: pool.submit(operators[rank], tensors[rank], _Summing(rank, exchange, barrier)) for rank in tensors
        }
        return {rank: future.result() for rank, future in running.items()}


class _Summing(Alone):
    """Sums over the ranks that differ from `rank` in one coordinate; all ranks call it in step."""

    def __init__(self, rank: Coordinates, shared: dict[Coordinates, Tensor], barrier: Barrier) -> None:
        self.rank, self.shared, self.barrier = rank, shared, barrier

    def sum(self, tensor: Tensor, axis: int) -> Tensor:
        """Add what all ranks of the axis have brought."""
        return self._met(tensor, axis, lambda brought: brought.sum(0))

    def largest(self, tensor: Tensor, axis: int) -> Tensor:
        """The largest of what all ranks of the axis have brought."""
        return self._met(tensor, axis, lambda brought: brought.amax(0))

    def _met(self, tensor: Tensor, axis: int, joined: Callable[[Tensor], Tensor]) -> Tensor:
        rank, shared = self.rank, self.shared
        shared[rank] = tensor
        self.barrier.wait()
        others = [r for r in sorted(shared) if r[:axis] + r[axis + 1 :] == rank[:axis] + rank[axis + 1 :]]
        found = joined(torch.stack([shared[r] for r in others]))
        self.barrier.wait()
        return found
