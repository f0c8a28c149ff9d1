"""Our rules beside DTensor's single-dim strategies, with every known difference and its reason.

DTensor is the seed of the table, not its authority: of torch 2.13 it is known to scale gradients of
``mse_loss`` on batch shards by the number of ranks (losses are sums here, so that rule is not needed), to
split convolutions by batch and batch norms by channel only, and to fail on some views of local tensors.
The registry is private: the tests skip where it is not as expected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from planner.graph.operator_graph import Node, OperatorGraph
from planner.sharding.local_call import Slot, local_call, operator
from planner.sharding.placement import PARTIAL, REPLICATE, Placement
from planner.sharding.rules import rules_for
from simulator.torch_versions import torch_version
from tests.planner.sharding.checking import distinct_nodes
from tests.planner.sharding.small_networks import NETWORKS, graph

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    STRATEGIES: dict[Any, Any] = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs  # type: ignore[attr-defined]
except (ImportError, AttributeError) as error:
    pytest.skip(f"this torch has no registry of single-dim strategies ({error})", allow_module_level=True)

Row = tuple[Placement, ...]

ONLY_OURS = {
    "aten.addmm.default": "the bias stays replicated under a partial output; DTensor wants a partial bias",
    "aten.convolution.default": "by channel; DTensor splits the batch only",
    "aten.convolution_backward.default": "by channel; DTensor splits the batch only",
    "aten._native_batch_norm_legit.no_stats": "by batch, synchronised; DTensor splits channels only",
    "aten.native_batch_norm_backward.default": "by batch, synchronised, and linear in the gradient",
    "aten.native_group_norm.default": "by channel in whole groups; DTensor splits the batch only",
    "aten.native_layer_norm_backward.default": "linear in the gradient",
    "aten.gelu_backward.default": "linear in the gradient",
    "aten.sigmoid_backward.default": "linear in the gradient",
    "aten.silu_backward.default": "linear in the gradient",
    "aten.tanh_backward.default": "linear in the gradient",
    "aten.threshold_backward.default": "linear in the gradient",
    "aten.clone.default": "passes partial sums on",
    "aten.embedding.default": "the indices of a masked look-up are replicated; DTensor writes them as partial",
    "aten.embedding_dense_backward.default": "by vocabulary",
    "aten.where.self": "linear in both values",
}
ONLY_THEIRS = {
    "aten._to_copy.default": "partial sums stop where the dtype changes: their terms would be rounded",
    "aten.mm.default": "partial sums stop at matrix products: the product would be done in full on every rank",
    "aten.addmm.default": "as mm; and the partial bias",
    "aten.embedding.default": "the indices of a masked look-up are replicated; DTensor writes them as partial",
}

if torch_version() >= (2, 14):
    # DTensor clones partial sums as they are, and has strategies of its new kind for losses, gathers and means too.
    del ONLY_OURS["aten.clone.default"]
    ONLY_OURS |= {
        "aten._log_softmax.default": "by class, with two small messages; DTensor gathers the classes",
        "aten._log_softmax_backward_data.default": "by class, and linear in the gradient",
        "aten.nll_loss_forward.default": "by class, each rank its own",
        "aten.nll_loss_backward.default": "by class, and linear in the gradient",
        "aten.mean.dim": "a sum of parts divided by the whole count; DTensor writes an average, which we do not have",
        "aten.gather.default": "linear in the values, and by class",
        "aten.scatter_add.default": "linear in both values",
        "aten.new_zeros.default": "made in the parts that are wanted, in DTensor whole",
    }
    ONLY_THEIRS |= {
        "aten.convolution.default": "by height and width where the kernel has one pixel",
        "aten.convolution_backward.default": "by height and width where the kernel has one pixel",
        "aten.gather.default": "the indices of a masked look-up are replicated; DTensor writes them as partial",
        "aten.new_zeros.default": "whole beside a value in parts, which is not read",
        "aten.nll_loss_backward.default": "a partial sum of weights, which a loss that is a sum does not read",
    }


def translated(placement: Any) -> Placement | None:
    """DTensor's placement in our numbers; ``None`` for an average, a maximum or a minimum, which we do not have."""
    if placement is None or isinstance(placement, Replicate):
        return REPLICATE
    if isinstance(placement, Partial):
        return PARTIAL if placement.reduce_op == "sum" else None
    return int(placement.dim)


def dtensor_rows(network: OperatorGraph, node: Node) -> set[Row]:
    """Strategies of a node as rows of outputs and inputs, without those that shard a dim of size 1."""
    call = local_call(network, node, (), (), (), None)
    metas = [
        TensorMeta(s.shape, torch.empty(s.shape, device="meta").stride(), getattr(torch, s.dtype)) for s in call.inputs
    ]

    def value(argument: Any) -> Any:
        if isinstance(argument, Slot):
            return metas[argument.position]
        return [value(item) for item in argument] if isinstance(argument, list) else argument

    found = STRATEGIES[operator(node.op)](
        operator(node.op), tuple(map(value, call.arguments)), {name: value(a) for name, a in call.keywords.items()}
    )
    shapes = [spec.shape for spec in (*call.outputs, *call.inputs)]
    rows: set[Row] = set()
    for strategy in found:
        row = tuple(map(translated, strategy))
        known = [placement for placement in row if placement is not None]
        splits_one = any(p >= 0 and shape and shape[p] == 1 for p, shape in zip(known, shapes, strict=False))
        if len(known) == len(row) and not splits_one and set(known) != {REPLICATE}:
            rows.add(tuple(known))
    return rows


def our_rows(network: OperatorGraph, node: Node) -> set[Row]:
    return {(*rule.outputs, *rule.inputs) for rule in rules_for(network, node)[1:]}


def without_missing_outputs(rows: set[Row], node: Node) -> set[Row]:
    """Rows with the placement of outputs that are not computed made equal."""
    missing = [i for i, spec in enumerate(node.outputs) if spec.shape == (0,)]
    return {tuple(REPLICATE if i in missing else p for i, p in enumerate(row)) for row in rows}


def compared() -> Iterator[tuple[OperatorGraph, Node]]:
    for name in NETWORKS:
        for node in distinct_nodes(graph(name)):
            if operator(node.op) in STRATEGIES and rules_for(graph(name), node)[1:]:
                yield graph(name), node


def differences() -> tuple[set[str], set[str]]:
    """Operators for which we have more, and for which DTensor has more."""
    ours_more, theirs_more = set(), set()
    for network, node in compared():
        ours = without_missing_outputs(our_rows(network, node), node)
        theirs = without_missing_outputs(dtensor_rows(network, node), node)
        ours_more |= {node.op} if ours - theirs else set()
        theirs_more |= {node.op} if theirs - ours else set()
    return ours_more, theirs_more


def test_enough_is_compared() -> None:
    assert len({node.op for _, node in compared()}) >= 25


def test_differences_are_the_known_ones() -> None:
    assert differences() == (set(ONLY_OURS), set(ONLY_THEIRS))


def test_matrix_products_agree_but_for_partial_inputs() -> None:
    for network, node in compared():
        if node.op == "aten.mm.default":
            theirs = {row for row in dtensor_rows(network, node) if PARTIAL not in row[1:]}
            assert our_rows(network, node) == theirs
