"""Training runs as columns: one array for each number that the formulas use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.estimate.training_run import (
    AttentionKernel,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Columns:
    """Sizes and degrees of (N,) transformer runs, all float64; flags are 0.0 or 1.0.

    ``tokens`` of one micro-batch on one rank (``micro_batch * sequence / cp``), ``norm_tokens`` those of which the
    norms and residual sums of a rank take care; ``weight_gradients_in_bubble`` counts those of a stage that a schedule
    puts where others wait; ``first_layers``, ``last_layers`` and ``fullest_layers`` are those of the first, the last
    and the fullest pipeline rank; ``moe_layers`` and ``dense_layers`` add up to ``layers``.
    """

    layers: FloatArray
    hidden: FloatArray
    heads: FloatArray
    key_value_heads: FloatArray
    head_size: FloatArray
    feed_forward: FloatArray
    vocabulary: FloatArray
    sequence: FloatArray
    gated: FloatArray
    rms_norm: FloatArray
    rotary: FloatArray
    biases: FloatArray
    causal: FloatArray
    dropout: FloatArray
    window: FloatArray
    tied: FloatArray
    positions: FloatArray
    experts: FloatArray
    experts_per_token: FloatArray
    expert_feed_forward: FloatArray
    shared_feed_forward: FloatArray
    moe_layers: FloatArray
    dense_layers: FloatArray
    latent: FloatArray
    query_rank: FloatArray
    key_value_rank: FloatArray
    rotary_head: FloatArray
    plain_head: FloatArray
    value_head: FloatArray
    encoder_layers: FloatArray
    encoder_sequence: FloatArray
    multi_token_layers: FloatArray
    predicted_positions: FloatArray
    weight_gradients_in_bubble: FloatArray
    first_layers: FloatArray
    last_layers: FloatArray
    fullest_layers: FloatArray
    devices: FloatArray
    dp: FloatArray
    tp: FloatArray
    pp: FloatArray
    vpp: FloatArray
    cp: FloatArray
    ep: FloatArray
    expert_tp: FloatArray
    micro_batch: FloatArray
    micro_batches: FloatArray
    sequence_parallel: FloatArray
    recompute_full: FloatArray
    recompute_selective: FloatArray
    recompute_layers: FloatArray
    sharding: FloatArray
    shard_group: FloatArray
    gradient_bytes: FloatArray
    overlap_gradients: FloatArray
    overlap_parameters: FloatArray
    overlap_tensor: FloatArray
    offload: FloatArray
    trained_fraction: FloatArray
    fused_attention: FloatArray
    fused_softmax: FloatArray
    fused_norm: FloatArray
    deterministic: FloatArray

    @property
    def tokens(self) -> FloatArray:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def norm_tokens(self) -> FloatArray:
        """Tokens whose norms, dropout and residual sums one rank computes."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tp, 1.0)

    def take(self, rows: npt.NDArray[np.intp]) -> Columns:
        """Columns of some rows."""
        return Columns(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def _experts(name: str) -> Callable[[TransformerShape], float]:
    return lambda shape: getattr(shape.experts, name) if shape.experts else 0.0


def _latent(name: str) -> Callable[[TransformerShape], float]:
    return lambda shape: getattr(shape.latent_attention, name) if shape.latent_attention else 0.0


_SHAPE: dict[str, Callable[[TransformerShape], Any]] = {
    "layers": lambda s: s.layers,
    "hidden": lambda s: s.hidden,
    "heads": lambda s: s.heads,
    "key_value_heads": lambda s: s.key_value_heads,
    "head_size": lambda s: s.head_size,
    "feed_forward": lambda s: s.feed_forward,
    "vocabulary": lambda s: s.vocabulary,
    "sequence": lambda s: s.sequence_length,
    "gated": lambda s: s.gated,
    "rms_norm": lambda s: s.rms_norm,
    "rotary": lambda s: s.rotary,
    "biases": lambda s: s.biases,
    "causal": lambda s: s.causal,
    "dropout": lambda s: s.dropout,
    "window": lambda s: s.attention_window,
    "tied": lambda s: s.tied_embeddings,
    "positions": lambda s: s.learned_positions,
    "experts": _experts("count"),
    "experts_per_token": _experts("per_token"),
    "expert_feed_forward": _experts("feed_forward"),
    "shared_feed_forward": _experts("shared_feed_forward"),
    "moe_layers": lambda s: s.layers - s.experts.dense_layers if s.experts else 0,
    "dense_layers": lambda s: s.experts.dense_layers if s.experts else s.layers,
    "latent": lambda s: s.latent_attention is not None,
    "query_rank": _latent("query_rank"),
    "key_value_rank": _latent("key_value_rank"),
    "rotary_head": _latent("rotary_head"),
    "plain_head": _latent("plain_head"),
    "value_head": _latent("value_head"),
    "encoder_layers": lambda s: s.encoder_layers,
    "encoder_sequence": lambda s: s.encoder_sequence_length,
    "multi_token_layers": lambda s: s.multi_token_layers,
    "predicted_positions": lambda s: s.predicted_positions,
}
_SHARDING = {kind: float(index) for index, kind in enumerate(OptimizerSharding)}
_DELAYED = {"zb_h1": 2.0, "zb_h2": 3.0, "zbv": 3.0, "dualpipe": 3.0, "dualpipe_v": 3.0}
"""Weight gradients that a schedule moves into each stage of the bubble (Qi et al., arXiv:2401.10241, table 2)."""
_UNFUSED = (AttentionKernel.UNFUSED, AttentionKernel.FUSED_SOFTMAX)
_SETUP: dict[str, Callable[[TrainingSetup], Any]] = {
    **{
        name: (lambda s, name=name: getattr(s, name))  # type: ignore[misc]
        for name in (
            "devices", "dp", "tp", "pp", "vpp", "cp", "ep", "expert_tp", "micro_batch", "micro_batches",
            "sequence_parallel", "recompute_layers", "gradient_bytes", "overlap_gradients", "overlap_parameters",
            "overlap_tensor", "trained_fraction", "fused_norm", "deterministic",
        )
    },
    "recompute_full": lambda s: s.recompute is Recompute.FULL,
    "recompute_selective": lambda s: s.recompute is Recompute.SELECTIVE,
    "sharding": lambda s: _SHARDING[s.optimizer_sharding],
    "shard_group": lambda s: s.shard_group or s.dp,
    "weight_gradients_in_bubble": lambda s: _DELAYED.get(s.schedule.replace("-", "_"), 0.0),
    "offload": lambda s: s.offload_optimizer,
    "fused_attention": lambda s: s.attention not in _UNFUSED,
    "fused_softmax": lambda s: s.attention is AttentionKernel.FUSED_SOFTMAX,
}  # fmt: skip


def stage_layers(network: TransformerShape, stages: int, stated: tuple[int, ...] = ()) -> FloatArray:
    """Layers of each stage, (stages,): as stated, or as even as whole layers allow, the first stages the fuller ones.

    Encoder layers count by their share of the tokens of a decoder layer.
    """
    if len(stated) == stages:
        return np.array(stated, dtype=np.float64)
    even, rest = divmod(network.layers + network.multi_token_layers, stages)
    found = np.full(stages, float(even))
    found[:rest] += 1
    encoder = network.encoder_layers * network.encoder_sequence_length / max(network.sequence_length, 1)
    return np.asarray(found + encoder / stages)


@lru_cache(maxsize=4096)
def _layers_of_ranks(network: TransformerShape, pp: int, vpp: int, stated: tuple[int, ...]) -> tuple[float, ...]:
    """Layers of the first, the last and the fullest pipeline rank."""
    ranks = stage_layers(network, pp * vpp, stated).reshape(vpp, pp).sum(axis=0)
    return float(ranks[0]), float(ranks[-1]), float(ranks.max())


def columns_of(runs: Sequence[TrainingRun]) -> Columns:
    """Columns of runs of transformers."""
    shapes = [run.network for run in runs]
    values: dict[str, FloatArray] = {}
    for name, shape_value in _SHAPE.items():
        values[name] = np.array([shape_value(shape) for shape in shapes], dtype=np.float64)  # type: ignore[arg-type]
    for name, setup_value in _SETUP.items():
        values[name] = np.array([setup_value(run.setup) for run in runs], dtype=np.float64)
    ranks = [
        _layers_of_ranks(run.network, run.setup.pp, run.setup.vpp, run.setup.layers_per_stage)
        for run in runs
    ]
    for place, name in enumerate(("first_layers", "last_layers", "fullest_layers")):
        values[name] = np.array([rank[place] for rank in ranks])
    return Columns(**values)
