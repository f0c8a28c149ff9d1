"""How much work and memory a local operator or an optimizer update takes: one count for search and lowering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.graph.fusion import COMPILER, LIBRARY, in_memory, lying_bytes
from planner.graph.operator_graph import DTYPE_BYTES, STORED_BYTES, Node, OperatorGraph, Role, TensorRef
from planner.graph.recompute import KeptByGraph
from simulator.errors import InputError
from simulator.kernels import ELEMENT_BYTES
from simulator.program import Collective, Kernel, Phase

Amount = TypeVar("Amount", float, NDArray[np.float64])
NARROW_RANGE = "float16"
"""The format whose range gradients may leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """What an optimizer keeps and moves for each trained number.

    ``states`` are float32 numbers kept beside the parameter; ``flops`` are those of one update. ``again`` are float32
    numbers that it moves beside what one pass over parameter, gradient and states does; ``sums`` are numbers of each
    parameter that it needs of the whole tensor, which ranks with shards of it add up before they update.
    """

    name: str
    states: int
    flops: int
    again: int = 0
    sums: int = 0


OPTIMIZERS: Mapping[str, Optimizer] = {
    "sgd": Optimizer(name="sgd", states=0, flops=2),
    "momentum": Optimizer(name="momentum", states=1, flops=4),
    "adam": Optimizer(name="adam", states=2, flops=12),
    "adamw": Optimizer(name="adamw", states=2, flops=14),
    # You et al., Large batch optimization for deep learning (arXiv:1904.00962), algorithm 2: Adam's direction is
    # written, read with the parameter for both norms, and both are read again for the update.
    "lamb": Optimizer(name="lamb", states=2, flops=20, again=5, sums=2),
}


LOOKUPS: Mapping[str, int] = {"embedding": 0, "gather": 0, "index_select": 0, "nll_loss_forward": 0}
"""Operators that read only as much of one input as they return: its position."""

LOGIT_BYTES: Mapping[str, float] = {
    "aten._log_softmax.default": 22.0,
    "aten.nll_loss_backward.default": 0.0,
    "aten._log_softmax_backward_data.default": 14.0,
}
"""Bytes that training software moves for each logit of 16 bits where the network has one operator in 16 bits.

Losses are computed in float32: logits are cast, and read for their maximum, their exponents and the sum of these; the
gradient is made where the exponents are and cast back (``megatron/core/tensor_parallel/cross_entropy.py``; PyTorch's
``cross_entropy`` of ``logits.float()``).
"""

SHAPE_ONLY: Mapping[str, int] = {"nll_loss_backward": 1}
"""Operators that need only the shape of one input: its position."""


def optimizer(name: str) -> Optimizer:
    """Look an optimizer up; raises InputError for one that is not known."""
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer {name!r} is not one of {', '.join(OPTIMIZERS)}; choose one of them")
    return OPTIMIZERS[name]


def state_bytes(update: Optimizer, dtype: str) -> int:
    """Bytes of optimizer state for each parameter element; low precision keeps a float32 copy as well."""
    size = max(4, DTYPE_BYTES[dtype])
    return update.states * size + (size if DTYPE_BYTES[dtype] < size else 0)


def update_traffic(update: Optimizer, dtype: str) -> int:
    """Bytes an update reads and writes for each element of a parameter whose gradient has its type."""
    size = DTYPE_BYTES[dtype]
    return round(update_bytes(update, size, float(size)))


def update_bytes(update: Optimizer, size: int, gradient_bytes: Amount) -> Amount:
    """Bytes an update reads and writes for each element.

    The gradient is read, every state read and written. A parameter with a float32 copy among the states is written
    only, another is read and written.

    Parameters
    ----------
    size, gradient_bytes
        Bytes of an element of the parameter and of its gradient.
    """
    wide = max(4, size)
    moved = (2 * update.states + update.again) * wide + (2 * wide + size if size < wide else 2 * size)
    return gradient_bytes + moved


def sum_bytes(update: Optimizer, dtype: str) -> int:
    """Bytes for each parameter of the message in which its ranks add up what the update needs of the whole tensor."""
    return update.sums * max(4, DTYPE_BYTES[dtype])


def traffic_bytes(graph: OperatorGraph, node: Node, shares: Sequence[Amount]) -> Amount:
    """Bytes a local operator reads and writes.

    Parameters
    ----------
    shares : sequence
        For each tensor input, then each output: the part of the tensor that is local.
    """
    total = shares[0] * 0.0
    if node.kernel is Kernel.VIEW:
        return total
    for size, share in zip(traffic_sizes(graph, node), shares, strict=True):
        total = total + share * size
    return total


def in_halves(node: Node) -> bool:
    """Whether a backward operator makes gradients of its input and of parameters, each with a kernel of its own.

    Libraries have one for each gradient of a convolution, and run those that are asked for.
    """
    if node.op != "aten.convolution_backward.default":
        return False
    given, *own = (spec.elements > 0 for spec in node.outputs)
    return given and any(own)


def traffic_sizes(graph: OperatorGraph, node: Node) -> list[float]:
    """Bytes that an operator with whole tensors reads of each tensor input, then writes of each output.

    What lies in memory once and is only repeated by an expansion is read once: repeats come from the caches. What a
    fused kernel keeps on the chip (`planner.graph.fusion`) does not count.
    """
    inputs = node.tensor_inputs
    sizes = [lying_bytes(graph, ref) for ref in inputs]
    sizes += [float(spec.size_bytes) for spec in node.outputs]
    name = node.op.split(".")[1] if "." in node.op else ""
    if name in LOOKUPS:
        sizes[LOOKUPS[name]] = 0.0
        sizes[len(inputs)] *= 2
    elif name in SHAPE_ONLY:
        sizes[SHAPE_ONLY[name]] = 0.0
    if graph.fusion and node.op in LOGIT_BYTES and DTYPE_BYTES[node.outputs[0].dtype] < 4:
        return [LOGIT_BYTES[node.op] * node.outputs[0].elements / len(sizes)] * len(sizes)
    if node.moved:
        sizes = [size * share for size, share in zip(sizes, node.moved, strict=True)]
    return sizes


