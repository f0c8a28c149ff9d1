"""Every rule of every operator, run on cut tensors in float64 and compared with the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.graph.attention import WRITTEN_OUT, with_attention
from planner.graph.capture import capture_module
from planner.graph.norms import RMS_NORM, RMS_NORM_BACKWARD, with_norms
from planner.graph.operator_graph import PLACES, Node, OperatorGraph
from planner.graph.scaling import at_batch, at_precision
from planner.networks.loading import load_network
from planner.networks.zoo.table import ZOO
from planner.sharding import rules as rule_table
from planner.sharding.local_call import operator
from planner.sharding.placement import PARTIAL, REPLICATE
from planner.sharding.rules import Rule, rules_for
from tests.planner.sharding.checking import distinct_nodes, divides, rule_error
from tests.planner.sharding.single_nodes import Given, indices, one_node
from tests.planner.sharding.small_networks import NETWORKS, BatchTensor, graph

TOLERANCE = 1e-10


def compositions(rules: tuple[Rule, ...], pairs: int, seed: int) -> Iterator[tuple[tuple[Rule, ...], tuple[int, ...]]]:
    """One axis of two ranks; two axes of two: some pairs of rules, and every rule twice (a dim cut by both)."""
    for rule in rules:
        yield (rule,), (2,)
    everything = list(product(rules, rules))
    for pair in random.Random(seed).sample(everything, min(pairs, len(everything))):
        yield pair, (2, 2)
    for rule in rules[1:]:
        yield (rule, rule), (2, 2)


def check(network: OperatorGraph, node: Node, pairs: int = 6, seed: int = 0) -> int:
    checked = 0
    for rules, sizes in compositions(rules_for(network, node), pairs, seed):
        if divides(network, node, rules, sizes):
            error = rule_error(network, node, rules, sizes, seed)
            assert error < TOLERANCE, (node.op, node.args, node.outputs, rules)
            checked += 1
    return checked


@pytest.mark.parametrize("name", NETWORKS)
def test_every_pair_of_rules_of_small_networks(name: str) -> None:
    network = graph(name)
    assert sum(check(network, node, pairs=1000) for node in distinct_nodes(network)) > 500


@pytest.mark.parametrize("kind", WRITTEN_OUT)
def test_every_pair_of_rules_of_attention_that_is_written_out(kind: str) -> None:
    network = with_attention(graph("llama"), kind)
    nodes = [node for node in distinct_nodes(network) if node.op.startswith("meshwright.")]
    assert {node.op for node in nodes} == {node.op for node in network.nodes if node.op.startswith("meshwright.")}
    assert sum(check(network, node, pairs=1000) for node in nodes) >= 5 * len(nodes)


def test_every_pair_of_rules_of_norms_that_are_one_operator() -> None:
    network = with_norms(graph("llama"), "fused")
    nodes = [node for node in distinct_nodes(network) if node.op in (RMS_NORM, RMS_NORM_BACKWARD)]
    assert {node.op for node in nodes} == {RMS_NORM, RMS_NORM_BACKWARD}
    assert sum(check(network, node, pairs=1000) for node in nodes) >= 5 * len(nodes)


@pytest.mark.slow
def test_resnet50() -> None:
    """The built-in network, on small images: the channels are what its rules are about."""
    make = ZOO["resnet50"].make
    assert make is not None
    small = (
        BatchTensor(name="image", kind="image", shape=(3, 32, 32)),
        BatchTensor(name="label", kind="label", dtype="int64", high=1000),
    )
    network = at_precision(at_batch(capture_module(make, small, name="resnet50"), 4), "float64")
    assert sum(check_each(network, node) for node in distinct_nodes(network)) > 400


def check_each(network: OperatorGraph, node: Node) -> int:
    """Every rule on one axis of two ranks."""
    rules = [rule for rule in rules_for(network, node) if divides(network, node, (rule,), (2,))]
    for rule in rules:
        assert rule_error(network, node, (rule,), (2,)) < TOLERANCE, (node.op, node.args, rule)
    return len(rules)


TINY: dict[str, dict[str, object]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 16},
    "bert": {},
    "llama": {"num_key_value_heads": 2},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("kind", TINY)
def test_hugging_face_networks(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="configs are read by transformers")
    shared = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = {"model_type": kind, "vocab_size": 24, "max_position_embeddings": 16, **shared, **TINY[kind]}
    if kind == "gpt2":
        config = {name: value for name, value in config.items() if name not in (*shared, "max_position_embeddings")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    captured = load_network(f"hf:{tmp_path / 'config.json'}", sequence_length=8).capture()
    network = at_precision(at_batch(captured, 8), "float64")
    assert sum(check(network, node) for node in distinct_nodes(network)) > 500


def pointwise_call(op: str) -> tuple[Any, ...]:
    """Arguments by the operator's schema: tensors that broadcast, small numbers, defaults left out."""
    shapes, call = [(4, 8), (8,), (4, 1)], []
    integers = "bitwise" in op or "shift" in op
    for argument in operator(op)._schema.arguments:
        if argument.kwarg_only or argument.has_default_value():
            break
        kind = str(argument.type)
        if "Tensor" in kind:
            bare = "backward" in op or "copy" in op
            dtype = "bool" if argument.name in ("condition", "mask") else "int64" if integers else "float64"
            call.append(Given(shapes[0] if bare else shapes[len(call) % 3], dtype))
        elif "number" in kind or "Scalar" in kind or kind in ("float", "int"):
            call.append(2 if integers else 0.0 if "fill" in op or "where" in op else 0.5)
        elif kind == "bool":
            call.append(False)
        elif "Optional" in kind:
            call.append(None)
    return tuple(call)


