"""Modules of transformers, changed so that one training step captures as plain sharded-friendly operators."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig
from transformers.activations import NewGELUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.pytorch_utils import Conv1D

from planner.networks.hugging_face_deepseek import GroupedRouter, LatentAttention, check_deepseek
from planner.networks.losses import mean_cross_entropy
from planner.networks.zoo.experts import choose_experts, mix_experts
from planner.networks.zoo.llama import RootMeanSquareNorm, rotary_table
from simulator.errors import NetworkError, UnsupportedError

IMPLEMENTATION = "meshwright"


class LanguageModel(nn.Module):
    """A model of transformers with its loss: the mean cross entropy at all positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss of tokens against targets, both ``(batch, length)``."""
        return mean_cross_entropy(self.model(input_ids=tokens).logits, targets)


class MaskedModel(LanguageModel):
    """A masked model of transformers whose loss is taken at the first `predicted` positions."""

    def __init__(self, model: nn.Module, predicted: int) -> None:
        super().__init__(model)
        self.predicted = predicted

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Loss of tokens against targets, both ``(batch, length)``."""
        model: Any = self.model
        hidden = model.bert(input_ids=tokens).last_hidden_state[:, : self.predicted]
        return mean_cross_entropy(model.cls(hidden), targets[:, : self.predicted])


def make_module(
    path: str, kind: str, settings: Mapping[str, Any], length: int, predicted: int | None = None
) -> nn.Module:
    """Make the module of a checked config; transformers' own complaints name the file."""
    AttentionInterface.register(IMPLEMENTATION, _attention)
    AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)
    try:
        config = AutoConfig.for_model(kind, **settings)
    except Exception as error:
        raise NetworkError(f"{path}: transformers refuses the config: {error}; correct the key") from error
    _check(path, kind, config)
    config.use_cache = False
    config._attn_implementation = IMPLEMENTATION
    if hasattr(config, "num_local_experts") or hasattr(config, "n_routed_experts"):
        config._experts_implementation = IMPLEMENTATION
    auto = AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM
    model: nn.Module = auto.from_config(config, attn_implementation=IMPLEMENTATION)  # type: ignore[no-untyped-call]
    _simplify(model, config, length)
    return LanguageModel(model) if predicted is None else MaskedModel(model, predicted)


def _check(path: str, kind: str, config: PreTrainedConfig) -> None:
    refused = {
        "gpt2": ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
        "bert": ("is_decoder", "add_cross_attention", "chunk_size_feed_forward"),
    }.get(kind, ())
    if kind in ("deepseek_v2", "deepseek_v3"):
        check_deepseek(path, config)
    for key in refused:
        if getattr(config, key, False):
            raise UnsupportedError(
                f"{path}: key {key!r} is {getattr(config, key)!r}, which is not supported yet; leave it out"
            )


def _simplify(model: nn.Module, config: PreTrainedConfig, length: int) -> None:
    """Replace parts by equal ones that shard well and compute in the parameters' precision."""
    for parent in reversed(list(model.modules())):  # what a part is made of comes before it
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            class_name = type(child).__name__
            if class_name == "GPT2Attention":
                setattr(parent, name, SeparateAttention(config))
            elif class_name.endswith("RMSNorm"):
                setattr(parent, name, RootMeanSquareNorm(child.weight.shape[0], child.variance_epsilon))
            elif class_name.endswith("RotaryEmbedding") and _plain_rotary(config):
                setattr(parent, name, RotaryTable(config))
            elif class_name == "DeepseekV2RotaryEmbedding":
                setattr(parent, name, DeepseekV3RotaryEmbedding(cast(Any, config)))  # tables instead of complex numbers
            elif isinstance(child, NewGELUActivation):
                setattr(parent, name, nn.GELU(approximate="tanh"))
            elif class_name == "MixtralTopKRouter":
                setattr(parent, name, Router(child))
            elif class_name in ("DeepseekV2TopkRouter", "DeepseekV3TopkRouter"):
                setattr(parent, name, GroupedRouter(child, config))
            elif class_name in ("DeepseekV2Attention", "DeepseekV3Attention"):
                setattr(parent, name, LatentAttention(child, _attention))
            elif class_name.endswith("Experts"):
                child.sequence_length = length


def _plain_rotary(config: PreTrainedConfig) -> bool:
    parameters = config.rope_parameters or {}
    return parameters.get("rope_type", "default") == "default" and "partial_rotary_factor" not in parameters


class RotaryTable(nn.Module):
    """Cosines and sines of the rotary positions, made from whole numbers instead of kept in a buffer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.base = float(config.rope_parameters["rope_theta"])

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Tables ``(1, length, dim)`` for ``x`` ``(batch, length, hidden)``."""
        cosine, sine = rotary_table(x.shape[1], self.dim, self.base, like=x)
        return cosine.unsqueeze(0), sine.unsqueeze(0)


class SeparateAttention(nn.Module):
    """GPT-2's attention with query, key and value projections of their own, so that heads can be sharded."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.heads = config.num_attention_heads
        self.scaling = (hidden // self.heads) ** -0.5 if config.scale_attn_weights else 1.0
        self.is_causal = True
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, hidden) for _ in range(3))
        self.c_proj = Conv1D(hidden, hidden)  # type: ignore[no-untyped-call]
        for projection in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.normal_(projection.weight, std=config.initializer_range)
            nn.init.zeros_(projection.bias)
        nn.init.normal_(self.c_proj.weight, std=config.initializer_range / math.sqrt(2 * config.num_hidden_layers))

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Map ``(batch, length, hidden)`` to the same shape."""
        query, key, value = (
            projection(hidden_states).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed, _weights = _attention(self, query, key, value, None, scaling=self.scaling)
        return self.c_proj(mixed.flatten(2)), None


class Router(nn.Module):
    """Choose experts and their weights for each token, in the parameters' precision."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(tokens, experts)``, weights and expert numbers ``(tokens, top_k)``."""
        logits = F.linear(hidden_states.flatten(0, -2), self.weight)
        weights, index = choose_experts(logits, self.top_k)
        return logits, weights, index


def _no_mask(*_: Any, **__: Any) -> None:
    """Leave masks out: attention is causal or whole, and nothing is padded."""


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend without a mask tensor: ``(batch, heads, length, dim)`` to ``(batch, length, heads, dim)``."""
    groups = query.shape[1] // key.shape[1]
    plain = scaling is None or math.isclose(scaling, query.shape[-1] ** -0.5)
    mixed = F.scaled_dot_product_attention(
        query,
        _repeat_heads(key, groups),
        _repeat_heads(value, groups),
        is_causal=bool(getattr(module, "is_causal", True)),
        scale=None if plain else scaling,
    )
    return mixed.transpose(1, 2), None


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    batch, heads, length, dim = x.shape
    return x.unsqueeze(2).expand(batch, heads, groups, length, dim).flatten(1, 2)


def _experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Mix the experts of a module of transformers."""
    return mix_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        gate_up=module.gate_up_proj,
        down=module.down_proj,
        length=module.sequence_length,
        activation=module.act_fn,
    )