def stored_elements(graph: OperatorGraph, tensor: TensorRef) -> float:
    """Elements of a tensor; of a weight that is stored narrower as many of the network's type as its bytes make."""
    spec = graph.spec(tensor)
    if spec.dtype not in STORED_BYTES:
        return float(spec.elements)
    return spec.size_bytes / DTYPE_BYTES[trained_dtype(graph)]


def trained_dtype(graph: OperatorGraph) -> str:
    """Type of the parameters' numbers, but for those that are stored narrower."""
    types = (graph.nodes[parameter.node].outputs[0].dtype for parameter in graph.parameters)
    return next((dtype for dtype in types if dtype not in STORED_BYTES), "float32")


def cast_bytes(graph: OperatorGraph, node: Node, shares: Sequence[Amount]) -> Amount:
    """Bytes that a matrix product moves to cast its local factors to `Node.product_dtype`.

    Parameters
    ----------
    shares : sequence
        As in `traffic_bytes`.
    """
    total = shares[0] * 0.0
    for position, size in cast_sizes(graph, node):
        total = total + shares[position] * size
    return total


def cast_sizes(graph: OperatorGraph, node: Node) -> list[tuple[int, float]]:
    """Both factors of a product by their place among its inputs, with the bytes that casting the whole of them moves.

    Each is read as it is and written narrow. A tensor is a factor of two products, forward and backward or twice
    backward, and cast for either: together as much as scaling by its largest value moves, which reads it once for that
    and once more to write both layouts (NVIDIA Transformer Engine, current scaling).

    A library's kernels write what they make for a product in its type, and keep it so for the backward pass; weights
    are cast once a step (``is_first_microbatch``). Gradients are left, which one kernel casts and transposes for both
    products (``cast_transpose`` of Transformer Engine), and what attention makes. A compiler finds the casts of one
    tensor and keeps one of them; weights are cast as shards, before they are gathered
    (``enable_fsdp_float8_all_gather`` of torchao).
    """
    places = range(len(node.tensor_inputs) - 2, len(node.tensor_inputs))
    specs = [(place, graph.spec(node.tensor_inputs[place])) for place in places]
    narrow = ELEMENT_BYTES[node.product_dtype]
    if any(spec.dtype in STORED_BYTES for _, spec in specs):
        # Weights that are stored narrower than the product takes them are read, and written as it takes them.
        return [(p, float(s.size_bytes + s.elements * narrow)) for p, s in specs if s.dtype in STORED_BYTES]
    if graph.fusion == COMPILER:
        parts = [_part_of_one_cast(graph, node, node.tensor_inputs[place]) for place in places]
        return [(p, part * (s.size_bytes + s.elements * narrow)) for (p, s), part in zip(specs, parts, strict=True)]
    if graph.fusion != LIBRARY:
        return [(p, float(s.size_bytes + s.elements * narrow)) for p, s in specs]
    parts = [_cast_part(graph, node, node.tensor_inputs[place]) for place in places]
    return [(p, part * (s.size_bytes + 2 * s.elements * narrow)) for (p, s), part in zip(specs, parts, strict=True)]


def _part_of_one_cast(graph: OperatorGraph, node: Node, factor: TensorRef) -> float:
    """The part of the only cast of a factor that each of the narrow products of a pass has that read it."""
    base = in_memory(graph, factor)
    if graph.nodes[base.node].role is Role.PARAMETER:
        return 0.0
    readers = _NARROW_READERS.of(graph)
    if None not in readers:
        narrow = [other for other in graph.nodes if other.product_dtype]
        readers[None] = Counter(
            (in_memory(graph, ref), other.phase) for other in narrow for ref in other.tensor_inputs[-2:]
        )
    return 1.0 / readers[None][base, node.phase]


_NARROW_READERS = KeptByGraph[None, Counter[tuple[TensorRef, Phase]]]()


def _cast_part(graph: OperatorGraph, node: Node, factor: TensorRef) -> float:
    """The part of the cast of a factor that its product waits for, where a library fuses what it can."""
    base = in_memory(graph, factor)
    source = graph.nodes[base.node]
    if source.role is Role.PARAMETER:
        return 0.0
    if node.phase is Phase.BACKWARD:
        kept = node.forward is not None and base in map(
            partial(in_memory, graph), graph.nodes[node.forward].tensor_inputs
        )
        return 0.0 if kept else 0.5
    return float(source.kernel is Kernel.ATTENTION)


READ_AND_WRITTEN = 2.0


def packing_bytes(
    collective: Collective, payload_bytes: Amount, members: int, *, laid: bool = True, cut: bool = True
) -> Amount:
    """Bytes that are read and written to lay tensors together for a message, and to cut them out of one."""
    before = after = 0.0
    if laid and collective is Collective.ALL_GATHER:
        before = 1.0 / members
    if laid and collective in (Collective.REDUCE_SCATTER, Collective.ALL_TO_ALL):
        before = 1.0
    if cut and collective in (Collective.ALL_GATHER, Collective.ALL_TO_ALL):
        after = 1.0
    return READ_AND_WRITTEN * (before + after) * payload_bytes
