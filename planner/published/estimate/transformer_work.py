"""The operators of a transformer layer, of its embedding and of its head, on one rank and one micro-batch.

Shapes are local: heads, feed-forward columns and vocabulary are cut over ``tp`` (Shoeybi et al., "Megatron-LM",
arXiv:1909.08053), the sequence over ``cp``, what lies between the cut products over ``tp`` as well with sequence
parallelism (Korthikanti et al., arXiv:2205.05198), experts over ``ep`` ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from planner.published.estimate.columns import Columns, FloatArray
from simulator.expert_messages import places_reached

ROUTER_BYTES = 4  # routers compute in float32

_SOFTMAX_BATCHES = 4  # ``FusedScaleMaskSoftmax.is_kernel_available`` of Megatron-LM
_DROPOUT_SLOWDOWN = 2.5
"""How much longer Megatron's dropout takes than its bytes do. A random number costs some 30 integer operations (Philox,
Salmon et al., SC11: ten rounds for four numbers), which last as long as half a dozen bytes, and its compiled function
masks in steps of its own. Chosen with the published rows in view."""
_UNFUSED_SOFTMAX_KERNELS = 5.0  # scale, mask, softmax, cast, dropout


class Part(StrEnum):
    """Where in the network an operator stands."""

    ATTENTION_BLOCK = "attention_block"
    """Every layer: norms, projections, attention."""
    DENSE = "dense"
    """The feed-forward network of dense layers."""
    EXPERTS = "experts"
    """The feed-forward network of layers with experts."""
    CROSS_ATTENTION = "cross_attention"
    """What the layers of a decoder look up in the encoder."""
    ENCODER = "encoder"
    """Every layer of the encoder of an encoder-decoder."""
    EMBEDDING = "embedding"
    HEAD = "head"


@dataclass(frozen=True, kw_only=True, eq=False)
class MatrixProduct:
    """``(m, k) x (k, n)``, ``batch`` times; ``weight`` says that the second factor is a parameter.

    ``groups`` above 1 are the experts that share the rows ``m`` of all of them together. ``low_precision`` products
    run in 8 or 4 bits where the setup says so.
    """

    name: str
    part: Part
    m: FloatArray
    n: FloatArray
    k: FloatArray
    batch: FloatArray | float = 1.0
    groups: FloatArray | float = 1.0
    grouped: bool = False
    weight: bool = True
    low_precision: bool = True
    core: bool = False
    """Part of the attention core, which selective recompute computes again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FusedAttention:
    """The fused attention kernel."""

    name: str
    part: Part
    batch: FloatArray
    heads: FloatArray
    key_value_heads: FloatArray
    queries: FloatArray
    keys: FloatArray
    head_size: FloatArray
    causal: FloatArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Pointwise:
    """Kernels bound by memory traffic: bytes forward and backward, and how many kernels that is at least."""

    name: str
    part: Part
    forward_bytes: FloatArray
    backward_bytes: FloatArray
    kernels: FloatArray | float = 1.0
    core: bool = False


Operator = MatrixProduct | FusedAttention | Pointwise


def part_shares(c: Columns) -> dict[Part, FloatArray]:
    """Share of all layers that have a part, for the parts of layers."""
    decoder = (c.moe_layers + c.dense_layers) / c.all_layers
    return {
        Part.ATTENTION_BLOCK: decoder,
        Part.DENSE: c.dense_layers / c.all_layers,
        Part.EXPERTS: c.moe_layers / c.all_layers,
        Part.CROSS_ATTENTION: np.where(c.encoder_layers > 0, decoder, 0.0),
        Part.ENCODER: c.encoder_layers / c.all_layers,
    }


def tensor_messages(c: Columns) -> tuple[FloatArray, FloatArray]:
    """How many messages tensor ranks exchange in an average layer and pass, and the tokens of each on average.

    One around every attention, one around the feed-forward network; experts are left to their own messages.
    """
    share = part_shares(c)
    shared_experts = np.where(c.shared_feed_forward > 0, share[Part.EXPERTS], 0.0)
    decoder = share[Part.ATTENTION_BLOCK] + share[Part.CROSS_ATTENTION] + share[Part.DENSE] + shared_experts
    encoder = 2 * share[Part.ENCODER]
    tokens = c.micro_batch / c.cp * (decoder * c.sequence + encoder * c.encoder_sequence)
    return decoder + encoder, tokens / (decoder + encoder)


def operators(c: Columns, element: float) -> list[Operator]:
    """All operators of one micro-batch; those of a layer stand once.

    An operator that a run does not have works on nothing in it.

    Parameters
    ----------
    element
        Bytes of an activation element.
    """
    return [
        *_attention_block(c, element, Part.ATTENTION_BLOCK),
        *_dense_network(c, element, Part.DENSE),
        *_expert_network(c, element),
        *_encoder_decoder(c, element),
        *_embedding(c, element),
        *_head(c, element),
    ]


