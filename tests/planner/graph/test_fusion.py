"""Fused kernels: what they read is written, chains pass through memory once, and the numbers stay."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from planner.cost.work import cast_bytes, cast_sizes, traffic_sizes
from planner.graph.folding import fold, unfold
from planner.graph.fusion import BATCH_NORMS, COMPILER, LIBRARY, LOSSES, PRODUCTS, SINGLE, in_memory, with_imbalance
from planner.graph.kernel_shapes import kernel_shape
from planner.graph.norms import norms_in
from planner.graph.operator_graph import Node, OperatorGraph, Role
from planner.graph.scaling import at_batch, at_precision
from planner.graph.serialization import graph_from_json, graph_to_json
from planner.networks import load_network
from simulator.errors import InputError
from simulator.program import Kernel, Phase
from tests.oracles.graph_interpreter import assert_equals_autograd
from tests.planner.graph.conftest import small_network

NETWORKS = ("zoo:gpt2-tiny", "zoo:llama2-7b", "zoo:mixtral-8x7b", "zoo:resnet50")
BYTES = 4
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 128, "n_positions": 32}


def captured(network: str, kind: str) -> OperatorGraph:
    return load_network(network, norms="fused", fusion=kind).capture()


def moved_by(graph: OperatorGraph, module: str, phase: Phase) -> float:
    """Bytes that operators of a module move between its products."""
    apart = (Kernel.MATMUL, Kernel.ATTENTION, Kernel.VIEW)
    nodes = [node for node in graph.nodes if node.module == module and node.phase is phase]
    return sum(sum(traffic_sizes(graph, n)) for n in nodes if n.role is Role.OPERATOR and n.kernel not in apart)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", [COMPILER, LIBRARY])
def test_what_a_kernel_reads_another_one_writes(network: str, kind: str) -> None:
    graph = captured(network, kind)
    assert any(node.moved for node in graph.nodes)
    written = {}
    for index, node in enumerate(graph.nodes):
        assert all(0.0 <= share <= (np.inf if node.kernel is Kernel.MATMUL else 1.0) for share in node.moved)
        shares = node.moved[len(node.tensor_inputs) :] or (1.0,) * len(node.outputs)
        written |= {(index, output): share for output, share in enumerate(shares)}
    for node in graph.nodes:
        for ref, share in zip(node.tensor_inputs, node.moved or (1.0,) * len(node.tensor_inputs), strict=False):
            source = graph.nodes[in_memory(graph, ref).node]
            # Keys that are repeated for the heads that share them are read as they lie.
            if share > 0 and node.kernel not in (Kernel.VIEW, Kernel.ATTENTION) and source.kernel is not Kernel.MATMUL:
                merged = source.role is Role.GRADIENT_SUM or source.kernel in (Kernel.COPY, Kernel.REDUCTION)
                assert written[in_memory(graph, ref)] > 0 or merged, (node.name, source.name)


def fuses(kind: str) -> bool:
    return kind in (COMPILER, LIBRARY)


def as_before(node: Node, plain: Node) -> Node:
    """A node as it was without fusion; losses, and rows of experts where kernels are fused, pass over memory."""
    passes = node.op in LOSSES or plain.kernel is Kernel.EMBEDDING
    return replace(node, moved=(), flops=plain.flops, kernel=plain.kernel if passes else node.kernel)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("kind", [COMPILER, LIBRARY])
def test_nothing_but_kernels_and_what_they_move_changes(network: str, kind: str) -> None:
    graph, plain = captured(network, kind), captured(network, "")
    assert graph.fingerprint == plain.fingerprint
    bare = zip(graph.nodes, plain.nodes, strict=True)
    assert replace(graph, fusion="", nodes=tuple(as_before(n, p) for n, p in bare)) == plain
    assert fold(unfold(graph)).runs == plain.runs
    assert graph_from_json(graph_to_json(graph)) == graph
    wide = {index for norm in norms_in(plain) for index in (*norm.forward, *norm.backward)}
    for index, (one, other) in enumerate(zip(graph.nodes, plain.nodes, strict=True)):
        if one.kernel is not Kernel.MATMUL and (fuses(kind) or index not in wide):
            assert sum(traffic_sizes(graph, one)) <= sum(traffic_sizes(plain, other))


def test_rotary_embeddings_read_and_write_queries_and_keys_once() -> None:
    graph = captured("zoo:llama2-7b", LIBRARY)
    turned = next(n.outputs[0] for n in graph.nodes if n.op == "aten.neg.default" and n.role is Role.OPERATOR)
    tables = 2 * 2 * prod(turned.shape[-2:]) * 2 * BYTES
    moved = moved_by(graph, "blocks.1.attention", Phase.FORWARD)
    assert moved == pytest.approx(2 * 2 * turned.elements * 2 * BYTES + tables)


def test_a_gate_is_one_kernel_each_way() -> None:
    """It reads gate and values and writes their product; backward reads these and a gradient and writes two."""
    graph = captured("zoo:llama2-7b", LIBRARY)
    nodes = {node.name: node for node in graph.nodes}
    wide = nodes["blocks.1/silu"].outputs[0].size_bytes
    forward = sum(sum(traffic_sizes(graph, nodes[f"blocks.1/{name}"])) for name in ("silu", "mul"))
    names = ("mul", "mul.1", "silu_backward")
    backward = sum(sum(traffic_sizes(graph, nodes[f"blocks.1/backward/{name}"])) for name in names)
    assert (forward, backward) == (pytest.approx(3 * wide), pytest.approx(5 * wide))


@pytest.mark.parametrize("kind", [BATCH_NORMS, LIBRARY, COMPILER])
def test_a_batch_norm_takes_its_relu_along(kind: str) -> None:
    """It reads an image and writes what the ReLU makes of it; backward reads two images and the norm's input."""
    graph = captured("zoo:resnet50", kind)
    image = next(n.outputs[0].size_bytes for n in graph.nodes if n.module == "layer1.0.bn1" and n.outputs[0].shape[2:])
    moved = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0.0)
    relu = next(n for n in graph.nodes if n.op == "aten.relu.default" and n.module == "layer1.0")
    gradient = [n for n in graph.nodes if n.op == "aten.threshold_backward.default" and n.module == "layer1.0"][-1]
    for node in (relu, gradient, *(n for n in graph.nodes if n.module == "layer1.0.bn1" and n.role is Role.OPERATOR)):
        moved[node.phase] += sum(traffic_sizes(graph, node))
    assert moved == pytest.approx({Phase.FORWARD: 2 * image, Phase.BACKWARD: 4 * image}, rel=0.01)


