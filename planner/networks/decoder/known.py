"""Which networks are decoders whose graph can be written from their sizes; all others are captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planner.networks.decoder.gpt import HuggingFaceGPT2, ZooGPT
from planner.networks.decoder.graph import Decoder
from planner.networks.decoder.llama import HuggingFaceLlama, ZooLlama
from planner.networks.decoder.mixtral import HuggingFaceMixtral, ZooMixtral
from planner.networks.zoo.configs import BertConfig, GPTConfig, LlamaConfig, MixtralConfig

_LLAMA: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": None, "rope_theta": None,
    "rope_parameters": None,
}  # fmt: skip
READ: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_head": 12, "n_inner": None, "n_layer": 12,
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    },
    "llama": _LLAMA,
    "mixtral": _LLAMA | {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 4096 * 32,
        "rms_norm_eps": 1e-5, "num_local_experts": 8, "num_experts_per_tok": 2,
    },
}  # fmt: skip
"""Keys of a config that its graph depends on, with their values when left out."""
_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    },
    "llama": {
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "pretraining_tp": 1, "rope_scaling": None,
    },
    "mixtral": {
        "hidden_act": "silu", "attention_dropout": 0.0, "router_jitter_noise": 0.0, "output_router_logits": False,
    },
}  # fmt: skip
"""Keys with the only value whose graph is known."""
_NONE = type(None)
_TOKENS: dict[str, tuple[type, ...]] = {
    "bos_token_id": (int, _NONE), "eos_token_id": (int, list, _NONE), "initializer_range": (float,),
}  # fmt: skip
_FREE: dict[str, dict[str, tuple[type, ...]]] = {
    "gpt2": _TOKENS | {
        "eos_token_id": (int, _NONE), "pad_token_id": (int, _NONE), "n_ctx": (int,), "summary_type": (str,),
        "summary_activation": (str, _NONE), "summary_first_dropout": (float,), "summary_proj_to_labels": (bool,),
        "summary_use_proj": (bool,), "task_specific_params": (dict, _NONE),
    },
    "llama": _TOKENS,
    "mixtral": _TOKENS | {"router_aux_loss_coef": (float,), "sliding_window": (int, _NONE)},
}  # fmt: skip
"""Keys that no graph depends on, with the types that transformers takes."""
_ROPE_BASE = {"llama": 10000.0, "mixtral": 1000000.0}
_ROPE_LIMIT = 1e300


def zoo_decoder(config: GPTConfig | LlamaConfig | BertConfig) -> Decoder | None:
    """Recognise the config of a built-in language network."""
    if isinstance(config, GPTConfig):
        return ZooGPT(config=config)
    if isinstance(config, MixtralConfig):
        return ZooMixtral(config=config)
    return ZooLlama(config=config) if isinstance(config, LlamaConfig) else None


def hugging_face_decoder(kind: str, settings: Mapping[str, Any]) -> Decoder | None:
    """Recognise a config of transformers, without dropout, whose every key is understood here.

    An unusual activation, a bias, scaled rotary positions, an unknown key or a value that transformers
    would refuse leave the network to the capture.
    """
    if kind not in READ or not all(_understood(kind, key, value) for key, value in settings.items()):
        return None
    values = {**READ[kind], **settings}
    return _gpt2(values) if kind == "gpt2" else _llama(kind, values)


def _understood(kind: str, key: str, value: Any) -> bool:
    if key == "rope_theta":
        return True
    if isinstance(value, float) and not 0.0 <= value <= 1.0:
        return False
    if key in _FREE[kind]:
        numbers = not isinstance(value, list) or all(type(item) is int for item in value)
        return type(value) in _FREE[kind][key] and numbers
    if key in _FIXED[kind]:
        fixed = _FIXED[kind][key]
        return type(value) is type(fixed) and bool(value == fixed)
    default = READ[kind].get(key)
    return key in READ[kind] and (default is None or type(value) is type(default))


def _gpt2(values: Mapping[str, Any]) -> Decoder | None:
    hidden, heads = values["n_embd"], values["n_head"]
    if hidden % heads:
        return None
    return HuggingFaceGPT2(
        vocabulary=values["vocab_size"],
        positions=values["n_positions"],
        hidden=hidden,
        heads=heads,
        inner=values["n_inner"] or 4 * hidden,
        epsilon=values["layer_norm_epsilon"],
        tied_embedding=values["tie_word_embeddings"],
    )


def _llama(kind: str, values: Mapping[str, Any]) -> Decoder | None:
    hidden, heads, padding = values["hidden_size"], values["num_attention_heads"], values["pad_token_id"]
    key_value_heads, head = values["num_key_value_heads"] or heads, values["head_dim"] or hidden // heads
    base = _rope_base(kind, values["rope_theta"], values["rope_parameters"])
    divides = hidden % heads == 0 and heads % key_value_heads == 0 and head % 2 == 0
    padded = padding is None or (type(padding) is int and 0 <= padding < values["vocab_size"])
    if not divides or not padded or base is None:
        return None
    sizes: dict[str, Any] = {
        "vocabulary": values["vocab_size"],
        "hidden": hidden,
        "intermediate": values["intermediate_size"],
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head": head,
        "epsilon": values["rms_norm_eps"],
        "rope_base": base,
        "tied_embedding": values["tie_word_embeddings"],
        "padding": padding,
    }
    if kind == "llama":
        return HuggingFaceLlama(**sizes)
    experts, chosen = values["num_local_experts"], values["num_experts_per_tok"]
    return HuggingFaceMixtral(**sizes, experts=experts, chosen_experts=chosen) if chosen <= experts else None


def _rope_base(kind: str, theta: Any, parameters: Any) -> float | None:
    """Base of plain rotary positions, given in one of two ways; ``None`` for any other kind."""
    if parameters is not None:
        plain = isinstance(parameters, dict) and parameters.get("rope_type") == "default"
        if theta is not None or not plain or not parameters.keys() <= {"rope_type", "rope_theta"}:
            return None
        theta = parameters.get("rope_theta")
    if theta is None:
        return _ROPE_BASE[kind]
    number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
    return float(theta) if number and 0 < theta < _ROPE_LIMIT else None