def attention_width(c: Columns) -> FloatArray:
    """Width of queries, cut over ``tp``."""
    return c.heads * c.head_size / c.tp


def local_key_value_heads(c: Columns) -> FloatArray:
    """Key-value heads of one rank: at least one, copied where there are fewer than ranks."""
    return np.maximum(c.key_value_heads / c.tp, 1.0)


def routed_tokens(c: Columns) -> FloatArray:
    """Token copies that the experts of one rank receive when routing is balanced, or every expert is filled."""
    return sent_copies(c) * c.expert_tp


def sent_copies(c: Columns) -> FloatArray:
    """Token copies that one rank sends to experts; tensor ranks share the tokens out."""
    return c.tokens / c.tp * c.experts_per_token * np.where(c.capacity_factor > 0, c.capacity_factor, 1.0)


def once_a_node(c: Columns, devices_per_node: int) -> FloatArray:
    """Share of the token copies that travels where a dispatcher sends a token to each node (or rank) but once.

    How many nodes that are on average, `simulator.expert_messages` says; within a node ranks take the place of nodes.
    """
    ranks = np.maximum(c.ep * c.expert_tp, 1.0)
    places = np.where(ranks > devices_per_node, ranks / devices_per_node, np.maximum(c.ep, 1.0))
    chosen = np.maximum(c.experts_per_token, 1.0)
    return np.where(c.tokens_sent_once > 0, places_reached(places, chosen) / chosen, 1.0)


def dropout_cost(c: Columns) -> FloatArray:
    """Bytes that dropout takes as long as, over those that it moves; 0 without dropout."""
    return c.dropout * np.where(c.slow_dropout > 0, _DROPOUT_SLOWDOWN, 1.0)


def _norm_bytes(c: Columns, element: float) -> tuple[FloatArray, FloatArray]:
    """Traffic of one norm on a rank, forward and backward.

    Fused: read and write once, backward two reads more. An RMSNorm of single operators passes through memory as
    float32: cast, square, mean, two products and the cast back, 36 bytes an element at half precision.
    """
    unfused = (c.rms_norm > 0) & (c.fused_norm == 0)
    per_element = np.where(unfused, 8 * element + 20, 2 * element)
    size = c.norm_tokens * c.hidden
    return size * per_element, size * np.where(unfused, 16 * element + 40, 5 * element)


def _attention_block(c: Columns, element: float, part: Part) -> list[Operator]:
    width = (attention_width(c) + local_key_value_heads(c) * c.head_size) * c.tokens * element
    outputs = c.tokens * (attention_width(c) + 2 * local_key_value_heads(c) * c.head_size + c.hidden)
    return [
        *_norms_and_sums(c, element, part, 2),
        *_projections(c, part),
        Pointwise(
            name="rotary", part=part, forward_bytes=2 * width * c.rotary, backward_bytes=2 * width * c.rotary,
            kernels=2,
        ),
        *_attention_core(c, element, part, _seen_keys(c)),
        _attention_output(c, part),
        _bias_gradients(c, element, part, outputs),
    ]  # fmt: skip


def _norms_and_sums(c: Columns, element: float, part: Part, count: int) -> list[Operator]:
    """`count` pairs of a norm and the residual sum behind it."""
    norm, norm_back = _norm_bytes(c, element)
    sums = c.norm_tokens * c.hidden * element * (1 + dropout_cost(c) / 3)
    return [
        Pointwise(
            name="norms", part=part, forward_bytes=count * norm, backward_bytes=count * norm_back, kernels=count
        ),
        Pointwise(
            name="residual sums", part=part, forward_bytes=3 * count * sums, backward_bytes=2 * count * sums,
            kernels=count,
        ),
    ]  # fmt: skip


def _attention_output(c: Columns, part: Part) -> MatrixProduct:
    depth = np.where(c.latent > 0, c.heads * c.value_head / c.tp, attention_width(c))
    return MatrixProduct(name="attention output", part=part, m=c.tokens, n=c.hidden, k=depth)


def _seen_keys(c: Columns) -> FloatArray:
    """Keys that fused attention walks over for every query, twice as many as it sees where the mask is causal.

    A causal window of ``w`` tokens leaves ``w - w^2 / 2s`` of ``s`` keys to a query on average.
    """
    window = np.minimum(c.window, c.sequence)
    causal = window * (2 - window / np.maximum(c.sequence, 1.0))
    return np.where(c.window > 0, np.where(c.causal > 0, causal, window), c.sequence)


