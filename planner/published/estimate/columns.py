"""Training runs as columns: one array for each number that the formulas use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.cost.memory.in_flight import BOTH_DIRECTIONS, V_SHAPED, schedule_name
from planner.cost.memory.parameters import (
    distinct_stages,
    even_chunks,
    local_vocabulary,
    stage_contents,
    stage_parameters,
)
from planner.cost.memory_traits import traits_of
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import (
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
    puts where others wait, ``passes_in_bubble`` for how many micro-batches they wait; ``paired_passes`` says that
    messages of one pass hide behind the computation of another. ``first_layers``, ``last_layers`` and
    ``fullest_layers`` are those, of every kind, of the pipeline rank with the embedding, of that with the head, and of
    the fullest; ``ends_together`` is 1 where one rank has both ends, and 0.5 where two have half of both (DualPipe).
    ``releases_parameters`` says that those of large layers are gathered anew behind recomputation
    (`simulator.kept_parameters`). ``moe_layers`` and ``dense_layers`` add up to the layers of the decoder.
    ``vocabulary`` are the rows of the embedding, padding included; ``dense_parameters`` and ``expert_parameters`` lie
    on one rank of the fullest stage.
    """

    hidden: FloatArray
    heads: FloatArray
    key_value_heads: FloatArray
    head_size: FloatArray
    feed_forward: FloatArray
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
    capacity_factor: FloatArray
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
    passes_in_bubble: FloatArray
    paired_passes: FloatArray
    first_layers: FloatArray
    last_layers: FloatArray
    fullest_layers: FloatArray
    ends_together: FloatArray
    vocabulary: FloatArray
    dense_parameters: FloatArray
    expert_parameters: FloatArray
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
    sent_gradient_bytes: FloatArray
    scattered_gradients: FloatArray
    separate_gate: FloatArray
    releases_parameters: FloatArray
    vocabulary_parallel_loss: FloatArray
    overlap_gradients: FloatArray
    overlap_parameters: FloatArray
    overlap_tensor: FloatArray
    trained_fraction: FloatArray
    fused_attention: FloatArray
    fused_softmax: FloatArray
    fused_norm: FloatArray
    fused_gate: FloatArray
    fused_sums: FloatArray
    slow_dropout: FloatArray
    tokens_sent_once: FloatArray
    overlap_experts: FloatArray
    deterministic: FloatArray

    @property
    def tokens(self) -> FloatArray:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence / self.cp

    @property
    def norm_tokens(self) -> FloatArray:
        """Tokens whose norms, dropout and residual sums one rank computes."""
        return self.tokens / np.where(self.sequence_parallel > 0, self.tp, 1.0)

    @property
    def all_layers(self) -> FloatArray:
        """Layers of decoder and encoder, those that predict further tokens included; at least one."""
        return np.maximum(self.moe_layers + self.dense_layers + self.encoder_layers, 1.0)

    @property
    def replicas(self) -> FloatArray:
        """Ranks that have the same dense parameters and other tokens."""
        return self.dp * self.cp

    @property
    def expert_ranks(self) -> FloatArray:
        """Ranks over which the experts of a layer are spread."""
        return np.where(self.experts > 0, self.ep * self.expert_tp, 1.0)

    @property
    def expert_replicas(self) -> FloatArray:
        """Ranks that have the same experts and other tokens."""
        return np.maximum(self.replicas * self.tp / self.expert_ranks, 1.0)

    def take(self, rows: npt.NDArray[np.intp]) -> Columns:
        """Columns of some rows."""
        return Columns(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


def _experts(name: str) -> Callable[[TransformerShape], float]:
    return lambda shape: getattr(shape.experts, name) if shape.experts else 0.0


def _latent(name: str) -> Callable[[TransformerShape], float]:
    return lambda shape: getattr(shape.latent_attention, name) if shape.latent_attention else 0.0


_SHAPE: dict[str, Callable[[TransformerShape], Any]] = {
    "hidden": lambda s: s.hidden,
    "heads": lambda s: s.heads,
    "key_value_heads": lambda s: s.key_value_heads,
    "head_size": lambda s: s.head_size,
    "feed_forward": lambda s: s.feed_forward,
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
    "capacity_factor": _experts("capacity_factor"),
    "moe_layers": lambda s: s.layers - s.experts.dense_layers + s.multi_token_layers if s.experts else 0,
    "dense_layers": lambda s: s.experts.dense_layers if s.experts else s.layers + s.multi_token_layers,
    "latent": lambda s: s.latent_attention is not None,
    "query_rank": _latent("query_rank"),
    "key_value_rank": _latent("key_value_rank"),
    "rotary_head": _latent("rotary_head"),
    "plain_head": _latent("plain_head"),
    "value_head": _latent("value_head"),
    "encoder_layers": lambda s: s.encoder_layers,
    "encoder_sequence": lambda s: s.encoder_sequence_length if s.encoder_layers else 0,
    "multi_token_layers": lambda s: s.multi_token_layers,
    "predicted_positions": lambda s: s.predicted_positions,
}
_SHARDING = {kind: float(index) for index, kind in enumerate(OptimizerSharding)}
_DELAYED = {"zb_h1": 2.0, "zb_h2": 3.0, "zbv": 3.0, "dualpipe": 3.0, "dualpipe_v": 3.0}
"""Weight gradients that a schedule moves into each stage of the bubble (Qi et al., arXiv:2401.10241, table 2)."""
_PAIRED = ("multi_copy", "dualpipe", "dualpipe_v")
_UNFUSED = (AttentionKernel.UNFUSED, AttentionKernel.FUSED_SOFTMAX)
_FUSED_SUMS = (Stack.MEGATRON, Stack.TRANSFORMER_ENGINE, Stack.MINDSPEED)
"""Their products add to the gradients of earlier micro-batches (``gradient_accumulation_fusion``)."""
_MEGATRONS_DROPOUT = (Stack.MEGATRON, Stack.DEEPSPEED)
_STATED = (
    "devices", "dp", "tp", "pp", "vpp", "cp", "ep", "expert_tp", "micro_batch", "micro_batches",
    "sequence_parallel", "recompute_layers", "gradient_bytes", "overlap_gradients", "overlap_parameters",
    "overlap_tensor", "trained_fraction", "deterministic", "scattered_gradients", "separate_gate",
    "vocabulary_parallel_loss", "tokens_sent_once", "overlap_experts",
)  # fmt: skip
"""Columns that stand in a setup as they are."""
_SETUP: dict[str, Callable[[TrainingSetup], Any]] = {
    "recompute_full": lambda s: s.recompute is Recompute.FULL,
    "recompute_selective": lambda s: s.recompute is Recompute.SELECTIVE,
    "sent_gradient_bytes": lambda s: s.sent_gradient_bytes or s.gradient_bytes,
    "sharding": lambda s: _SHARDING[s.optimizer_sharding],
    "shard_group": lambda s: s.shard_group or s.dp,
    "weight_gradients_in_bubble": lambda s: _DELAYED.get(schedule_name(s.schedule), 0.0),
    "paired_passes": lambda s: schedule_name(s.schedule) in _PAIRED,
    "passes_in_bubble": lambda s: 2.0 if schedule_name(s.schedule) == "multi_copy" else 1.0,
    "fused_norm": lambda s: (s.fused_norm or traits_of(s.stack).fused_rms_norm) and not s.single_norms,
    "fused_gate": lambda s: traits_of(s.stack).fused_gate,
    "releases_parameters": lambda s: s.stack is Stack.DEEPSPEED and s.recompute is Recompute.FULL,
    "slow_dropout": lambda s: s.stack in _MEGATRONS_DROPOUT,
    "fused_sums": lambda s: s.stack in _FUSED_SUMS,
    "fused_attention": lambda s: s.attention not in _UNFUSED,
    "fused_softmax": lambda s: s.attention is AttentionKernel.FUSED_SOFTMAX,
}
_CUT = (
    "first_layers", "last_layers", "fullest_layers", "ends_together", "vocabulary", "dense_parameters",
    "expert_parameters",
)  # fmt: skip
_stated = attrgetter(*_STATED)
_cut = attrgetter("tp", "pp", "vpp", "ep", "expert_tp", "schedule", "stack", "layers_per_stage")


def stage_layers(network: TransformerShape, stages: int, stated: tuple[int, ...] = ()) -> FloatArray:
    """Layers of each stage, (stages,): as stated, or as even as whole layers allow, the first stages the fuller ones.

    Layers of an encoder, and those that predict further tokens, are shared out evenly where layers are stated.
    """
    others = network.encoder_layers + network.multi_token_layers
    if len(stated) == stages:
        return np.array(stated, dtype=np.float64) + others / stages
    return np.array(even_chunks(network.layers + others, stages), dtype=np.float64)


def _cut_columns(network: TransformerShape, setup: TrainingSetup) -> tuple[float, ...]:
    """The columns `_CUT`, which depend on how the network is cut."""
    ranks, together = _layers_of_ranks(network, setup)
    padded = traits_of(setup.stack).padded_vocabulary
    contents = stage_contents(network, setup)
    parameters = [
        stage_parameters(network, setup, contents[stage], padded) for stage in distinct_stages(network, setup)
    ]
    fullest = max(parameters, key=lambda stage: stage.total)
    vocabulary = local_vocabulary(network, setup.tp, padded) * setup.tp
    return (*ranks, together, vocabulary, fullest.dense, fullest.expert)


def _layers_of_ranks(network: TransformerShape, setup: TrainingSetup) -> tuple[tuple[float, float, float], float]:
    """Layers of the ranks with the embedding and with the head, of the fullest, and what of the other end they have."""
    name, pp = schedule_name(setup.schedule), setup.pp
    if pp == 1:
        layers = float(stage_layers(network, 1).sum())
        return (layers, layers, layers), 1.0
    if name in V_SHAPED:
        down, up = stage_layers(network, 2 * pp, setup.layers_per_stage).reshape(2, pp)
        ranks = down + up[::-1]
        return (float(ranks[0]), float(ranks[0]), float(ranks.max())), 1.0
    ranks = stage_layers(network, pp * setup.vpp, setup.layers_per_stage).reshape(setup.vpp, pp).sum(axis=0)
    if name == BOTH_DIRECTIONS:
        ranks = (ranks + ranks[::-1]) / 2
    return (float(ranks[0]), float(ranks[-1]), float(ranks.max())), 0.5 if name == BOTH_DIRECTIONS else 0.0


def columns_of(runs: Sequence[TrainingRun]) -> Columns:
    """Columns of runs of transformers.

    Each distinct network, and each distinct way to cut one, is looked at once.
    """
    shapes: dict[int, int] = {}
    cuts: dict[tuple[Any, ...], int] = {}
    shape_values: list[list[float]] = []
    cut_values: list[tuple[float, ...]] = []
    places = np.zeros((len(runs), 2), dtype=np.intp)
    for index, run in enumerate(runs):
        network = run.network
        assert isinstance(network, TransformerShape)
        shape = shapes.setdefault(id(network), len(shapes))
        if shape == len(shape_values):
            shape_values.append([float(value(network)) for value in _SHAPE.values()])
        cut = cuts.setdefault((shape, *_cut(run.setup)), len(cuts))
        if cut == len(cut_values):
            cut_values.append(_cut_columns(network, run.setup))
        places[index] = shape, cut
    by_shape = np.array(shape_values, dtype=np.float64).reshape(-1, len(_SHAPE))[places[:, 0]]
    by_cut = np.array(cut_values, dtype=np.float64).reshape(-1, len(_CUT))[places[:, 1]]
    stated = np.array([_stated(run.setup) for run in runs], dtype=np.float64).reshape(-1, len(_STATED))
    values = dict(zip((*_SHAPE, *_CUT, *_STATED), (*by_shape.T, *by_cut.T, *stated.T), strict=True))
    for name, setup_value in _SETUP.items():
        values[name] = np.array([setup_value(run.setup) for run in runs], dtype=np.float64)
    return Columns(**{name: np.ascontiguousarray(column) for name, column in values.items()})