def test_software_that_fuses_batch_norms_alone_leaves_other_networks() -> None:
    graph, plain = captured("zoo:bert-large", BATCH_NORMS), captured("zoo:bert-large", SINGLE)
    assert [node.moved for node in graph.nodes] == [node.moved for node in plain.nodes]


def test_tokens_are_permuted_in_kernels_that_move_them_once() -> None:
    moved = {}
    for kind in ("", LIBRARY):
        graph = captured("zoo:mixtral-8x7b", kind)
        gather = next(
            node for node in graph.nodes if node.op == "aten.gather.default" and node.outputs[0].elements > 1e6
        )
        moved[kind] = moved_by(graph, gather.module, Phase.FORWARD) + moved_by(graph, gather.module, Phase.BACKWARD)
    assert moved[LIBRARY] < 0.55 * moved[""]


@pytest.mark.parametrize("kind", ["", COMPILER, LIBRARY])
def test_experts_of_a_busy_rank_do_more_of_all_that_they_do(kind: str) -> None:
    plain = captured("zoo:mixtral-8x7b", kind)
    busy = with_imbalance(plain, 1.5)
    assert with_imbalance(plain, 1.0) is plain
    grouped, routers = [], []
    for one, other in zip(plain.nodes, busy.nodes, strict=True):
        more = replace(other, moved=one.moved, flops=one.flops)
        assert more == one  # nothing else changes
        if one.op == "aten.bmm.default":
            grouped.append(other.flops / one.flops if one.flops else 1.5)
        elif other.flops != one.flops:
            routers.append(one.name)
    assert grouped == pytest.approx([1.5] * len(grouped))
    assert grouped
    assert not routers
    silu = next(i for i, node in enumerate(plain.nodes) if node.op == "aten.silu.default")
    assert sum(traffic_sizes(busy, busy.nodes[silu])) == pytest.approx(
        1.5 * sum(traffic_sizes(plain, plain.nodes[silu]))
    )


def test_a_product_sums_the_gradients_of_what_it_reads() -> None:
    """A gate and what it opens read the same tokens, in experts too."""
    graph = captured("zoo:mixtral-8x7b", LIBRARY)
    products = {
        node.module: node
        for node in graph.nodes
        if node.role is Role.GRADIENT_SUM
        and {graph.nodes[in_memory(graph, ref).node].op for ref in node.tensor_inputs} == {"aten.bmm.default"}
    }
    assert any("experts" in module for module in products)
    assert not any(sum(traffic_sizes(graph, node)) for node in products.values())