def _projections(c: Columns, part: Part) -> list[Operator]:
    tokens = c.tokens
    plain = attention_width(c) + 2 * local_key_value_heads(c) * c.head_size
    query_in = np.where(c.query_rank > 0, c.query_rank, c.hidden)
    latent = c.latent > 0
    query_key_value = MatrixProduct(
        name="query, key, value", part=part, m=tokens, n=np.where(latent, attention_width(c), plain),
        k=np.where(latent, query_in, c.hidden),
    )  # fmt: skip
    if not latent.any():
        return [query_key_value]
    down = np.where(latent, c.query_rank + c.key_value_rank + c.rotary_head, 0.0)
    up = np.where(latent, c.heads * (c.plain_head + c.value_head) / c.tp, 0.0)
    return [
        MatrixProduct(name="latent down", part=part, m=tokens, n=down, k=c.hidden),
        query_key_value,
        MatrixProduct(name="latent up", part=part, m=tokens, n=up, k=np.where(latent, c.key_value_rank, 1.0)),
    ]


def _attention_core(c: Columns, element: float, part: Part, keys: FloatArray) -> list[Operator]:
    """Fused attention, or scores and softmax in memory; each run has one of the two.

    Unfused passes over the scores: the softmax alone reads and writes; without a fused kernel come scale, mask
    and the casts to float32 and back. Backward reads the output and its gradient and writes.
    """
    queries = c.sequence / c.cp
    every_key = np.where(c.window > 0, c.sequence, keys)  # masks of windows hide scores, they do not spare them
    fused, scores_kept = c.fused_attention > 0, 1 - c.fused_attention
    heads = np.maximum(c.heads / c.tp, 1.0)
    scores = c.micro_batch * heads * queries * every_key * scores_kept
    drop = dropout_cost(c) * (2 * element + 1)
    # Megatron's kernel takes four matrices of scores at a time; other numbers go the long way.
    one_kernel = (c.fused_softmax > 0) & (np.rint(c.micro_batch * heads) % _SOFTMAX_BATCHES == 0)
    softmax = np.where(one_kernel, 2 * element, 10 * element + 12)
    softmax_back = np.where(one_kernel, 3 * element, 10 * element + 12)
    batch = c.micro_batch * heads * scores_kept
    value = np.where(c.latent > 0, c.value_head, c.head_size)
    return [
        FusedAttention(
            name="attention", part=part, batch=np.where(fused, c.micro_batch, 0.0), heads=heads,
            key_value_heads=local_key_value_heads(c), queries=queries, keys=keys,
            head_size=(c.head_size + value) / 2, causal=c.causal,
        ),
        MatrixProduct(
            name="scores", part=part, m=queries, n=every_key, k=c.head_size, batch=batch, weight=False,
            low_precision=False, core=True,
        ),
        Pointwise(
            name="softmax", part=part, forward_bytes=scores * (softmax + drop),
            backward_bytes=scores * (softmax_back + drop), kernels=np.where(one_kernel, 2.0, _UNFUSED_SOFTMAX_KERNELS),
            core=True,
        ),
        MatrixProduct(
            name="weighted values", part=part, m=queries, n=value, k=every_key, batch=batch, weight=False,
            low_precision=False, core=True,
        ),
    ]  # fmt: skip


def _dense_network(c: Columns, element: float, part: Part) -> list[Operator]:
    tokens = c.tokens
    inner = c.feed_forward / c.tp
    wide = tokens * inner * element
    return [
        MatrixProduct(name="feed-forward in", part=part, m=tokens, n=inner * (1 + c.gated), k=c.hidden),
        _activation(c, "activation", part, wide),
        MatrixProduct(name="feed-forward out", part=part, m=tokens, n=c.hidden, k=inner),
        _bias_gradients(c, element, part, tokens * (inner * (1 + c.gated) + c.hidden)),
    ]


def _bias_gradients(c: Columns, element: float, part: Part, size: FloatArray) -> Pointwise:
    """Summing the gradients of outputs over the tokens, which biases need."""
    summed = size * element * (c.biases > 0)
    return Pointwise(
        name="bias gradients", part=part, forward_bytes=np.zeros_like(summed), backward_bytes=summed, kernels=2
    )


def _activation(c: Columns, name: str, part: Part, wide: FloatArray) -> Pointwise:
    """The activation function on `wide` bytes; a gate is multiplied in the same kernel, or in one of its own."""
    apart = c.gated * (1 - c.fused_gate)
    return Pointwise(
        name=name, part=part, forward_bytes=wide * (2 + c.gated + 2 * apart),
        backward_bytes=wide * (3 + 2 * c.gated + 3 * apart),
    )  # fmt: skip


