"""Parts of layers that compute again by Megatron-LM's names."""

from __future__ import annotations

import json
from typing import get_args

import pytest

from planner.graph.layer_parts import MODULES, in_parts, with_selective
from planner.graph.operator_graph import OperatorGraph
from planner.graph.recompute import recomputed
from planner.networks import load_network
from planner.plans.pins import RecomputeModule
from simulator.program import Kernel

LATENT = {
    "model_type": "deepseek_v3", "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "vocab_size": 64,
    "max_position_embeddings": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> OperatorGraph:
    file = tmp_path_factory.mktemp("latent") / "config.json"
    file.write_text(json.dumps(LATENT), encoding="utf-8")
    return load_network(f"hf:{file}", sequence_length=8).capture()


def modules(graph: OperatorGraph, name: str) -> set[str]:
    """Modules of the operators of a part, without the numbers of layers."""
    return {graph.nodes[index].module.partition("layers.")[2].partition(".")[2] for index in in_parts(graph, [name])}


def products(graph: OperatorGraph, name: str) -> set[str]:
    """Modules of its products alone."""
    found = {i for i in in_parts(graph, [name]) if graph.nodes[i].kernel is Kernel.MATMUL}
    return {graph.nodes[index].module.rpartition(".")[2] for index in found}


def test_pins_name_the_parts_that_there_are() -> None:
    assert set(MODULES) == set(get_args(RecomputeModule))


def test_parts_of_latent_attention_and_of_experts(latent: OperatorGraph) -> None:
    assert products(latent, "mla_up_proj") == {"q_b_proj", "kv_b_proj"}
    assert {"self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"} < modules(latent, "mla_up_proj")
    assert {"input_layernorm", "post_attention_layernorm"} <= modules(latent, "layernorm") <= {
        "input_layernorm", "post_attention_layernorm", "",
    }  # fmt: skip
    assert products(latent, "mlp") == {"gate_proj", "up_proj", "down_proj"}
    assert not any("expert" in module for module in modules(latent, "mlp"))
    assert products(latent, "moe") == {"gate", "experts", "gate_proj", "up_proj", "down_proj"}
    assert modules(latent, "moe_act") == {"mlp.experts", "mlp.experts.act_fn"}
    assert not products(latent, "moe_act")
    assert all(module.startswith("mlp.shared_experts") for module in modules(latent, "shared_experts"))
    assert not in_parts(latent, ["core_attn"]), "a fused kernel keeps no scores"


@pytest.mark.parametrize("spec", ["zoo:gpt2-tiny", "zoo:mixtral-8x7b"])
def test_built_in_networks_have_parts_as_well(spec: str) -> None:
    graph = load_network(spec, sequence_length=32, attention="unfused").capture()
    experts = "mixtral" in spec
    assert bool(in_parts(graph, ["mlp"])) != experts
    assert bool(in_parts(graph, ["moe"])) == bool(in_parts(graph, ["moe_act"])) == experts
    assert {graph.nodes[i].kernel for i in in_parts(graph, ["core_attn"])} >= {Kernel.MATMUL, Kernel.SOFTMAX}
    assert not in_parts(graph, ["mla_up_proj", "shared_experts"])


@pytest.mark.parametrize("names", [["mla_up_proj"], ["layernorm", "moe_act"], ["moe", "mlp"]])
def test_what_is_named_computes_again_and_nothing_else(latent: OperatorGraph, names: list[str]) -> None:
    part, graph = in_parts(latent, names), with_selective(latent, names)
    again = recomputed(graph, range(len(graph.nodes)), "selective")
    assert again
    assert part.issuperset(again)
    assert recomputed(graph, range(len(graph.nodes)), "full") == recomputed(latent, range(len(latent.nodes)), "full")
    assert with_selective(graph, []) == latent