def test_grouped_products_have_rows_for_tokens_alone() -> None:
    """Two experts of eight for each token: places for a quarter more are not multiplied."""
    plain, graph = (captured("zoo:mixtral-8x7b", kind) for kind in ("", LIBRARY))
    pairs = [(a, b) for a, b in zip(plain.nodes, graph.nodes, strict=True) if a.op == "aten.bmm.default"]
    tokens = next(node.outputs[0].elements for node in graph.nodes if node.op == "aten.topk.default")
    multiplied = [(one, other) for one, other in pairs if other.timed_as is not Kernel.VIEW]
    assert 3 * len(multiplied) == 2 * len(pairs)  # a gate and what it opens are one product, each way
    for one, other in multiplied:
        wide, narrow = kernel_shape(plain, one), kernel_shape(graph, other)
        assert wide is not None
        assert narrow is not None
        assert prod(narrow.sizes) == pytest.approx(prod(wide.sizes) * other.flops / one.flops)
        experts, rows, _, depth = narrow.sizes
        assert tokens in (pytest.approx(experts * rows), pytest.approx(experts * depth))


@pytest.mark.parametrize(("network", "widths"), [("zoo:llama2-7b", (3, 2)), ("hf:gpt2-like", (3,))])
def test_products_of_one_tensor_are_one_product(network: str, widths: tuple[int, ...], tmp_path: Path) -> None:
    """Queries, keys and values, and a gate with what it opens: the first does all, each way; operations stay."""
    if network.startswith("hf:"):
        (tmp_path / "config.json").write_text(json.dumps(GPT2))
        network = f"hf:{tmp_path}"
    plain, graph = (captured(network, kind) for kind in ("", PRODUCTS))
    products = [n for n in graph.nodes if n.kernel is Kernel.MATMUL and n.moved]
    silent = [node for node in products if node.timed_as is Kernel.VIEW]
    whole = [node for node in products if any(node.moved)]
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        blocks = len([n for n in whole if n.phase is phase]) / len(widths) / (1 if phase is Phase.FORWARD else 2)
        each = sum(widths) - len(widths)
        assert len([n for n in silent if n.phase is phase]) == blocks * each * (1 if phase is Phase.FORWARD else 2)
    assert sum(n.flops for n in graph.nodes) == pytest.approx(sum(n.flops for n in plain.nodes))
    for node in whole:
        shape, before = (kernel_shape(g, g.nodes[graph.nodes.index(node)]) for g in (graph, plain))
        assert shape is not None
        assert before is not None
        ratios = sorted(one / other for one, other in zip(shape.sizes, before.sizes, strict=True))
        assert ratios[:3] == pytest.approx([1.0] * 3)
        assert ratios[3] == pytest.approx(3.0) or ratios[3] == pytest.approx(2.0)
    assert all(kernel_shape(graph, node) is None for node in silent)


