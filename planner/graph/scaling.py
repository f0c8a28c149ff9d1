"""The same graph at another batch size or precision."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from planner.graph.kernel_shapes import is_product
from planner.graph.operator_graph import DTYPE_BYTES, Argument, Node, OperatorGraph, Role, TensorRef, TensorSpec
from planner.graph.recompute import KeptByGraph
from planner.graph.rewriting import wide_nodes
from simulator.errors import InputError
from simulator.program import Kernel, Phase

EIGHT_BITS = "float8_e4m3fn"
FOUR_BITS = "float4_e2m1fn"
NARROW_MULTIPLES = {EIGHT_BITS: 16, FOUR_BITS: 32}
"""Rows and columns of a weight come in so many numbers where products of 8 or 4 bits take it (16 bytes: cuBLASLt)."""
PRECISIONS = ("float64", "float32", "float16", "bfloat16", *NARROW_MULTIPLES)
CAPTURED_PRECISION = "float32"


def at_batch(graph: OperatorGraph, batch: int) -> OperatorGraph:
    """Return the graph with a micro-batch of `batch` samples over the whole mesh.

    Dims that grow with the batch are scaled, and the work of every node that touches one. What was made of a graph is
    kept as long as the graph is.
    """
    if batch < 1:
        raise InputError(f"batch size {batch} is not positive; give a whole number of samples")
    if batch == graph.batch_size:
        return graph
    return _SCALED.once(graph, batch, lambda: _scaled(graph, batch))


_SCALED = KeptByGraph[int, OperatorGraph]()


def _scaled(graph: OperatorGraph, batch: int) -> OperatorGraph:
    old = graph.batch_size
    scaled: dict[TensorSpec, TensorSpec] = {}
    outputs: dict[int, tuple[TensorSpec, ...]] = {}

    def scale(spec: TensorSpec) -> TensorSpec:
        if not any(spec.batch_dims):
            return spec
        if spec not in scaled:
            dims = zip(spec.shape, spec.batch_dims, strict=True)
            scaled[spec] = replace(spec, shape=tuple(d // old * batch if grows else d for d, grows in dims))
        return scaled[spec]

    def at(node: Node, works: int, grows: bool) -> Node:
        flops = node.flops / old**works * batch**works if works else node.flops
        if flops == node.flops and not grows:
            return node
        # Equal blocks keep the same objects.
        key = id(node.outputs)
        if key not in outputs:
            outputs[key] = tuple([scale(spec) for spec in node.outputs])
        return node.sized(outputs[key], flops)

    known = _GROWING.of(graph)
    if None not in known:
        known[None] = [
            (_batch_dims(graph, node) if node.flops else 0, any(any(spec.batch_dims) for spec in node.outputs))
            for node in graph.nodes
        ]
    nodes = tuple(at(node, *growing) for node, growing in zip(graph.nodes, known[None], strict=True))
    return replace(graph, nodes=nodes, batch_size=batch)


_GROWING = KeptByGraph[None, list[tuple[int, bool]]]()
"""Of each node of a graph the power of the batch with which its operations grow, and whether its outputs do."""


def at_precision(graph: OperatorGraph, dtype: str) -> OperatorGraph:
    """Return the graph (captured in float32) with every float32 tensor and dtype argument as `dtype`.

    In half the width, what norms of `planner.graph.rewriting` compute of a row stays in float32.
    In 8 bits tensors are bfloat16 and the products of linear layers cast their factors, forward and backward, as in
    Micikevicius et al., FP8 Formats for Deep Learning (arXiv:2209.05433); both formats are as fast. So it is in 4
    bits (NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149).
    """
    if dtype in NARROW_MULTIPLES:
        return _with_narrow_products(at_precision(graph, "bfloat16"), dtype)
    if dtype not in PRECISIONS:
        raise InputError(f"precision {dtype!r} is unknown; use one of {', '.join(PRECISIONS)}")
    if dtype == CAPTURED_PRECISION:
        return graph
    wide = wide_nodes(graph) if DTYPE_BYTES[dtype] < DTYPE_BYTES[CAPTURED_PRECISION] else frozenset()
    made: dict[TensorSpec, TensorSpec] = {}

    def narrowed(spec: TensorSpec) -> TensorSpec:
        if spec.dtype != CAPTURED_PRECISION:
            return spec
        if spec not in made:
            made[spec] = replace(spec, dtype=dtype)
        return made[spec]

    nodes = tuple(
        node
        if index in wide
        else replace(
            node,
            args=tuple(_with_dtype(argument, dtype) for argument in node.args),
            kwargs=tuple((key, _with_dtype(argument, dtype)) for key, argument in node.kwargs),
            outputs=tuple(map(narrowed, node.outputs)),
            product_dtype=dtype if node.product_dtype == CAPTURED_PRECISION else node.product_dtype,
        )
        for index, node in enumerate(graph.nodes)
    )
    return replace(graph, nodes=nodes)


def with_stored_weights(graph: OperatorGraph, stored: str) -> OperatorGraph:
    """The graph, as captured, of a network whose frozen weights are stored as `stored`, a key of `STORED_BYTES`.

    They are those of linear layers but for the last, as bitsandbytes has them. Products cast them, forward and again
    backward; trained weights stay.
    """
    frozen = {parameter.node for parameter in graph.parameters if parameter.gradient is None}
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(graph.nodes):
        if not (node.kernel is Kernel.VIEW and node.tensor_inputs):
            for ref in node.tensor_inputs:
                readers.setdefault(_viewed(graph, ref).node, []).append(index)
    # Of products that are run as one, each reads a weight of its own.
    products = {index for index, node in enumerate(graph.nodes) if is_product(replace(node, moved=()))}
    last = _last_products(graph)
    kept = last | {index for index, node in enumerate(graph.nodes) if node.forward in last}
    narrow = {
        weight
        for weight in frozen
        if weight in readers and all(i in products and i not in kept for i in readers[weight])
    }
    nodes = list(graph.nodes)
    for index, node in enumerate(graph.nodes):
        seen = _viewed(graph, TensorRef(index)).node
        if seen in narrow:
            nodes[index] = replace(node, outputs=tuple(replace(spec, dtype=stored) for spec in node.outputs))
        elif index in products and any(_viewed(graph, ref).node in narrow for ref in node.tensor_inputs[-2:]):
            nodes[index] = replace(node, product_dtype=node.outputs[0].dtype)
    return replace(graph, nodes=tuple(nodes))


def _with_narrow_products(graph: OperatorGraph, dtype: str) -> OperatorGraph:
    linear = {index for index, node in enumerate(graph.nodes) if is_product(node) and _reads_weight(graph, node, dtype)}
    last = _last_products(graph)
    narrow = {
        index
        for index, node in enumerate(graph.nodes)
        if is_product(node) and {index, node.forward} & linear and not {index, node.forward} & last
    }
    nodes = tuple(replace(n, product_dtype=dtype) if i in narrow else n for i, n in enumerate(graph.nodes))
    return replace(graph, nodes=nodes)


def _last_products(graph: OperatorGraph) -> set[int]:
    """Return the products of the forward pass that no later product depends on: they make the logits.

    They stay in 16 bits: Megatron-Core does not take its output layer from Transformer Engine, torchtitan's converter
    leaves ``output`` out (``filter_fqns``), and so does the recipe of arXiv:2509.25149.
    """
    found, before = set[int](), set[int]()
    for index, node in reversed(list(enumerate(graph.nodes))):
        if node.phase is not Phase.FORWARD:
            continue
        if is_product(node) and index not in before:
            found.add(index)
        if is_product(node) or index in before:
            before.update(ref.node for ref in node.tensor_inputs)
    return found


def _reads_weight(graph: OperatorGraph, node: Node, dtype: str) -> bool:
    """Whether a factor of a product is a parameter, or a view of one, that products in `dtype` take."""
    weights = [ref for ref in node.tensor_inputs[-2:] if graph.nodes[_viewed(graph, ref).node].role is Role.PARAMETER]
    return any(gcd(*graph.spec(ref).shape[-2:]) % NARROW_MULTIPLES[dtype] == 0 for ref in weights)


def _viewed(graph: OperatorGraph, ref: TensorRef) -> TensorRef:
    """The tensor that a view shows."""
    while graph.nodes[ref.node].role is Role.OPERATOR and graph.nodes[ref.node].kernel is Kernel.VIEW:
        ref = graph.nodes[ref.node].tensor_inputs[0]
    return ref


def _batch_dims(graph: OperatorGraph, node: Node) -> int:
    """The power of the batch with which a node's work grows: 2 where samples are compared with one another."""
    specs = (*node.outputs, *(graph.spec(ref) for ref in node.tensor_inputs))
    return max(sum(spec.batch_dims) for spec in specs)


def _with_dtype(argument: Argument, dtype: str) -> Argument:
    if isinstance(argument, TensorRef):
        return argument
    if isinstance(argument, tuple):
        return tuple(_with_dtype(item, dtype) for item in argument)
    return f"torch.{dtype}" if argument == f"torch.{CAPTURED_PRECISION}" else argument
