"""How many parameters a transformer has, and how many of them lie on one rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.estimate.columns import Columns, FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Sizes:
    """Numbers of parameters, (N,) each.

    ``layer`` is one average layer on one tensor rank; ``dense_stage`` and ``expert_stage`` what the fullest pipeline
    stage holds on one rank; ``expert_ranks`` over how many ranks the experts of a layer are spread.
    ``ends`` is embedding and head of one tensor rank, ``total`` the whole network, ``active`` what a token meets.
    """

    total: FloatArray
    active: FloatArray
    layer: FloatArray
    ends: FloatArray
    dense_stage: FloatArray
    expert_stage: FloatArray
    expert_ranks: FloatArray


def attention_parameters(c: Columns) -> FloatArray:
    """Parameters of the attention and norms of one layer, on all ranks."""
    plain = c.hidden * c.head_size * (2 * c.heads + 2 * c.key_value_heads)
    query = np.where(
        c.query_rank > 0,
        c.hidden * c.query_rank + c.query_rank * c.heads * c.head_size,
        c.hidden * c.heads * c.head_size,
    )
    key_value = c.hidden * (c.key_value_rank + c.rotary_head)
    key_value = key_value + c.key_value_rank * c.heads * (c.plain_head + c.value_head)
    latent = query + key_value + c.heads * c.value_head * c.hidden
    biases = c.biases * (c.head_size * (c.heads + 2 * c.key_value_heads) + c.hidden)
    norms = 2 * c.hidden * (2 - c.rms_norm)
    return np.where(c.latent > 0, latent, plain) + biases + norms


def sizes_of(c: Columns) -> Sizes:
    """Count parameters."""
    attention = attention_parameters(c)
    matrices = 2 + c.gated
    dense = matrices * c.hidden * c.feed_forward + c.biases * ((1 + c.gated) * c.feed_forward + c.hidden)
    expert = matrices * c.hidden * c.expert_feed_forward
    shared = matrices * c.hidden * c.shared_feed_forward + c.hidden * c.experts
    layers = np.maximum(c.layers, 1.0)
    dense_share, expert_share = c.dense_layers / layers, c.moe_layers / layers
    encoder = c.encoder_layers * (attention + dense)
    every = attention + dense_share * dense + expert_share * shared
    table = c.vocabulary * c.hidden
    ends = table * (2 - c.tied) + c.positions * c.hidden + c.hidden * (2 - c.rms_norm)
    total = c.layers * (every + expert_share * c.experts * expert) + ends + encoder
    active = c.layers * (every + expert_share * c.experts_per_token * expert) + ends + encoder
    expert_ranks = np.where(c.experts > 0, c.ep * c.expert_tp, 1.0)
    layers_of_stage = np.ceil(c.layers / c.pp - 1e-9) + c.encoder_layers / c.pp
    stage_ends = np.where(c.pp > 1, table + c.positions * c.hidden, ends) / c.tp
    dense_stage = layers_of_stage * every / c.tp + stage_ends
    experts_here = expert_share * c.experts * expert / expert_ranks
    layer = every / c.tp + experts_here
    return Sizes(
        total=total, active=active, layer=layer, ends=ends / c.tp, dense_stage=dense_stage,
        expert_stage=layers_of_stage * experts_here, expert_ranks=expert_ranks,
    )  # fmt: skip
