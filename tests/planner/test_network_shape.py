"""Sizes of a transformer from its configuration, for the formulas of memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cost.memory.parameters import parameter_count
from planner.networks import load_network
from planner.planning.software_memory import shape_of

LENGTH = 8
SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 128,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT: dict[str, Any] = SMALL | EXPERTS | {
    "model_type": "deepseek_v3", "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
ROUTED: dict[str, Any] = SMALL | EXPERTS | {"model_type": "qwen3_moe", "num_experts": 4, "num_key_value_heads": 2}


def shape(folder: Path, config: dict[str, Any]) -> tuple[Any, int]:
    """The sizes that are read from a configuration, and the parameters of the network that is captured from it."""
    (folder / "config.json").write_text(json.dumps(config))
    network = load_network(f"hf:{folder}", sequence_length=LENGTH)
    graph = network.capture()
    counted = sum(graph.multiplicity[p.node] * graph.nodes[p.node].outputs[0].elements for p in graph.parameters)
    return shape_of(network.spec, LENGTH, graph), counted


@pytest.mark.parametrize(
    ("config", "gated"),
    [
        (LATENT, True),
        (ROUTED, True),
        (SMALL | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 32}, True),
        (SMALL | {"model_type": "gpt_neox"}, False),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_sizes_of_a_configuration_come_to_the_parameters_of_the_network(
    config: dict[str, Any], gated: bool, tmp_path: Path
) -> None:
    found, parameters = shape(tmp_path, config)
    assert parameter_count(found) == pytest.approx(parameters, rel=0.01)
    assert (found.layers, found.hidden, found.heads, found.vocabulary) == (3, 128, 4, 2048)
    assert found.gated == gated
    assert (found.experts is not None) == ("moe_intermediate_size" in config)
    assert (found.latent_attention is not None) == (config is LATENT)
    assert found.normalised_queries == (config is ROUTED)


def test_defaults_of_a_model_type_are_filled_in(tmp_path: Path) -> None:
    short = {key: LATENT[key] for key in LATENT if key not in ("n_shared_experts", "qk_rope_head_dim")}
    (whole, _), (filled, parameters) = shape(tmp_path, LATENT), shape(tmp_path, short)
    assert filled.latent_attention.rotary_head == 64 != whole.latent_attention.rotary_head
    assert parameter_count(filled) == pytest.approx(parameters, rel=0.01)


def test_sizes_that_do_not_come_to_the_parameters_are_not_believed(tmp_path: Path) -> None:
    """Every second layer of this network has no experts, which the sizes cannot say."""
    found, _ = shape(tmp_path, ROUTED | {"decoder_sparse_step": 2, "num_hidden_layers": 4})
    assert found is None