def recurrent() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """An LSTM whose first states are zeros that no operator reads anything for."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(8, 8, batch_first=True)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.cells(features)[0].square().sum()

    return Recurrent(), (torch.zeros(2, 3, 8),)


def test_a_recurrent_network_begins_with_states_that_nothing_writes() -> None:
    """It ended in an IndexError."""
    graph = captured(f"py:{__name__}:recurrent", LIBRARY)
    assert any(not node.tensor_inputs and node.role is Role.OPERATOR for node in graph.nodes)


def test_numbers_stay() -> None:
    network = replace(small_network("llama"), fusion=LIBRARY)
    graph = unfold(at_precision(at_batch(network.capture(), 2), "float64"))
    assert_equals_autograd(graph, small_network("llama").build(seed=1).double(), seed=2)


def test_a_library_casts_gradients_alone_to_eight_bits() -> None:
    casts = {}
    for kind in ("", LIBRARY):
        graph = at_precision(captured("zoo:llama2-7b", kind), "float8_e4m3fn")
        nodes = [node for node in graph.nodes if node.product_dtype]
        casts[kind] = {node.name: cast_bytes(graph, node, _whole(node)) for node in nodes}
    assert sum(casts[LIBRARY].values()) < 0.4 * sum(casts[""].values())
    assert all(size > 0 for name, size in casts[LIBRARY].items() if "backward" in name)


def test_a_compiler_casts_a_tensor_once_and_weights_as_shards() -> None:
    graph = at_precision(captured("zoo:llama2-7b", COMPILER), "float8_e4m3fn")
    casts = {node.name: cast_sizes(graph, node) for node in graph.nodes if node.product_dtype}
    one = 3 * 4096 * 4096
    for names in (("attention.query", "attention.key", "attention.value"), ("gate", "up"), ("attention.output",)):
        values, weights = zip(*(casts[f"blocks.0.{name}/mm"] for name in names), strict=True)
        assert sum(size for _, size in values) == pytest.approx(one)
        assert all(size == 0 for _, size in weights)


def _whole(node: Node) -> list[float]:
    return [1.0] * (len(node.tensor_inputs) + len(node.outputs))


def test_a_compiler_reads_for_norms_what_it_sums() -> None:
    """A norm behind a sum is one kernel with it: the sum is written, and not read again."""
    graph = captured("zoo:llama2-7b", COMPILER)
    norms = [n for n in graph.nodes if n.kernel is Kernel.NORMALIZATION and n.phase is Phase.FORWARD]
    joined = [n for n in norms if n.moved and n.moved[0] == 0.0]
    assert joined
    assert not [n for n in captured("zoo:llama2-7b", LIBRARY).nodes if n.kernel is Kernel.NORMALIZATION and n.moved]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="fusion 'all' is not one of compiler, library, products, batch_norms, single"):
        load_network("zoo:gpt2-tiny", fusion="all")


@pytest.mark.parametrize("kind", [COMPILER, LIBRARY, SINGLE])
def test_losses_of_training_software_are_computed_in_float32(kind: str) -> None:
    """36 bytes a logit of 16 bits both ways, and as the operators have it in float32."""
    for precision, each in (("bfloat16", 36.0), ("float32", 4.0 * 6)):
        graph = at_precision(captured("zoo:gpt2-tiny", kind), precision)
        nodes = [
            node for node in graph.nodes if "log_softmax" in node.op or node.op == "aten.nll_loss_backward.default"
        ]
        logits = max(spec.elements for node in nodes for spec in node.outputs)
        assert sum(sum(traffic_sizes(graph, node)) for node in nodes) == pytest.approx(each * logits, rel=0.01)


@pytest.mark.parametrize("kind", [PRODUCTS, SINGLE])
def test_norms_of_single_operators_pass_through_memory_in_float32(kind: str, tmp_path: Path) -> None:
    """36 bytes an element of 16 bits forward and 72 backward, as casts around a norm in float32 have it."""
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 4}
    sizes = {"intermediate_size": 96, "vocab_size": 128, "max_position_embeddings": 32}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    graph = at_precision(unfold(load_network(f"hf:{tmp_path}", fusion=kind).capture()), "bfloat16")
    norms = list(norms_in(graph))
    assert norms
    for norm in norms:
        elements = graph.spec(norm.values).elements
        for members, each in ((norm.forward, 36.0), (norm.backward, 72.0)):
            moved = sum(sum(traffic_sizes(graph, graph.nodes[index])) for index in members)
            # What is repeated along a row is read once.
            assert moved == pytest.approx(each * elements, rel=0.08)


def test_routing_of_a_library_moves_rows_of_tokens_alone() -> None:
    """Numbers of places are never made, and weights of experts need no second look at their results."""
    graph = captured("zoo:mixtral-8x7b", LIBRARY)
    for node in graph.nodes:
        numbers = all(spec.dtype in ("int64", "bool") for spec in node.outputs)
        if "experts" in node.name and numbers and node.role is Role.OPERATOR and node.kernel is not Kernel.VIEW:
            assert "scatter" in node.op or not sum(traffic_sizes(graph, node))
    gathers = [node for node in graph.nodes if "gather" in node.op]
    assert gathers
    assert all(node.kernel is Kernel.ELEMENTWISE for node in gathers)


def test_products_with_adapters_are_one_product_and_so_are_their_adapters(tmp_path: Path) -> None:
    """Queries, keys and values: one product of frozen weights and one of the first factors; the second ones differ."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    targets = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(targets))
    graph = captured(f"hf:{tmp_path}", LIBRARY)
    silent = [n for n in graph.nodes if n.kernel is Kernel.MATMUL and n.timed_as is Kernel.VIEW]
    forward = {n.module.rpartition("self_attn.")[2] for n in silent if n.phase is Phase.FORWARD and "attn" in n.module}
    assert forward == {f"{name}_proj.{part}" for name in "kv" for part in ("base_layer", "lora_A")}
