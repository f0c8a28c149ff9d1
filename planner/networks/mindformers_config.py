"""Sizes of a network in a configuration file of MindFormers, as a configuration of transformers has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SAME = (
    *("model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "attention_bias"),
    *("tie_word_embeddings", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
    *("decoder_sparse_step", "n_routed_experts", "n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "routed_scaling_factor"),
)
"""Keys of newer files, which are those of transformers."""
_NAMES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "multi_query_group_num": "num_key_value_heads",
    "ffn_hidden_size": "intermediate_size",
    "padded_vocab_size": "vocab_size",
    "theta": "rope_theta",
    "layernorm_epsilon": "rms_norm_eps",
}
"""Keys of older files, with those of transformers."""
_BIASES = ("qkv_has_bias", "add_qkv_bias")


def transformers_config(document: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of transformers that a file's ``model.model_config`` states; empty where it states no sizes.

    Older files name a class, not a model type: decoders with gated feed-forward layers, which are Llama's, Qwen2's
    where query, key and value have biases, and Mixtral's where ``moe_config`` has experts.

    >>> file = {"type": "LlamaConfig", "num_layers": 2, "hidden_size": 8192, "num_heads": 64, "n_kv_heads": 8}
    >>> file |= {"multiple_of": 256, "ffn_dim_multiplier": 1.3}
    >>> found = transformers_config({"model": {"model_config": file}})
    >>> found["model_type"], found["num_hidden_layers"], found["intermediate_size"]
    ('llama', 2, 28672)
    """
    model = document.get("model")
    config = model.get("model_config") if isinstance(model, Mapping) else None
    if not isinstance(config, Mapping):
        return {}
    if "model_type" in config:
        found = {name: config[name] for name in _SAME if name in config}
    elif "num_layers" in config and "hidden_size" in config:
        found = {name: config[name] for name in _SAME if name in config}
        found |= {name: config[old] for old, name in _NAMES.items() if old in config}
        found.setdefault("intermediate_size", _feed_forward(config))
        experts = document.get("moe_config")
        count = experts.get("expert_num", 1) if isinstance(experts, Mapping) else 1
        found["model_type"] = "qwen2" if any(config.get(name) for name in _BIASES) else "llama"
        if isinstance(experts, Mapping) and isinstance(count, int) and count > 1:
            chosen = experts.get("num_experts_chosen", 1)
            found |= {"model_type": "mixtral", "num_local_experts": count, "num_experts_per_tok": chosen}
    else:
        return {}
    length = config.get("seq_length")
    if isinstance(length, int):
        most = found.get("max_position_embeddings")
        found["max_position_embeddings"] = max(length, most) if isinstance(most, int) else length
    return found


def _feed_forward(config: Mapping[str, Any]) -> int:
    """Width of feed-forward layers that a file does not state, by MindFormers' own rule."""
    width = 4 * int(config["hidden_size"])
    multiplier, multiple = config.get("ffn_dim_multiplier"), int(config.get("multiple_of") or 256)
    if multiplier is not None:
        width = int((float(multiplier) + 0.01) * width)
    return -(-int(2 * width / 3) // multiple) * multiple
