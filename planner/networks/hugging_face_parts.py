"""Parts of modules of transformers in a form that captures.

Latent attention and routers of DeepSeek, adapters.

DeepSeek-V2 and V3: arXiv:2405.04434 (section 2) and arXiv:2412.19437 (section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from planner.networks.adapters import ALL_LINEAR, Adapters
from simulator.errors import NetworkError, UnsupportedError

Table = tuple[Tensor, Tensor]


def check_deepseek(path: str, config: PreTrainedConfig) -> None:
    """Refuse what routes otherwise than `GroupedRouter` does.

    Raises
    ------
    UnsupportedError
        Layers with experts are no row, or a layer chooses them in another way.
    """
    v3 = config.model_type == "deepseek_v3"
    usual: dict[str, tuple[object, ...]] = {
        "moe_layer_freq": (1,),
        "topk_method": ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy"),
        "scoring_func": ("sigmoid",) if v3 else ("softmax",),
        "attention_bias": (False,),
    }
    for key, allowed in usual.items():
        value = getattr(config, key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"{path}: key {key!r} is {value!r}, which is not supported yet; use {' or '.join(map(repr, allowed))}"
            )
    for key, of in (("n_group", "n_routed_experts"), ("topk_group", "n_group")):
        value, whole = getattr(config, key, None) or 1, getattr(config, of, None) or 1
        if value > whole or (key == "n_group" and whole % value):
            raise UnsupportedError(
                f"{path}: key {key!r} is {value!r}, which does not go with {of} {whole!r}; correct it"
            )


class CapturedLatentAttention(nn.Module):
    """Attention whose queries, keys and values are made of narrow latent rows; positions have a part of their own.

    All heads share the part of the keys that is rotated. Parameters are those of transformers.
    """

    kv_a_proj_with_mqa: nn.Linear
    kv_a_layernorm: nn.Module
    kv_b_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(self, attention: Any, attend: Any) -> None:
        super().__init__()
        self.attend, self.scaling, self.is_causal = attend, attention.scaling, True
        self.heads, self.plain = attention.num_heads, attention.qk_nope_head_dim
        self.rotary = attention.qk_rope_head_dim
        self.value, self.latent = attention.v_head_dim, attention.kv_lora_rank
        self.interleaved = getattr(attention.config, "rope_interleave", True)
        for name, child in attention.named_children():
            setattr(self, name, child)
        self.query_latent = attention.q_lora_rank is not None

    def forward(self, hidden_states: Tensor, position_embeddings: Table, **_: Any) -> tuple[Tensor, None]:
        """Map ``(batch, length, hidden)`` to the same shape."""
        query = self._by_head(self._queries(hidden_states))
        plain, turned = torch.split(query, [self.plain, self.rotary], dim=-1)
        latent, shared = torch.split(self.kv_a_proj_with_mqa(hidden_states), [self.latent, self.rotary], dim=-1)
        made = self._by_head(self.kv_b_proj(self.kv_a_layernorm(latent)))
        key, value = torch.split(made, [self.plain, self.value], dim=-1)
        cosine, sine = (part[..., : self.rotary // 2].unsqueeze(1) for part in position_embeddings)
        turned, shared = (self._rotate(part, cosine, sine) for part in (turned, shared.unsqueeze(1)))
        query = torch.cat((plain, turned), dim=-1)
        key = torch.cat((key, shared.expand(-1, self.heads, -1, -1)), dim=-1)
        # torch fuses attention only where values are as wide as keys.
        value = F.pad(value, (0, key.shape[-1] - self.value))
        mixed, _weights = self.attend(self, query, key, value, None, scaling=self.scaling)
        return self.o_proj(mixed[..., : self.value].flatten(2)), None

    def _queries(self, x: Tensor) -> Tensor:
        names = ("q_a_proj", "q_a_layernorm", "q_b_proj") if self.query_latent else ("q_proj",)
        for name in names:
            x = self.get_submodule(name)(x)
        return x

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1).transpose(1, 2)

    def _rotate(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate pairs of ``x`` ``(batch, heads, length, rotary)``: neighbours, or numbers half the width apart."""
        left, right = (x[..., 0::2], x[..., 1::2]) if self.interleaved else x.chunk(2, dim=-1)
        return torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)