def _expert_network(c: Columns, element: float) -> list[Operator]:
    if not c.experts.any():
        return []
    part = Part.EXPERTS
    local = np.maximum(c.experts / c.ep, 1.0)
    routed = routed_tokens(c)
    inner = c.expert_feed_forward / c.expert_tp
    wide, moved = routed * inner * element, routed * c.hidden * element
    shared = c.shared_feed_forward / c.tp
    logits = c.norm_tokens * c.experts * ROUTER_BYTES
    return [
        MatrixProduct(name="router", part=part, m=c.norm_tokens, n=c.experts, k=c.hidden, low_precision=False),
        Pointwise(name="routing", part=part, forward_bytes=6 * logits, backward_bytes=6 * logits, kernels=10),
        Pointwise(name="permutation", part=part, forward_bytes=6 * moved, backward_bytes=6 * moved, kernels=4),
        MatrixProduct(
            name="experts in", part=part, m=routed, n=inner * (1 + c.gated), k=c.hidden, groups=local, grouped=True
        ),
        _activation(c, "expert activation", part, wide),
        MatrixProduct(name="experts out", part=part, m=routed, n=c.hidden, k=inner, groups=local, grouped=True),
        MatrixProduct(name="shared expert in", part=part, m=c.tokens, n=shared * (1 + c.gated), k=c.hidden),
        _activation(c, "shared expert activation", part, c.tokens * shared * element),
        MatrixProduct(name="shared expert out", part=part, m=c.tokens, n=c.hidden, k=shared),
    ]  # fmt: skip


def _encoder_decoder(c: Columns, element: float) -> list[Operator]:
    """A layer of the encoder, which sees all its tokens, and the attention of a decoder layer to what it found."""
    if not c.encoder_layers.any():
        return []
    none = np.zeros_like(c.tp)
    encoder = replace(c, sequence=c.encoder_sequence, causal=none, window=none)
    decoder = replace(c, sequence=np.where(c.encoder_layers > 0, c.sequence, 0.0), causal=none, window=none)
    part, keys = Part.CROSS_ATTENTION, local_key_value_heads(c) * c.head_size
    return [
        *_attention_block(encoder, element, Part.ENCODER),
        *_dense_network(encoder, element, Part.ENCODER),
        *_norms_and_sums(decoder, element, part, 1),
        MatrixProduct(name="query", part=part, m=decoder.tokens, n=attention_width(c), k=c.hidden),
        MatrixProduct(name="key, value", part=part, m=encoder.tokens, n=2 * keys, k=c.hidden),
        *_attention_core(decoder, element, part, c.encoder_sequence),
        _attention_output(decoder, part),
    ]


def _embedding(c: Columns, element: float) -> list[Operator]:
    size = c.tokens * c.hidden * element
    return [
        Pointwise(
            name="embedding", part=Part.EMBEDDING, forward_bytes=size * (2 + 2 * (c.positions > 0) + 3 * c.dropout),
            backward_bytes=size * (3 + 2 * (c.positions > 0) + 3 * c.dropout), kernels=4,
        )
    ]  # fmt: skip


def _head(c: Columns, element: float) -> list[Operator]:
    """Last norm, logits and the loss: logits are cast to float32 and read for maximum, exponents and gradient.

    Where the loss takes the whole vocabulary the logits of all tensor ranks are received, put together and looked
    through once more for the accuracy, and their gradient is written before it is filled.

    Each layer that predicts a token further ahead joins the embedding of the token before it, and has the same head
    (DeepSeek-V3, arXiv:2412.19437, section 2.2).
    """
    norm, norm_back = _norm_bytes(c, element)
    heads = 1 + c.multi_token_layers
    predicted = c.tokens * c.predicted_positions * heads
    whole = (c.vocabulary_parallel_loss == 0) & (c.tp > 1)
    logits = predicted * c.vocabulary / np.where(whole, 1.0, c.tp)
    return [
        Pointwise(name="last norm", part=Part.HEAD, forward_bytes=norm * heads, backward_bytes=norm_back * heads),
        MatrixProduct(
            name="joined embedding", part=Part.HEAD, m=c.tokens * c.multi_token_layers, n=c.hidden / c.tp,
            k=2 * c.hidden,
        ),
        MatrixProduct(name="logits", part=Part.HEAD, m=predicted, n=c.vocabulary / c.tp, k=c.hidden,
                      low_precision=False),
        Pointwise(name="cross entropy", part=Part.HEAD,
                  forward_bytes=logits * (element + 20 + whole * (3 * element + 4)),
                  backward_bytes=logits * (element + 12 + whole * 8), kernels=8),
    ]  # fmt: skip
