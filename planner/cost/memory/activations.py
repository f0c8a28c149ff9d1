"""Bytes that the forward pass of one layer keeps for its backward pass, operator by operator.

The bookkeeping is that of Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198): ``s b h (34 + 5 a s / h)`` for a GPT layer in 16 bits with dropout,
``s b h (10 + 24 / t + 5 a s / (h t))`` with tensor parallelism and ``/ t`` throughout with sequence parallelism.
Here it is said by operator, so that gates, RMSNorm, grouped and latent attention, fused kernels and experts follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.cost.memory_traits import LOW_PRECISION_BYTES, UNEVEN_ROUTING, MemoryTraits
from planner.cost.stacks import AttentionKernel
from planner.cost.training_run import Recompute, TrainingSetup, TransformerShape

_UNFUSED = (AttentionKernel.UNFUSED, AttentionKernel.FUSED_SOFTMAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerActivations:
    """Bytes of one layer, one micro-batch, one rank.

    ``saved`` stands from forward to backward with nothing recomputed, ``core`` is the part of it that selective
    recompute drops, ``function`` the output of the activation function, ``norms`` those of the layer's norms that
    products read, ``parts`` what other parts of a layer keep of their own, by Megatron-LM's names
    (``--recompute-modules``), ``input`` all that full recompute keeps,
    ``alternate`` what is kept where every second product is computed again, ``working`` what the backward of the
    layer needs besides.
    """

    saved: float
    core: float
    function: float
    norms: float
    parts: Mapping[str, float]
    input: float
    alternate: float
    working: float

    def kept(self, setup: TrainingSetup, mode: Recompute) -> float:
        """Bytes that a layer keeps from forward to backward when `mode` is recomputed."""
        if mode is Recompute.FULL:
            return self.input
        again = {"act"} if setup.recompute_activation_function else set()
        again |= {"layernorm"} if setup.recompute_norms else set()
        if mode is Recompute.SELECTIVE:
            again |= set(setup.recompute_modules or ("core_attn",))
        if "moe" in again and self.parts["moe"]:
            again -= {"act", "moe_act", "shared_experts"}
        if "mlp" in again and self.parts["mlp"]:
            again -= {"act"}
        if "act" in again:
            again -= {"moe_act"}
        own = {"core_attn": self.core, "act": self.function, "layernorm": self.norms, **self.parts}
        return self.saved - sum(own[name] for name in again)

    def backward_working(self, setup: TrainingSetup, mode: Recompute) -> float:
        """What the backward of the layer needs besides `kept`, recomputed values included."""
        if setup.every_second_product:
            return self.working + self.saved - self.alternate
        return self.working + self.saved - self.kept(setup, mode)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Sizes that all operators of a layer share: tokens here, elements of the residual stream here, bytes."""

    tokens: float
    sequence: float
    stream: float
    element: int
    product_input: int
    norm: float

    @property
    def normalised_input(self) -> float:
        """A norm and the input of the product that follows it."""
        return self.stream * (self.norm + self.product_input)


def layer_activations(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, *, experts: bool = False, encoder: bool = False
) -> LayerActivations:
    """Activations of one layer of `shape`: with `experts`, or dense; of the decoder, or of the `encoder`."""
    sequence = shape.encoder_sequence_length if encoder else shape.sequence_length
    tokens = setup.micro_batch * sequence / setup.cp
    element = LOW_PRECISION_BYTES[setup.precision]
    low = setup.precision in ("fp8", "fp4") and traits.saved_low_precision_inputs
    fused_norm = ((traits.fused_rms_norm or setup.fused_norm) and not setup.single_norms) or not shape.rms_norm
    sizes = _Sizes(
        tokens=tokens,
        sequence=sequence,
        stream=tokens * shape.hidden / (setup.tp if setup.sequence_parallel else 1),
        element=element,
        product_input=1 if low else element,
        # A fused norm keeps its input; PyTorch's own operators a float32 copy and the normalised values.
        norm=element if fused_norm else 4 + element,
    )
    saved, core, working = _attention(shape, setup, traits, sizes, sequence)
    if shape.encoder_layers and not encoder:
        cross = _attention(shape, setup, traits, sizes, shape.encoder_sequence_length)
        saved, core = saved + cross[0], core + cross[1]
    feed_forward, function, widest = (_experts if experts else _dense)(shape, setup, traits, sizes)
    inside = feed_forward - sizes.normalised_input - (sizes.stream if shape.dropout else 0.0)
    gradients = 2 * sizes.stream * element + (tokens * shape.hidden * element if setup.sequence_parallel else 0.0)
    return LayerActivations(
        saved=saved + feed_forward,
        core=core,
        function=function,
        norms=2 * sizes.stream * sizes.product_input,
        parts={
            "mlp": 0.0 if experts else inside,
            "moe": inside if experts else 0.0,
            "moe_act": function - _shared(shape, setup, traits, sizes)[1] if experts else 0.0,
            "shared_experts": _shared(shape, setup, traits, sizes)[0] if experts else 0.0,
            "mla_up_proj": _up_projections(shape, setup, sizes, tokens),
        },
        input=sizes.stream * element,
        alternate=_alternate(shape, setup, sizes, experts=experts),
        # What the feed-forward network kept is gone by the time attention goes back.
        working=max(working - feed_forward, widest) + gradients,
    )