class GroupedRouter(nn.Module):
    """Choose experts and their weights for each token, in the parameters' precision, of the best groups alone.

    V3 scores by a sigmoid and measures a group by its best two experts; V2 by a softmax and its best one. The bias that
    V3 adjusts between steps, apart from gradients, is left at zero.
    """

    def __init__(self, router: Any, config: PreTrainedConfig) -> None:
        super().__init__()
        self.weight, self.top_k = router.weight, router.top_k
        self.sigmoid = config.model_type == "deepseek_v3"
        grouped = self.sigmoid or config.topk_method == "group_limited_greedy"
        self.groups = (config.n_group or 1) if grouped else 1
        self.chosen_groups = (config.topk_group or 1) if grouped else 1
        self.factor = float(config.routed_scaling_factor)
        self.normed = self.sigmoid and bool(config.norm_topk_prob)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits ``(tokens, experts)``, weights and expert numbers ``(tokens, top_k)``."""
        logits = F.linear(hidden_states.flatten(0, -2), self.weight)
        scores = logits.sigmoid() if self.sigmoid else F.softmax(logits, dim=-1)
        best, index = torch.topk(scores * self._open(scores) if self.groups > 1 else scores, self.top_k, dim=-1)
        if self.normed:
            best = best / best.sum(-1, keepdim=True)
        return logits, best * self.factor, index

    def _open(self, scores: Tensor) -> Tensor:
        """``(tokens, experts)``: 1 for experts of the best groups, 0 for others."""
        grouped = scores.detach().view(-1, self.groups, scores.shape[-1] // self.groups)
        measured = torch.topk(grouped, 2 if self.sigmoid else 1, dim=-1)[0].sum(-1)
        _, chosen = torch.topk(measured, self.chosen_groups, dim=-1)
        among = (chosen.unsqueeze(-1) == torch.arange(self.groups, device=scores.device)).to(scores.dtype).sum(1)
        return among.unsqueeze(-1).expand(-1, -1, grouped.shape[-1]).flatten(1)


class Adapted(nn.Module):
    """A product with frozen weights, and beside it one of low rank that is trained and adds nothing at first."""

    def __init__(self, base: nn.Linear | Conv1D, adapters: Adapters) -> None:
        super().__init__()
        inputs, outputs = _shape(base)
        self.base_layer, self.scaling = base, adapters.scaling
        self.lora_A = nn.Linear(inputs, adapters.rank, bias=False)
        self.lora_B = nn.Linear(adapters.rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(..., inputs)`` to ``(..., outputs)``."""
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling  # type: ignore[no-any-return]


def _shape(base: nn.Linear | Conv1D) -> tuple[int, int]:
    """Inputs and outputs; GPT-2 keeps its weights the other way round."""
    first, second = base.weight.shape
    return (second, first) if isinstance(base, nn.Linear) else (first, second)


def adapt(path: str, model: Any, adapters: Adapters) -> None:
    """Freeze a model and put adapters beside its products, in place; NetworkError names the file of a wrong target."""
    named = dict(model.named_modules())
    if adapters.targets == ALL_LINEAR:
        last = model.get_output_embeddings()
        chosen = [n for n, m in named.items() if isinstance(m, (nn.Linear, Conv1D)) and m is not last]
    else:
        chosen = [name for name in named if adapters.adapts(name)]
    _check(path, named, chosen, adapters)
    model.requires_grad_(False)
    for name in chosen:
        parent, _, child = name.rpartition(".")
        setattr(named[parent], child, Adapted(named[name], adapters))
    for name, module in named.items():
        if adapters.trains(name):
            module.requires_grad_(True)


def _check(path: str, named: dict[str, nn.Module], chosen: list[str], adapters: Adapters) -> None:
    products = sorted({n.rpartition(".")[2] for n, m in named.items() if isinstance(m, (nn.Linear, Conv1D))})
    for name in chosen:
        if not isinstance(named[name], (nn.Linear, Conv1D)):
            raise UnsupportedError(
                f"{path}: key 'target_modules' names {name!r}, a {type(named[name]).__name__}; adapters are supported "
                f"beside products: {', '.join(products)}"
            )
    names = () if isinstance(adapters.targets, str) else adapters.targets
    missing = [n for n in names if not any(found == n or found.endswith(f".{n}") for found in chosen)]
    if missing or not chosen:
        wrong = ", ".join(missing) or adapters.targets
        raise NetworkError(
            f"{path}: key 'target_modules' names {wrong}, which the network does not have; it has {', '.join(products)}"
        )
    lost = [n for n in adapters.saved if not any(found == n or found.endswith(f".{n}") for found in named)]
    if lost:
        raise NetworkError(
            f"{path}: key 'modules_to_save' names {', '.join(lost)}, which the network does not have; leave it out"
        )