POINTWISE = sorted({*rule_table._POINTWISE, *rule_table._LINEAR})
BY_HAND = {
    "aten.complex.default",
    "aten.div.Tensor_mode",
    "aten.div.Scalar_mode",
    "aten.clamp.default",
    "aten.clamp.Tensor",
}


@pytest.mark.parametrize("op", [op for op in POINTWISE if op not in BY_HAND])
def test_pointwise(op: str) -> None:
    call = pointwise_call(op)
    if op == "aten.masked_fill.Tensor":
        call = (Given((4, 8)), Given((4, 8), "bool"), Given(()))
    assert check(*one_node(op, *call)) > 1


X, G, I2 = Given((4, 8)), Given((4, 8, 4)), indices(4, 2)
IMAGE, CONV = Given((4, 8, 6, 6)), ([1, 1], [1, 1], [1, 1])
STATISTICS = (None, None, Given((8,)), Given((8,)), True, 1e-5, [True, True, True])
HEADS, KEYS, MASK = Given((4, 4, 6, 2)), Given((4, 2, 6, 2)), Given((4, 1, 6, 6))
VIDEO = Given((4, 8, 4, 4, 4))
SMOOTH = ("upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa")
CALLS: list[tuple[Any, ...]] = [
    ("aten.div.Tensor_mode", X, X),
    ("aten.div.Scalar_mode", X, 2),
    ("aten.reshape.default", G, [4, 32]),
    ("aten._unsafe_view.default", G, [4, 32]),
    ("aten.flatten.using_ints", G, 0, 1),
    ("aten.unflatten.int", X, 1, [4, 2]),
    ("aten.squeeze.default", Given((4, 1, 8))),
    ("aten.squeeze.dim", Given((4, 1, 8)), 1),
    ("aten.squeeze.dims", Given((4, 1, 8, 1)), [1, 3]),
    ("aten.unsqueeze.default", X, 1),
    ("aten.permute.default", G, [2, 0, -2]),
    ("aten.transpose.int", G, 0, -1),
    ("aten.expand.default", Given((8,)), [4, 8]),
    ("aten.expand.default", Given((4, 1)), [2, -1, 8]),
    ("aten.split_with_sizes.default", X, [2, 6], 1),
    ("aten.chunk.default", G, 2, -1),
    ("aten.cat.default", [G, G], 1),
    ("aten.stack.default", [X, X], 1),
    ("aten.select.int", G, 1, 3),
    ("aten.select_backward.default", X, [4, 3, 8], 1, 2),
    ("aten.unbind.int", G, 1),
    ("aten.slice.Tensor", G, 1, 0, 8),
    ("aten.slice.Tensor", G, 1, 2, 7, 2),
    ("aten.slice_backward.default", X, [4, 16], 1, 4, 12, 1),
    ("aten.repeat.default", X, [1, 2]),
    ("aten.repeat.default", X, [2, 1, 1]),
    ("aten.constant_pad_nd.default", X, [1, 2]),
    ("aten.constant_pad_nd.default", X, [1, -1], 2.0),
    ("aten.flip.default", G, [1]),
    ("aten.roll.default", G, [1], [1]),
    ("aten.roll.default", G, [1]),
    ("aten.tril.default", G),
    ("aten.triu.default", G),
    ("aten.full.default", [4, 8], 2.0, {"dtype": torch.float64}),
    ("aten.zeros.default", [4, 8], {"dtype": torch.float64}),
    ("aten.new_zeros.default", Given((4, 1)), [4, 8]),
    ("aten.new_full.default", X, [8], 3.0),
    ("aten.new_ones.default", X, [4, 8]),
    ("aten.new_empty.default", X, [4, 8]),
    ("aten.new_empty_strided.default", X, [4, 8], [1, 4]),
    ("aten.sum.default", X),
    ("aten.mean.default", X),
    ("aten.mean.dim", G, [0, -1], True),
    ("aten.amax.default", G, [0, -1]),
    ("aten.amin.default", G, [0, -1]),
    ("aten.clamp.default", X, -0.5, 0.5),
    ("aten.clamp.Tensor", X, Given((8,))),
    ("aten.argmax.default", G, 1),
    ("aten.argmax.default", G),
    ("aten.max.default", G),
    ("aten.max.dim", G, 1),
    ("aten.min.dim", G, -1, True),
    ("aten.any.default", X),
    ("aten.any.dim", X, 1),
    ("aten.all.default", X),
    ("aten.all.dim", X, 1),
    ("aten.var.correction", G, [1]),
    ("aten.var_mean.correction", G, [1], {"keepdim": True}),
    ("aten.cumsum.default", X, 0),
    ("aten.topk.default", G, 2, 1),
    (PLACES, indices(4, 8), 2, 8, 1),
    ("aten.sort.default", X),
    ("aten._softmax.default", G, 1, False),
    ("aten._softmax_backward_data.default", G, G, 1, torch.float64),
    ("aten.bmm.default", Given((4, 8, 4)), Given((4, 4, 8))),
    ("aten.mv.default", X, Given((8,))),
    ("aten.dot.default", Given((8,)), Given((8,))),
    ("aten.addmm.default", X, Given((4, 4)), X),
    ("aten.addmm.default", Given((8,)), Given((4, 4)), X, {"alpha": 2, "beta": 3}),
    ("aten.baddbmm.default", Given((4, 1, 8)), Given((4, 8, 4)), Given((4, 4, 8))),
    ("aten.convolution.default", IMAGE, Given((8, 4, 3, 3)), Given((4,)), *CONV, True, [0, 0], 1),
    ("aten.convolution.default", Given((4, 8, 6)), Given((4, 8, 3)), Given((4,)), [1], [1], [1], False, [0], 1),
    ("aten.convolution.default", IMAGE, Given((16, 1, 3, 3)), Given((16,)), *CONV, False, [0, 0], 8),
    (
        "aten.convolution_backward.default",
        Given((4, 4, 6, 6)),
        IMAGE,
        Given((8, 4, 3, 3)),
        [4],
        *CONV,
        True,
        [0, 0],
        1,
        [True, True, True],
    ),
    ("aten.native_batch_norm_backward.default", IMAGE, IMAGE, None, *STATISTICS),
    ("aten.native_batch_norm_backward.default", IMAGE, IMAGE, Given((8,)), *STATISTICS),
    ("aten._native_batch_norm_legit.no_stats", IMAGE, None, None, True, 0.1, 1e-5),
    ("aten._native_batch_norm_legit_functional.default", IMAGE, *[Given((8,))] * 4, True, 0.1, 1e-5),
    ("aten.embedding_dense_backward.default", Given((4, 2, 8)), I2, 8, 3, False),
    ("aten.embedding_dense_backward.default", Given((4, 2, 8)), I2, 8, -1, True),
    ("aten.gather.default", X, 1, I2),
    ("aten.gather.default", X, 0, indices(2, 8)),
    ("aten.gather.default", X, 1, indices(2, 8)),
    ("aten.scatter_add.default", X, 1, I2, Given((4, 2))),
    ("aten.scatter.src", X, 1, indices(4, 1), Given((4, 1))),
    ("aten.scatter.value", X, 1, I2, 1.5),
    ("aten.index.Tensor", G, [indices(6)]),
    ("aten.index.Tensor", G, [None, indices(2, 4)]),
    ("aten.index.Tensor", G, [indices(6), indices(6)]),
    ("aten.index.Tensor", G, [indices(6, 1), indices(2)]),
    ("aten.index.Tensor", G, [indices(6), None, indices(6)]),
    ("aten.index_put.default", G, [indices(1), indices(1)], Given((1, 4))),
    ("aten.index_put.default", G, [indices(6)], Given((8, 4)), True),
    ("aten.index_put.default", IMAGE, [None, None, indices(6, 1), indices(6)], Given((4, 8, 6, 6)), True),
    ("aten.index_put.default", IMAGE, [None, None, indices(3)], Given((8, 3, 6)), True),
    ("aten.index_put.default", IMAGE, [None, indices(3), None, indices(3)], Given((3, 4, 6))),
    ("aten._unsafe_index.Tensor", IMAGE, [None, None, indices(3, 1), indices(6)]),
    ("aten._unsafe_index_put.default", IMAGE, [None, None, indices(3, 1), indices(6)], Given((4, 8, 3, 6)), True),
    ("aten.native_group_norm.default", IMAGE, Given((8,)), Given((8,)), 4, 8, 36, 4, 1e-5),
    ("aten.native_group_norm.default", Given((4, 8, 6)), None, None, 4, 8, 6, 2, 1e-5),
    (
        "aten.native_group_norm_backward.default",
        *(IMAGE, IMAGE, Given((4, 4)), Given((4, 4)), Given((8,)), 4, 8, 36, 4, [True, True, True]),
    ),
    ("aten.nll_loss_forward.default", X, indices(4), None, 2, 3),
    ("aten.nll_loss_forward.default", X, indices(4), Given((8,)), 2, -100),
    ("aten.nll_loss_backward.default", Given(()), X, indices(4), None, 2, 3, Given(())),
    ("aten._adaptive_avg_pool2d.default", IMAGE, [3, 2]),
    ("aten._adaptive_avg_pool2d_backward.default", Given((4, 8, 3, 2)), IMAGE),
    ("aten._scaled_dot_product_flash_attention_for_cpu.default", HEADS, HEADS, HEADS, 0.0, False, {"attn_mask": MASK}),
    ("aten.arange.default", 8, {"dtype": torch.float64}),
    ("aten.eye.default", 8, {"dtype": torch.float64}),
    ("meshwright.dropout.default", IMAGE, 0.3),
    ("meshwright.masked_attention.default", *[HEADS] * 3, True, 3, 0, 0.7, 0.0, None),
    ("meshwright.masked_attention.default", *[HEADS] * 3, False, 2, 4, 0.7, 5.0, Given((4,))),
    (
        "meshwright.masked_attention_backward.default",
        *([HEADS] * 5 + [Given((4, 4, 6))]),
        True,
        3,
        0,
        0.7,
        0.0,
        Given((4,)),
    ),
    ("meshwright.masked_attention_backward.default", *([HEADS] * 5 + [Given((4, 4, 6))]), True, 0, 2, 0.7, 5.0, None),
    ("meshwright.linear_recurrence.default", *[HEADS] * 3, Given((4, 4, 6)), Given((4, 4, 6)), 2),
    ("meshwright.linear_recurrence.default", *[KEYS] * 2, HEADS, Given((4, 4, 6)), None, 2),
    ("meshwright.linear_recurrence_backward.default", *[HEADS] * 4, *[Given((4, 4, 6))] * 2, 2),
    ("meshwright.linear_recurrence_backward.default", HEADS, *[KEYS] * 2, HEADS, Given((4, 4, 6)), None, 2),
    ("meshwright.ctc_loss.default", Given((4, 8, 6)), indices(4, 3), 5),
    ("meshwright.ctc_loss_backward.default", Given((4,)), Given((4, 8, 6)), indices(4, 3), 5),
    ("aten._weight_norm_interface.default", G, Given((4, 1, 1)), 0),
    ("aten._weight_norm_interface.default", G, Given((1, 1, 4)), 2),
    ("aten._weight_norm_interface_backward.default", G, G, Given((4, 1, 1)), Given((4, 1, 1)), 0),
    ("aten.complex.default", X, X),
    ("aten._conj.default", Given((4, 8), "complex128")),
    ("aten.argmin.default", G, 1),
    ("aten.min.default", G),
    ("aten.prod.default", G),
    ("aten.prod.dim_int", G, 1),
    ("aten.logsumexp.default", G, [1]),
    ("aten.linalg_vector_norm.default", G, 2.0, [1], True),
    ("aten.cumprod.default", G, 1),
    ("aten.logcumsumexp.default", G, 1),
    ("aten._safe_softmax.default", G, 1),
    ("aten.glu.default", G, 1),
    ("aten.glu_backward.default", Given((4, 4, 4)), G, 1),
    ("aten.index_select.default", G, 1, indices(6)),
    ("aten.index_add.default", G, 1, indices(6), Given((4, 6, 4))),
    ("aten.unfold.default", G, 1, 4, 2),
    ("aten.unfold_backward.default", Given((4, 3, 4, 4)), [4, 8, 4], 1, 4, 2),
    ("aten.view_as_complex.default", Given((4, 8, 2))),
    ("aten.view_as_real.default", Given((4, 8), "complex128")),
    ("aten.binary_cross_entropy.default", X, X, None, 0),
    ("aten.binary_cross_entropy_backward.default", X, X, X, None, 0),
    ("aten.smooth_l1_loss.default", X, X, 0, 1.0),
    ("aten.smooth_l1_loss_backward.default", X, X, X, 0, 1.0),
    ("aten.huber_loss.default", X, X, 0, 1.0),
    ("aten.huber_loss_backward.default", X, X, X, 0, 1.0),
    ("aten.grid_sampler_2d.default", IMAGE, Given((4, 3, 2, 2)), 0, 0, False),
    (
        "aten.grid_sampler_2d_backward.default",
        Given((4, 8, 3, 2)),
        IMAGE,
        Given((4, 3, 2, 2)),
        0,
        0,
        False,
        [True, True],
    ),
    ("aten.pixel_shuffle.default", IMAGE, 2),
    ("aten.pixel_unshuffle.default", IMAGE, 2),
    *[(f"aten.{pad}1d.default", G, [1, 2]) for pad in ("reflection_pad", "replication_pad")],
    *[(f"aten.{pad}1d_backward.default", Given((4, 8, 7)), G, [1, 2]) for pad in ("reflection_pad", "replication_pad")],
    *[(f"aten.{pad}2d.default", IMAGE, [1, 2, 0, 1]) for pad in ("reflection_pad", "replication_pad")],
    *[
        (f"aten.{pad}2d_backward.default", Given((4, 8, 7, 9)), IMAGE, [1, 2, 0, 1])
        for pad in ("reflection_pad", "replication_pad")
    ],
    ("aten.upsample_nearest1d.default", G, [8]),
    ("aten.upsample_nearest1d_backward.default", Given((4, 8, 8)), [8], [4, 8, 4]),
    ("aten.upsample_nearest2d.default", IMAGE, [12, 12]),
    ("aten.upsample_nearest2d_backward.default", Given((4, 8, 12, 12)), [12, 12], [4, 8, 6, 6]),
    ("aten.upsample_linear1d.default", G, [8], False),
    ("aten.upsample_linear1d_backward.default", Given((4, 8, 8)), [8], [4, 8, 4], False),
    *[(f"aten.{up}.default", IMAGE, [12, 12], False) for up in SMOOTH],
    *[(f"aten.{up}_backward.default", Given((4, 8, 12, 12)), [12, 12], [4, 8, 6, 6], False) for up in SMOOTH],
    ("aten.avg_pool3d.default", VIDEO, [2, 2, 2], [2, 2, 2]),
    (
        "aten.avg_pool3d_backward.default",
        Given((4, 8, 2, 2, 2)),
        VIDEO,
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
        False,
        True,
        None,
    ),
    ("aten.max_pool3d_with_indices.default", VIDEO, [2, 2, 2], [2, 2, 2]),
    (
        "aten.max_pool3d_with_indices_backward.default",
        Given((4, 8, 2, 2, 2)),
        VIDEO,
        [2, 2, 2],
        [2, 2, 2],
        [0, 0, 0],
        [1, 1, 1],
        False,
        indices(4, 8, 2, 2, 2),
    ),
    ("aten._adaptive_avg_pool3d.default", VIDEO, [2, 2, 2]),
    ("aten._adaptive_avg_pool3d_backward.default", Given((4, 8, 2, 2, 2)), VIDEO),
]