def _alternate(shape: TransformerShape, setup: TrainingSetup, sizes: _Sizes, *, experts: bool) -> float:
    """What torchtitan keeps: outputs of attention and of the first, third, fifth ... product, and the layer's input.

    The products are queries, keys, values, output, gate (or inner values), inner values, output: kept are queries,
    values, the gate and the output (``torchtitan/distributed/activation_checkpoint.py``). Of experts all is computed
    again but their input.
    """
    query, key_value, output = _widths(shape, setup)
    attention = sizes.tokens * (query + key_value / 2 + output)
    if experts:
        return (2 * sizes.stream + attention) * sizes.element
    inner = sizes.tokens * shape.feed_forward / setup.tp
    return (2 * sizes.stream + attention + inner) * sizes.element


def _attention(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, sizes: _Sizes, keys: float
) -> tuple[float, float, float]:
    """Saved bytes, those of the core, and working bytes; `keys` is the length of the sequence that is looked at."""
    element, tokens = sizes.element, sizes.tokens
    heads = shape.heads / setup.tp
    key_tokens = tokens * keys / sizes.sequence
    query, key_value, output = _widths(shape, setup)
    saved = sizes.normalised_input + (tokens * query + key_tokens * key_value) * element
    saved += _latent_inputs(shape, sizes)
    if shape.normalised_queries and not shape.latent_attention:
        saved += (tokens * query + key_tokens * key_value / 2) * element
    if setup.attention in _UNFUSED:
        core, working = _scores(shape, setup, traits, heads * tokens * keys, element)
        if shape.key_value_heads < shape.heads and not shape.latent_attention:
            core += key_tokens * (2 * query - key_value) * element
        result = tokens * output * sizes.product_input
    else:
        core = traits.attention_statistics * heads * tokens
        result = tokens * output * element
        if setup.attention is AttentionKernel.FLASH and setup.packed_attention:
            # FlashAttention 1 in CUDA packs queries, keys and values into one tensor.
            core += (tokens * query + key_tokens * key_value) * element + result
        elif sizes.product_input < element or (
            traits.attention_output_copy and setup.attention is AttentionKernel.FLASH2
        ):
            core += tokens * output * sizes.product_input
        working = (tokens * query + key_tokens * key_value) * element + 4 * tokens * query
        core += bias_bytes(shape, setup, traits) * setup.micro_batch
    mask = sizes.stream if shape.dropout else 0.0
    return saved + core + result + mask, core, working


def bias_bytes(shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits) -> float:
    """Bytes of the biases that attention adds to its scores by distance (Press et al., arXiv:2108.12409).

    Where they are a tensor it has one number for each head and pair of positions. Every layer weighs them anew, for
    each sample (``FlashSelfAttention`` of MindSpeed-LLM).
    """
    by_distance = not shape.rotary and not shape.learned_positions and not shape.encoder_layers
    if not traits.position_biases or not by_distance or setup.attention in _UNFUSED:
        return 0.0
    return shape.heads / setup.tp * shape.sequence_length**2 * LOW_PRECISION_BYTES[setup.precision]


def _widths(shape: TransformerShape, setup: TrainingSetup) -> tuple[float, float, float]:
    """Elements of a token's queries, of its keys and values, and of the attention's output, on one tensor rank."""
    latent = shape.latent_attention
    if latent:
        # The values are a view of the up-projection, which therefore stands whole; the keys are put together anew.
        head = latent.plain_head + latent.rotary_head
        heads = shape.heads / setup.tp
        return heads * head, heads * (head + latent.plain_head + latent.value_head), heads * latent.value_head
    local = max(shape.key_value_heads / setup.tp, 1.0)
    query = shape.heads * shape.head_size / setup.tp
    return query, 2 * local * shape.head_size, query


