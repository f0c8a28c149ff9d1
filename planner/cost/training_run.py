"""A training run in the words of the field: what is trained, how it is cut, in which software, on which cluster.

Memory is predicted from these records, and the steps of published runs. They name no source and no measured value.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from planner.cost.stacks import AttentionKernel, Stack, family_of, stack_key
from planner.networks.adapters import ALL_LINEAR
from simulator.errors import InputError
from simulator.hardware import Hardware
from simulator.program import Kernel

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "fp4")


def _check_counts(owner: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(owner, name)
        if value < 1:
            raise InputError(f"{name} is {value}; it must be at least 1: correct it")


class Recompute(StrEnum):
    """What the backward pass computes again instead of keeping it."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention core: scores, softmax and their product with the values."""
    FULL = "full"
    """Every layer from its input."""


class OptimizerSharding(StrEnum):
    """What the ranks of the data axis share out: optimizer states, also gradients, also parameters."""

    NONE = "none"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"


NOVOGRAD = "novograd"
"""Optimizer that asks of each tensor on the host whether its norm was ever taken: host and device take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward network.

    ``dense_layers`` at the front keep the dense network; ``shared_feed_forward`` is the width of the experts
    that every token visits (0: none); ``capacity_factor`` 0 drops no token.
    """

    count: int
    per_token: int
    feed_forward: int
    shared_feed_forward: int = 0
    dense_layers: int = 0
    capacity_factor: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): ranks of the compressed query and key-value."""

    query_rank: int
    key_value_rank: int
    rotary_head: int
    plain_head: int
    value_head: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Hybrid:
    """Layers of one kind each (Nemotron-H, arXiv:2504.03624).

    ``kinds`` has a letter for each: ``M`` state space (Mamba-2), ``*`` attention, ``-`` feed-forward, ``E`` experts.
    The other sizes are those of state-space layers, but for ``latent``, the width of tokens at experts (0: their own).
    """

    kinds: str
    heads: int
    head_size: int
    state: int
    groups: int
    latent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer.

    ``head_size`` is that of queries and keys; ``feed_forward`` the inner width of the dense network, whose
    ``gated`` form (SwiGLU, GeGLU) has three matrices instead of two. ``vocabulary`` is unpadded.
    ``causal`` attention sees no later token. ``learned_positions`` counts rows of a position table.
    ``layers`` counts every block; an encoder-decoder is described by its decoder blocks here and by
    ``encoder_layers``, whose blocks have no cross attention.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    feed_forward: int
    vocabulary: int
    sequence_length: int
    gated: bool = False
    rms_norm: bool = False
    biases: bool = True
    rotary: bool = False
    learned_positions: int = 0
    tied_embeddings: bool = True
    causal: bool = True
    dropout: bool = False
    attention_window: int = 0
    experts: Experts | None = None
    latent_attention: LatentAttention | None = None
    hybrid: Hybrid | None = None
    encoder_layers: int = 0
    encoder_sequence_length: int = 0
    multi_token_layers: int = 0
    normalised_queries: bool = False
    """Queries and keys pass through a norm of their own."""
    embedding_norm: bool = False
    """Embedded tokens pass through a norm before the first layer (BLOOM)."""
    predicted_positions: float = 1.0
    """Share of the positions for which logits are computed: masked language models predict some 15 %."""

    def __post_init__(self) -> None:
        _check_counts(self, ("layers", "hidden", "heads", "key_value_heads", "head_size", "sequence_length"))
        if self.encoder_layers:
            _check_counts(self, ("encoder_sequence_length",))
        if self.experts:
            _check_counts(self.experts, ("count", "per_token"))
            if self.experts.dense_layers > self.layers:
                raise InputError(
                    f"{self.experts.dense_layers} dense layers are more than the {self.layers} layers: correct one"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """One operator of a network that is described layer by layer, for one sample, forward only.

    ``flops`` and ``elements_moved`` (read and written) are per sample; ``weights`` elements are read once a call.
    ``saved`` elements per sample are kept for the backward pass. ``m, n, k`` per sample describe matrix products
    and convolutions (as implicit matrix products: m = output pixels, n = output channels, k = input channels *
    kernel area / groups).
    ``vector``: what vector units do that sum over channels or take exponentials, and no product hides.
    ``single``: its tensors are float32 in mixed precision as well. ``frozen``: it has no backward pass.
    ``backward_only``: it has no forward pass, and twice the work of one in the backward pass.
    """

    kernel: Kernel
    flops: float = 0.0
    elements_moved: float = 0.0
    weights: float = 0.0
    saved: float = 0.0
    m: float = 0.0
    n: float = 0.0
    k: float = 0.0
    groups: int = 1
    count: int = 1
    vector: bool = False
    single: bool = False
    frozen: bool = False
    backward_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredNetwork:
    """A network other than a transformer: its operators in order, for one sample; ``parameters`` are all trained.

    ``units`` are what published rates count of one sample: tokens of a sentence, frames of a clip; ``area`` is the
    sample's size over that of its kind's usual one, which the host's work on it follows. ``gates`` are channels that
    convolutions of a single pixel, the average of an image, read and write. ``side`` is that of an image, 0 where it is
    the network's usual one.
    """

    name: str
    layers: tuple[LayerWork, ...]
    parameters: float
    sample: str = "image"
    units: float = 1.0
    area: float = 1.0
    gates: float = 0.0
    side: int = 0


_DEGREES = ("devices", "dp", "tp", "pp", "vpp", "cp", "ep", "expert_tp", "micro_batch", "micro_batches")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSetup:
    """How a network is trained: degrees of parallelism, batch, what is kept, precision and software.

    ``dp`` counts replicas of the dense part (``devices / (tp * pp * cp)``); experts are spread over ``ep`` ranks,
    each expert cut over ``expert_tp``. ``micro_batch`` is in samples per replica and forward pass,
    ``micro_batches`` how many of them make a step. ``shard_group`` ranks share sharded state (0: all of ``dp``;
    fewer is HSDP). ``precision`` is what matrices are multiplied in (`PRECISIONS`).
    ``trained_fraction`` below 1 freezes weights (LoRA): no weight gradients for the frozen ones.
    ``layers_per_stage``, where given, has ``pp * vpp`` entries in the order of the network.
    """

    devices: int
    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int = 1
    micro_batch: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    recompute: Recompute = Recompute.NONE
    recompute_layers: int = 0
    """Layers of a stage that ``full`` recompute covers; 0: all."""
    optimizer_sharding: OptimizerSharding = OptimizerSharding.NONE
    shard_group: int = 0
    sequence_parallel: bool = False
    precision: str = "bf16"
    optimizer: str = "adamw"
    attention: AttentionKernel = AttentionKernel.FLASH2
    stack: Stack = Stack.MEGATRON
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    overlap_tensor: bool = False
    gradient_bytes: int = 4
    """Bytes of a gradient element as it is accumulated and reduced."""
    offload_optimizer: bool = False
    """Optimizer states wait in the memory of the host, and with them a rank's share of sharded gradients."""
    offload_parameters: bool = False
    """A rank's share of the parameters waits there as well (ZeRO-3)."""
    trained_fraction: float = 1.0
    adapted: str = ALL_LINEAR
    """Products with adapters, where weights are frozen: all, or the names of some."""
    local_share: float = 0.0
    """Share of the layers, from the first, that learn locally and keep nothing for a backward pass (LU-LoRA)."""
    layers_per_stage: tuple[int, ...] = ()
    deterministic: bool = False
    plain_graph: bool = False
    """TensorFlow's graph runs operator by operator: XLA, which fuses chains of them, is not asked for."""
    graph_engine: bool = True
    """MindSpore's graphs are compiled for Ascend by CANN's engine, not operator by operator."""
    fused_norm: bool = False
    """A fused RMSNorm or layer-norm kernel where the stack's default has none."""
    micro_batch_group: int = 0
    """Micro-batches that an interleaved rank takes through a chunk before the next chunk gets one; 0: ``pp``."""
    single_norms: bool = False
    """RMSNorm of single operators where the stack has a kernel."""
    reduce_bucket_elements: float = 0.0
    """Elements of a buffer that gradients are copied to and reduced in (DeepSpeed: 5e8); 0: they are contiguous."""
    fixed_workspaces: bool = False
    """cuBLAS has workspaces of 32 MiB a stream (``CUBLAS_WORKSPACE_CONFIG=:4096:8``), as reproducible runs ask for."""
    captured_graphs: bool = False
    """Layers are replayed as CUDA graphs, experts' products and messages apart."""
    captured_step: bool = False
    """The whole step is replayed as one CUDA graph, for which what experts hold has room for any routing."""
    grouped_products: bool = False
    """Experts of a rank are multiplied by one call, on several streams (Transformer Engine's ``GroupedLinear``)."""
    pipelines_in_flight: int = 0
    """Micro-batches that a searched schedule may hold on any rank, in multiples of ``pp``; 0: as its formula says."""
    loss_chunks: int = 1
    """Parts of the tokens whose loss is computed one after the other, in float32."""
    master_weight_bytes: int = 4
    """2 where float32 master weights hold the 16-bit parameters in their upper halves (MindSpeed)."""
    frozen_weight_bytes: float = 0.0
    """Bytes of a weight that is not trained, 0.5 in 4 bits (QLoRA); 0: as the precision says."""
    offload_activations: bool = False
    """What is kept for the backward pass waits in the memory of the host."""
    recompute_activation_function: bool = False
    """The output of the feed-forward network's activation function is computed again, whatever else is."""
    recompute_norms: bool = False
    """The norms' outputs, which a layer's products read, are computed again, whatever else is."""
    expandable_segments: bool = False
    """The allocator's segments grow (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``): blocks that are freed in
    another order than they were allocated leave hardly any holes."""
    forced_balance: bool = False
    """Routers give every expert as many tokens (``--moe-router-force-load-balancing``)."""
    recompute_modules: tuple[str, ...] = ()
    """Parts of a layer that ``selective`` recompute drops (Megatron's ``--recompute-modules``); none for the core of
    attention."""
    vocabulary_parallel_loss: bool = True
    """The logits stay cut over ``tp`` in the loss; otherwise every tensor rank computes it on the whole vocabulary."""
    every_second_product: bool = False
    """Checkpoints keep attention and every second matrix product of a layer, the rest is computed again
    (torchtitan's selective checkpointing by operator)."""
    fused_loss: bool = False
    """The loss is compiled (Megatron's ``--cross-entropy-loss-fusion``)."""
    scripted_loss: bool = False
    """TorchScript compiles it, not ``torch.compile``."""
    untuned_convolutions: bool = False
    """cuDNN takes reproducible kernels by rules of thumb, where it usually tries out which are the fastest."""
    early_loss: bool = False
    """The host waits for the loss before it begins the backward pass."""
    eager_kernels: bool = False
    """Libraries load all their kernels into the device at once, as before CUDA 11.7."""
    deferred_head_batches: int = 0
    """Micro-batches whose gradients of the logits wait until the pipeline drains for the head's weight gradient
    (Megatron's ``--defer-embedding-wgrad-compute`` with its limit)."""
    packed_attention: bool = True
    """FlashAttention 1 gets queries, keys and values in one tensor, as its CUDA kernel wants them, not Triton's."""
    legacy_model: bool = False
    """Megatron's network as it was before its core: every layer has a mask of its own, logits less their maximum are
    a tensor of theirs."""
    single_gate: bool = False
    """The gate of a gated network is of single operators where the stack has a kernel for another."""
    scattered_gradients: bool = True
    """Sharded optimizers get their share of the gradients by a reduce-scatter; otherwise all are all-reduced."""
    sent_gradient_bytes: int = 0
    """Bytes of a gradient element on its way between replicas; 0: as it is accumulated."""
    tokens_sent_once: bool = False
    """Experts' dispatcher sends a token to a node once, however many of its experts lie there (DeepEP)."""
    overlap_experts: bool = False
    """Messages to and from experts travel beside kernels of another micro-batch."""
    stage_recompute: tuple[tuple[int, int], ...] = ()
    """Layers that ``full`` and that ``selective`` recompute covers, of each pipeline rank; ``recompute`` then says
    nothing."""

    def __post_init__(self) -> None:
        _check_counts(self, _DEGREES)
        if self.precision not in PRECISIONS:
            raise InputError(f"precision {self.precision!r} is unknown: choose one of {', '.join(PRECISIONS)}")
        product = self.dp * self.tp * self.pp * self.cp
        if product != self.devices:
            raise InputError(
                f"dp {self.dp} x tp {self.tp} x pp {self.pp} x cp {self.cp} = {product} is not the device count "
                f"{self.devices}: correct one of them"
            )

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.micro_batch * self.micro_batches * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """A network, how it is trained, and the cluster it is trained on.

    ``assumed`` lists what was not stated and which default stands in: it widens no interval by itself, but it
    is told to whoever reads the prediction.
    """

    network: TransformerShape | LayeredNetwork
    setup: TrainingSetup
    hardware: Hardware
    assumed: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """Family of its devices."""
        return family_of(self.hardware.device_name)

    @property
    def stack_key(self) -> str:
        """Name under which the coefficients of its stack stand."""
        return stack_key(self.setup.stack, deterministic=self.setup.deterministic, family=self.family)

    @property
    def interval_key(self) -> tuple[str, str, str]:
        """The key of its interval: kind of network, device family, stack."""
        kind = "transformer" if isinstance(self.network, TransformerShape) else "layered"
        return kind, self.family, self.stack_key


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """What is predicted for a run; ``breakdown`` in seconds adds up to ``step_time_s``, ``memory`` to the peak.

    ``memory_figures`` are the peaks that tools show, by the names of `planner.cost.memory.device.MemoryFigure`.
    """

    step_time_s: float
    interval_s: tuple[float, float]
    label: str
    peak_memory_bytes: float
    fits: bool
    breakdown: dict[str, float]
    memory: dict[str, float]
    memory_figures: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What stands in for what the prediction cannot express."""