def test_calls_cover_the_table() -> None:
    seen = {call[0] for call in CALLS} | set(POINTWISE) | {n.op for name in NETWORKS for n in graph(name).nodes}
    seen |= {n.op for kind in WRITTEN_OUT for n in with_attention(graph("llama"), kind).nodes}
    seen |= {n.op for n in with_norms(graph("llama"), "fused").nodes}
    creation = {"aten.arange.start", "aten.arange.start_step", "aten.scalar_tensor.default"}
    assert set(rule_table.TABLE) - seen - creation == set()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0].removeprefix("aten."))
def test_operator(call: tuple[Any, ...]) -> None:
    op, *arguments = call
    keywords = arguments.pop() if isinstance(arguments[-1], dict) else {}
    if op.endswith("_mode"):
        keywords = {"rounding_mode": "floor"}
    assert check(*one_node(op, *arguments, **keywords), pairs=12) >= 1


sizes = st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=1, max_size=4).map(tuple)


@st.composite
def regroupings(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of the same elements: random merges and splits of a list of factors, with ones put in."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=5))

    def shape() -> tuple[int, ...]:
        dims = [1]
        for factor in factors:
            if draw(st.booleans()):
                dims.append(factor)
            else:
                dims[-1] *= factor
        return tuple(dims)

    return shape(), shape()


@settings(max_examples=150, deadline=None)
@given(regroupings())
def test_any_view(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    check(*one_node("aten.view.default", Given(shapes[0]), list(shapes[1])), pairs=4)


@settings(max_examples=60, deadline=None)
@given(sizes, st.data())
def test_any_broadcast_and_reduction(shape: tuple[int, ...], data: st.DataObject) -> None:
    other = tuple(size if data.draw(st.booleans()) else 1 for size in shape)[data.draw(st.integers(0, len(shape))) :]
    check(*one_node("aten.mul.Tensor", Given(shape), Given(other)), pairs=4)
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, max_size=len(shape)))
    keep = data.draw(st.booleans())
    check(*one_node("aten.mean.dim", Given(shape), dims, keep), pairs=4)
    assume(dims)
    check(*one_node("aten.sum.dim_IntList", Given(shape), dims, keep), pairs=4)


WRONG = [
    ("aten.sum.dim_IntList", (X, [0]), Rule((0,), (REPLICATE,), True)),
    ("aten.exp.default", (X,), Rule((PARTIAL,), (PARTIAL,), False)),
    ("aten.add.Tensor", (X, X), Rule((PARTIAL, REPLICATE), (PARTIAL,), False)),
    ("aten._softmax.default", (X, 1, False), Rule((1,), (1,), True)),
    ("aten.t.default", (X,), Rule((0,), (0,), True)),
    ("aten.view.default", (G, [4, 32]), Rule((2,), (1,), True)),
    ("aten.mm.default", (Given((4, 4)), Given((4, 4))), Rule((1, REPLICATE), (1,), True)),
]


@pytest.mark.parametrize(("op", "arguments", "rule"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
def test_a_wrong_rule_is_found_out(op: str, arguments: tuple[Any, ...], rule: Rule) -> None:
    network, node = one_node(op, *arguments)
    assert rule not in rules_for(network, node)
    try:
        error = rule_error(network, node, (rule,), (2,))
    except RuntimeError:
        return
    assert error > 1e-3
