"""Parameters of a transformer, of one layer on one rank, and of every pipeline stage.

The counts are exact for the architectures that `TransformerShape` describes; what is cut over the tensor ranks
(Shoeybi et al., arXiv:1909.08053) and what every tensor rank holds in full (norms, biases after a cut product,
the router) is told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from planner.cost.training_run import Hybrid, TrainingSetup, TransformerShape
from simulator.errors import InputError

WEIGHT_GRADIENT_SHARE = 32 / 34
"""Of a layer's activations, what the weight gradients need: 32 of 34 s b h (Qi et al., arXiv:2401.10241, table 1)."""
V_SHAPED = ("zbv", "dualpipe_v")
"""Schedules that place two chunks a rank, down the ranks and up again: the first rank has both ends."""
BOTH_DIRECTIONS = "dualpipe"
"""The schedule that keeps two copies of the network, one for each direction of the pipeline."""


def _interleaved(stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    return min(2 * (pp - stage - 1) + (vpp - 1) * pp + 1, micro_batches * vpp) / vpp


_Formula = Callable[[int, int, int, int], float]
_FORMULAS: dict[str, _Formula] = {
    "gpipe": lambda stage, pp, vpp, m: m,
    "gradient_accumulation": lambda stage, pp, vpp, m: 1,
    "1f1b": lambda stage, pp, vpp, m: min(pp - stage, m) if vpp == 1 else _interleaved(stage, pp, vpp, m),
    "interleaved_1f1b": _interleaved,
    "zb_h1": lambda stage, pp, vpp, m: min(pp - stage + WEIGHT_GRADIENT_SHARE * stage, m),
    "zb_h2": lambda stage, pp, vpp, m: min(2 * (pp - stage) - 1 + WEIGHT_GRADIENT_SHARE * 2 * stage, m),
    "zbv": lambda stage, pp, vpp, m: min(pp, m),
    "dualpipe": lambda stage, pp, vpp, m: min((pp + 1) / 2, m),
    "dualpipe_v": lambda stage, pp, vpp, m: min(pp + 0.5, m),
    "multi_copy": lambda stage, pp, vpp, m: min(2 * (pp - stage), m),
}


def schedule_name(schedule: str) -> str:
    """The name of a schedule as in `simulator.schedules`.

    >>> schedule_name("ZB-H1")
    'zb_h1'
    """
    return schedule.lower().replace("-", "_")


def micro_batches_in_flight(schedule: str, stage: int, pp: int, vpp: int, micro_batches: int) -> float:
    """Largest number of micro-batches whose activations of this rank's layers stand at one time.

    ``gpipe`` (Huang et al., arXiv:1811.06965): all ``m``. ``1f1b`` (Narayanan et al., arXiv:2006.09503): ``p - i``.
    Interleaved (arXiv:2104.04473): ``2 (p - i - 1) + (v - 1) p + 1`` chunks of a ``v``-th of the rank's layers. Zero
    bubble (arXiv:2401.10241): ``zb_h1`` puts off ``i`` weight gradients, ``zb_h2`` holds ``2 (p - i) - 1`` and puts
    off ``2 i``; ``zbv`` (arXiv:2405.15362) ``p`` on every rank. ``dualpipe`` (arXiv:2412.19437): ``p + 1`` of one
    copy of the stage, half as many of the two copies of a rank.

    Raises
    ------
    InputError
        For a schedule without a formula.
    """
    formula = _FORMULAS.get(schedule_name(schedule))
    if formula is None:
        raise InputError(
            f"schedule {schedule!r} has no formula for the micro-batches in flight: "
            f"choose one of {', '.join(_FORMULAS)}"
        )
    return float(formula(stage, pp, vpp, micro_batches))


def stage_residency(setup: TrainingSetup, stage: int) -> float:
    """Micro-batches in flight of rank `stage`, whose chunks need not have equally many layers.

    The result, times what all layers of the stage keep, is what stands. A rank that interleaves takes ``pp``
    micro-batches (``micro_batch_group`` where that is more) through one chunk, then as many through the next, and so
    on: the first chunks hold more of them than the last. A schedule that was searched for under a limit of memory uses
    it up (ZB-1p and ZB-2p: ``p`` and ``2 p`` micro-batches on every rank; arXiv:2401.10241, section 5).
    """
    if setup.pipelines_in_flight:
        return float(min(setup.pipelines_in_flight * setup.pp, setup.micro_batches))
    even = micro_batches_in_flight(setup.schedule, stage, setup.pp, setup.vpp, setup.micro_batches)
    interleaved = schedule_name(setup.schedule) in ("1f1b", "interleaved_1f1b") and setup.vpp > 1
    if interleaved and setup.micro_batch_group > setup.pp:
        more = (setup.vpp - 1) * (setup.micro_batch_group - setup.pp) / setup.vpp
        even = min(even + more, float(setup.micro_batches))
    layers = setup.layers_per_stage[stage :: setup.pp]
    if not interleaved or not layers:
        return even
    group = min(max(setup.pp, setup.micro_batch_group), setup.micro_batches)
    rounds, rest = divmod(even * setup.vpp, group * setup.vpp)
    held = (rounds * group + min(max(rest - chunk * group, 0.0), group) for chunk in range(setup.vpp))
    return sum(count * each for count, each in zip(layers, held, strict=True)) / max(sum(layers), 1)


VOCABULARY_MULTIPLE = 128
"""Megatron pads the vocabulary to this times ``tp`` (``--make-vocab-size-divisible-by``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters:
    """Parameters on one rank: ``dense`` are shared by all data ranks, ``expert`` by those of one expert rank."""

    dense: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Both together."""
        return self.dense + self.expert


@dataclass(frozen=True, slots=True, kw_only=True)
class StageContent:
    """What one pipeline stage holds: numbers of layers by kind, and the ends of the network."""

    dense_layers: float
    expert_layers: float
    encoder_layers: float
    embedding: bool
    head: bool
    multi_token_layers: int = 0

    @property
    def layers(self) -> float:
        """Layers of all kinds."""
        return self.dense_layers + self.expert_layers + self.encoder_layers + self.multi_token_layers


def parameter_count(shape: TransformerShape) -> int:
    """Parameters of the whole network, vocabulary unpadded."""
    if shape.hybrid:
        return _of_kinds(shape, shape.hybrid)
    dense, expert, encoder = _layer_counts(shape, 1, 1, 1)
    expert_layers = shape.layers - shape.experts.dense_layers if shape.experts else 0
    layers = (shape.layers - expert_layers) * dense.total + expert_layers * expert.total
    layers += shape.encoder_layers * encoder.total + shape.multi_token_layers * (
        (expert if shape.experts else dense).total + multi_token_projection(shape)
    )
    table = shape.vocabulary * shape.hidden
    ends = table * (1 if shape.tied_embeddings else 2) + shape.learned_positions * shape.hidden
    ends += _norm(shape) * (2 if shape.embedding_norm else 1)
    return round(layers + ends + (_norm(shape) if shape.encoder_layers else 0))


def _of_kinds(shape: TransformerShape, hybrid: Hybrid) -> int:
    """Parameters of a network whose layers are of one kind each: a norm, and projections without biases."""
    hidden, inner, experts = shape.hidden, hybrid.heads * hybrid.head_size, shape.experts
    read = inner + 2 * hybrid.groups * hybrid.state
    """Channels of the convolution over time, of four steps and a bias."""
    each = {
        "M": hidden * (inner + read + hybrid.heads) + 5 * read + 3 * hybrid.heads + inner + inner * hidden,
        "*": 2 * hidden * shape.head_size * (shape.heads + shape.key_value_heads),
        "-": 2 * hidden * shape.feed_forward,
    }
    if experts:
        each["E"] = experts.count * (hidden + 2 * (hybrid.latent or hidden) * experts.feed_forward)
        each["E"] += 2 * hidden * (experts.shared_feed_forward + hybrid.latent)
    tables = (1 if shape.tied_embeddings else 2) * shape.vocabulary * hidden
    return tables + hidden + sum(hidden + each[kind] for kind in hybrid.kinds)


def local_vocabulary(shape: TransformerShape, tp: int, padded: bool) -> float:
    """Rows of the embedding table on one tensor rank."""
    multiple = VOCABULARY_MULTIPLE if padded else 1
    return -(-shape.vocabulary // (multiple * tp)) * multiple


def layer_parameters(shape: TransformerShape, setup: TrainingSetup) -> tuple[RankParameters, ...]:
    """One dense layer, one layer with experts and one encoder layer on one rank."""
    return _layer_counts(shape, setup.tp, setup.ep, setup.expert_tp)


def multi_token_projection(shape: TransformerShape) -> int:
    """What a multi-token prediction layer has besides its block: a product of width 2h to h and three norms."""
    return 2 * shape.hidden * shape.hidden + 3 * _norm(shape)


def end_parameters(shape: TransformerShape, stage: StageContent, tp: int, padded: bool) -> float:
    """Embedding, head, final norm and extra projections of a stage, on one rank."""
    table = local_vocabulary(shape, tp, padded) * shape.hidden
    tables = float(stage.embedding) + float(stage.head)
    if stage.embedding and stage.head and shape.tied_embeddings:
        tables = 1.0
    total = tables * table
    if stage.embedding:
        total += shape.learned_positions * shape.hidden + _norm(shape) * shape.embedding_norm
    if stage.head:
        total += _norm(shape) * (2 if shape.encoder_layers else 1)
    return total + stage.multi_token_layers * multi_token_projection(shape) / tp


def stage_parameters(
    shape: TransformerShape, setup: TrainingSetup, stage: StageContent, padded: bool
) -> RankParameters:
    """Parameters of a stage on one rank."""
    return _stage(shape, setup.tp, setup.ep, setup.expert_tp, stage, padded)


@lru_cache(maxsize=4096)
def _stage(
    shape: TransformerShape, tp: int, ep: int, expert_tp: int, stage: StageContent, padded: bool
) -> RankParameters:
    dense, expert, encoder = _layer_counts(shape, tp, ep, expert_tp)
    extra = expert if shape.experts else dense
    counts = (
        (stage.dense_layers, dense),
        (stage.expert_layers, expert),
        (stage.encoder_layers, encoder),
        (stage.multi_token_layers, extra),
    )
    return RankParameters(
        dense=sum(n * layer.dense for n, layer in counts) + end_parameters(shape, stage, tp, padded),
        expert=sum(n * layer.expert for n, layer in counts),
    )


@lru_cache(maxsize=4096)
def _layer_counts(shape: TransformerShape, tp: int, ep: int, expert_tp: int) -> tuple[RankParameters, ...]:
    attention = _attention(shape, tp) + 2 * _norm(shape)
    cross = _attention(shape, tp) + _norm(shape) if shape.encoder_layers else 0.0
    mlp = _feed_forward(shape, shape.feed_forward, tp)
    dense = RankParameters(dense=attention + cross + mlp)
    encoder = RankParameters(dense=attention + mlp)
    if not shape.experts:
        return dense, dense, encoder
    shared = shape.experts.shared_feed_forward
    router = shape.hidden * shape.experts.count
    every = attention + router + (_feed_forward(shape, shared, tp) if shared else 0.0)
    one = _feed_forward(shape, shape.experts.feed_forward, expert_tp)
    return dense, RankParameters(dense=every, expert=one * shape.experts.count / ep), encoder


def _norm(shape: TransformerShape) -> int:
    return shape.hidden * (1 if shape.rms_norm else 2)


def _feed_forward(shape: TransformerShape, width: int, tp: int) -> float:
    inner = (2 if shape.gated else 1) * width
    weights = shape.hidden * (inner + width) / tp
    return weights + (inner / tp + shape.hidden if shape.biases else 0)


def _attention(shape: TransformerShape, tp: int) -> float:
    hidden, latent = shape.hidden, shape.latent_attention
    if latent:
        width = shape.heads * (latent.plain_head + latent.rotary_head)
        if latent.query_rank:
            query = hidden * latent.query_rank + latent.query_rank + latent.query_rank * width / tp
        else:
            query = hidden * width / tp
        compressed = hidden * (latent.key_value_rank + latent.rotary_head) + latent.key_value_rank
        up = latent.key_value_rank * shape.heads * (latent.plain_head + latent.value_head) / tp
        return query + compressed + up + shape.heads * latent.value_head * hidden / tp
    query, key_value = shape.heads * shape.head_size / tp, shape.head_size * max(shape.key_value_heads / tp, 1)
    weights = hidden * (2 * query + 2 * key_value)
    return weights + (query + 2 * key_value + hidden if shape.biases else 0)


def stage_contents(shape: TransformerShape, setup: TrainingSetup) -> tuple[StageContent, ...]:
    """What each of the ``pp`` ranks of the pipeline holds.

    Chunk ``i`` of the network lies on rank ``i mod pp``; V-shaped schedules place the second ``pp`` chunks in reverse,
    and a schedule in both directions has every stage twice. Layers that do not divide evenly go to the first chunks.

    Raises
    ------
    InputError
        When ``layers_per_stage`` does not add up to the layers, or has not one entry for each chunk.
    """
    return _contents(shape, setup.pp, setup.vpp, schedule_name(setup.schedule), setup.layers_per_stage)


def distinct_stages(shape: TransformerShape, setup: TrainingSetup) -> tuple[int, ...]:
    """The first stage of each content."""
    return _first_of_each(stage_contents(shape, setup))


@lru_cache(maxsize=4096)
def _first_of_each(contents: tuple[StageContent, ...]) -> tuple[int, ...]:
    first: dict[StageContent, int] = {}
    for index, content in enumerate(contents):
        first.setdefault(content, index)
    return tuple(first.values())


@lru_cache(maxsize=4096)
def _contents(
    shape: TransformerShape, pp: int, vpp: int, name: str, layers_per_stage: tuple[int, ...]
) -> tuple[StageContent, ...]:
    folded = name in V_SHAPED and pp > 1
    count = pp * (2 if folded else vpp)
    chunks = layers_per_stage or even_chunks(shape.layers, count)
    if len(chunks) != count or sum(chunks) != shape.layers:
        raise InputError(
            f"layers_per_stage has {len(chunks)} entries that add up to {sum(chunks)}; pp {pp} in {count // pp} chunks "
            f"needs {count} entries that add up to the {shape.layers} layers: correct the entries"
        )
    first_expert = shape.experts.dense_layers if shape.experts else shape.layers
    ranks = [index if index < pp else 2 * pp - 1 - index if folded else index % pp for index in range(count)]
    dense, experts = [0] * pp, [0] * pp
    before = 0
    for rank, layers in zip(ranks, chunks, strict=True):
        in_front = min(max(first_expert - before, 0), layers)
        dense[rank] += in_front
        experts[rank] += layers - in_front
        before += layers
    contents = tuple(
        StageContent(
            dense_layers=dense[rank],
            expert_layers=experts[rank],
            encoder_layers=shape.encoder_layers / pp,
            embedding=rank == 0 or (rank == ranks[-1] and shape.multi_token_layers > 0),
            head=rank == ranks[-1],
            multi_token_layers=shape.multi_token_layers if rank == ranks[-1] else 0,
        )
        for rank in range(pp)
    )
    if name == BOTH_DIRECTIONS and pp > 1:
        return tuple(_both(one, other) for one, other in zip(contents, reversed(contents), strict=True))
    return contents


def _both(one: StageContent, other: StageContent) -> StageContent:
    return StageContent(
        dense_layers=one.dense_layers + other.dense_layers,
        expert_layers=one.expert_layers + other.expert_layers,
        encoder_layers=one.encoder_layers + other.encoder_layers,
        embedding=one.embedding or other.embedding,
        head=one.head or other.head,
        multi_token_layers=one.multi_token_layers + other.multi_token_layers,
    )


def even_chunks(layers: int, chunks: int) -> tuple[int, ...]:
    """Cut `layers` into `chunks` parts as even as can be, longer ones first."""
    each, longer = divmod(layers, chunks)
    return tuple(each + (index < longer) for index in range(chunks))