def _up_projections(shape: TransformerShape, setup: TrainingSetup, sizes: _Sizes, tokens: float) -> float:
    """Queries, keys and values of latent attention, and the norms of the compressed forms that they are made of."""
    latent = shape.latent_attention
    if not latent:
        return 0.0
    query, key_value, _ = _widths(shape, setup)
    normalised = sizes.stream / shape.hidden * (latent.query_rank + latent.key_value_rank)
    return (tokens * (query + key_value) + normalised) * sizes.element


def _latent_inputs(shape: TransformerShape, sizes: _Sizes) -> float:
    """Compressed queries and keys, before and after their norms (latent attention)."""
    latent = shape.latent_attention
    if not latent:
        return 0.0
    elements = 2 * latent.query_rank + 2 * latent.key_value_rank + latent.rotary_head
    return sizes.stream / shape.hidden * elements * sizes.element


def _scores(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, scores: float, element: int
) -> tuple[float, float]:
    """Saved and working bytes of attention scores that lie in memory.

    One kernel keeps its output for itself and for the product with the values; single operators in PyTorch a
    float32 softmax and its low-precision copy. Dropout keeps a mask and its own output.
    """
    fused = traits.fused_scores or setup.attention is AttentionKernel.FUSED_SOFTMAX
    softmax = element if fused else 4 + element
    dropout = 1 + element if shape.dropout else 0
    return scores * (softmax + dropout), scores * (2 * element if fused else 2 * element + 4)


def _dense(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, sizes: _Sizes
) -> tuple[float, float, float]:
    """Saved bytes of the feed-forward network, those of its activation function's output, and working bytes."""
    width = sizes.tokens * shape.feed_forward / setup.tp
    saved, function, working = _activation(shape, setup, traits, sizes, width)
    mask = sizes.stream if shape.dropout else 0.0
    return sizes.normalised_input + saved + mask, function, working


def _activation(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, sizes: _Sizes, width: float
) -> tuple[float, float, float]:
    """Saved bytes of the inner products of a network of `width` elements, their output's, and working bytes."""
    inner = 2 if shape.gated else 1
    fused = traits.fused_gate and not setup.single_gate
    kept = inner + (1 if shape.gated and not fused else 0)
    function = width * sizes.product_input
    return width * kept * sizes.element + function, function, width * (inner + 1) * sizes.element


def _shared(shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, sizes: _Sizes) -> tuple[float, float]:
    """Saved bytes of the experts that all tokens go to, and those of their activation function's output."""
    width = shape.experts.shared_feed_forward if shape.experts else 0
    saved, function, _ = _activation(shape, setup, traits, sizes, sizes.tokens * width / setup.tp)
    return saved, function


def _experts(
    shape: TransformerShape, setup: TrainingSetup, traits: MemoryTraits, sizes: _Sizes
) -> tuple[float, float, float]:
    """The same of router, permuted tokens into and out of the experts, and inner values, shared experts' included."""
    assert shape.experts is not None
    experts, element = shape.experts, sizes.element
    uneven = experts.capacity_factor or (UNEVEN_ROUTING if setup.ep > 1 and not setup.forced_balance else 1.0)
    routed = sizes.tokens * setup.expert_tp / setup.tp * experts.per_token * uneven
    saved, function, working = _activation(shape, setup, traits, sizes, routed * experts.feed_forward / setup.expert_tp)
    # Where the router's share weighs what comes out of the second product, that stands too.
    fused = traits.fused_gate and shape.gated and not setup.single_gate
    saved += routed * shape.hidden * (sizes.product_input + (0 if traits.weighted_experts else element))
    if traits.weighted_experts and not fused:
        saved, function = saved + function, 2 * function
    working += routed * shape.hidden * element
    shared = _shared(shape, setup, traits, sizes)
    saved, function = saved + shared[0], function + shared[1]
    # The router computes in float32; where products keep 8 bits it has the 16-bit tokens to itself.
    router = sizes.stream / shape.hidden * experts.count * 8
    router += sizes.stream * element if sizes.product_input < element else 0.0
    mask = sizes.stream if shape.dropout else 0.0
    return sizes.normalised_input + saved + router + mask, function, working
