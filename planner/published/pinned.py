"""Published training runs as pinned plans: a `TrainingRun` in the words of a plan request.

What a row states, and what stands in where it states nothing, is `planner.published.reading`'s to say. Here a run
becomes a network, pins that leave the search nothing to choose, and the software that it runs on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import get_args

from planner.cost.memory.parameters import V_SHAPED, local_vocabulary, schedule_name
from planner.cost.memory.states import usual_gradient_bytes
from planner.cost.memory_traits import traits_of
from planner.cost.software import with_settings
from planner.cost.software_file import MemoryHabits, Samples, shipped_stacks
from planner.cost.stacks import AttentionKernel, Stack
from planner.cost.training_run import (
    Hybrid,
    LayeredNetwork,
    OptimizerSharding,
    Recompute,
    TrainingRun,
    TrainingSetup,
    TransformerShape,
)
from planner.cost.work import OPTIMIZERS
from planner.graph.fusion import SINGLE
from planner.networks.adapters import ALL_LINEAR
from planner.plans.exchange import UNASKED, Exchange
from planner.plans.hints import Hint, hint
from planner.plans.pins import Pins
from planner.plans.request import PlanRequest
from planner.published.layered.prediction import FUSED_IN_HALF
from planner.published.layered.sequence import padded_frames
from simulator.errors import UnsupportedError
from simulator.hardware import Hardware
from simulator.profiles import load_profile
from simulator.program import Kernel

_SIDES = (224, 240, 260, 300, 380, 456, 528, 600)
"""Side of the images of EfficientNet B0 to B7 (arXiv:1905.11946)."""
_NETWORKS = (
    (r"(?:rn|resnet)_?50(?:_?v1_?5)?", "zoo:resnet50", 224),
    (r"resnet_?(18|34|101|152)", "timm:resnet{0}", 224),
    (r"resnext_?(50|101)_(\d+x\d+)d", "timm:resnext{0}_{1}d", 224),
    (r"se_?resnet_?(18|34|50|101)", "timm:seresnet{0}", 224),
    (r"se_?resnext_?101_32x4d", "timm:seresnext101_32x4d", 224),
    (r"densenet_?(121|161|169|201)", "timm:densenet{0}", 224),
    (r"vgg_?(11|13|16|19)", "timm:vgg{0}", 224),
    (r"mobilenet_v2_(100|140)", "timm:mobilenetv2_{0}", 224),
    (r"mobilenet_v3_(small|large)_100", "timm:mobilenetv3_{0}_100", 224),
    (r"efficientnet_?(?:widese_?)?b([0-7])", "timm:efficientnet_b{0}", 0),
    (r"efficientnet_?v2(?:_?s)?", "timm:efficientnetv2_s", 300),
    (r"swin_(?:tiny|transformer)", "timm:swin_tiny_patch4_window7_224", 224),
)
"""Patterns of names as `planner.published.layered.lookup.plain_name` has them, specifications, and sides of images."""


def image_network(name: str, side: int = 0) -> str:
    """Return the specification of the classifier that is published as `name`; empty where it is not known.

    Its images have `side` pixels, or as many as usual. Squeezed channels that are wider than usual (``widese``)
    count as the usual ones.

    >>> image_network("se_resnext101_32x4d"), image_network("efficientnet_b4", 320), image_network("ssd")
    ('timm:seresnext101_32x4d@224', 'timm:efficientnet_b4@320', '')
    """
    for pattern, spec, usual in _NETWORKS:
        if found := re.fullmatch(pattern, name):
            source = spec.format(*found.groups())
            return source if source.startswith("zoo:") else f"{source}@{side or usual or _SIDES[int(found[1])]}"
    return ""


OF_FRAMES = "frames_"
"""How factories of `planner.networks.quartznet` begin, whose module needs torch."""
FOLDED = ("zbv", "dualpipe", "dualpipe_v")
"""Schedules whose ranks hold two stages each, which the planner cuts."""
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "dualpipe", "dualpipe_v")
ORDER = "pp-dp-cp-tp"
"""Megatron-LM and DeepSpeed lay tensor ranks out next to each other and stages farthest apart
(``megatron/core/parallel_state.py``, ``deepspeed/runtime/pipe/topology.py``)."""
EXPERTS_ORDER = "pp-dp-cp-ep-tp"
ADAPTERS = {"peft_type": "LORA", "r": 32, "lora_alpha": 32}
"""Adapters of a run that describes none: those of Megatron Bridge (``LoRA``, ``dim`` 32)."""
OWN_SAMPLES = Exchange(cross_batch=True)
"""Batch norms of ``DistributedDataParallel`` see a rank's samples alone (documentation of `torch.nn.SyncBatchNorm`)."""
MEMORY = "device.memory_bytes"
"""Place of the memory in a profile; here what is left of it for a job (`Hardware.device_memory_bytes`)."""
ROUNDED = 0.01
"""Part of its width by which a network may be planned wider or narrower, so that its heads divide it."""
MEGATRON_BUCKET, MEGATRON_BUCKET_OF_RANK = 40e6, 1e6
DEEPSPEED_BUCKET = 5e8
"""Elements (``reduce_bucket_size`` of DeepSpeed's configuration)."""
BUCKETS_MB: Mapping[Stack, int] = {
    Stack.EAGER: 25, Stack.COMPILED: 25, Stack.CHANNELS_LAST: 25, Stack.PADDLE: 25, Stack.MINDSPORE: 64,
    Stack.TENSORFLOW: 64,
}  # fmt: skip
"""``bucket_cap_mb`` of PyTorch's and ``comm_buffer_size`` of Paddle's ``DataParallel``, the threshold of MindSpore's
``comm_fusion`` and of Horovod's ``HOROVOD_FUSION_THRESHOLD``."""
LARGEST_BUCKET_MB = 2**14
FUSED = (AttentionKernel.FLASH, AttentionKernel.FLASH2, AttentionKernel.VENDOR)


@dataclass(frozen=True, kw_only=True)
class PinnedRun(PlanRequest):
    """A published run as the request for one plan.

    ``network`` is a specification, or the text of a ``config.json``; ``adapters`` is the text of PEFT's config of
    those, where they alone are trained. ``pins`` are the whole plan, ``hints`` say what tensor ranks do that pins leave
    open. ``software``, ``attention`` and ``norms`` are empty where a plan cannot be told them. With ``tf32`` products
    of float32 tensors run in TF32, where the device can.
    ``cluster`` says in which numbers the cluster differs from the profile, by their place there, 0 for what it lacks.
    ``exchange`` is how tensors travel where that is not as the plan has it unasked. ``approximated`` says
    what stands in for what plans cannot express; runs that differ in nothing else are equal.
    """

    network: str
    precision: str
    global_batch: int
    top: int = 1
    sensitivity: bool = False
    adapters: str = ""
    tf32: bool = False
    cluster: tuple[tuple[str, float], ...] = ()
    approximated: tuple[str, ...] = field(default=(), compare=False)


class NotPinnedError(UnsupportedError):
    """A run that no plan expresses; the message says what stands in the way."""


def require(holds: object, why: str) -> None:
    """Raise NotPinnedError with `why` unless `holds`."""
    if not holds:
        raise NotPinnedError(f"no plan expresses the run: {why}")


def pinned_run(run: TrainingRun) -> PinnedRun:
    """Translate a run.

    Raises
    ------
    NotPinnedError
        No plan expresses it.
    """
    setup, notes = run.setup, list[str]()
    _check(setup)
    if isinstance(run.network, LayeredNetwork):
        network, length = _layered(run.network, setup, run.family), None
    else:
        network, length = json.dumps(_config(run, run.network, notes)), run.network.sequence_length
    transformer = length is not None
    return PinnedRun(
        network=network,
        hardware=run.hardware.name,
        devices=setup.devices,
        global_batch=setup.global_batch,
        sequence_length=length,
        precision="fp32" if setup.precision == "tf32" else setup.precision,
        tf32=transformer and setup.precision == "tf32",
        pins=Pins.read(_pins(run, notes)),
        optimizer=_optimizer(setup, notes),
        hints=_between_products(setup, run.network) if isinstance(run.network, TransformerShape) else (),
        software=software_of(setup, run.network if isinstance(run.network, LayeredNetwork) else None),
        attention=str(setup.attention) if transformer else "",
        norms=_norms(run),
        adapters=_adapters(setup) if setup.trained_fraction < 1 else "",
        cluster=tuple(_cluster(run.hardware)),
        exchange=UNASKED if transformer else OWN_SAMPLES,
        approximated=tuple(dict.fromkeys(notes)),
    )


def _adapters(setup: TrainingSetup) -> str:
    chosen = setup.adapted if setup.adapted == ALL_LINEAR else setup.adapted.split(",")
    return json.dumps(ADAPTERS | {"target_modules": chosen})


def _check(setup: TrainingSetup) -> None:
    require(setup.ep == 1 or setup.expert_tp in (1, setup.tp), f"experts are cut {setup.expert_tp} ways beside tp")
    require(setup.cp == 1 or setup.attention in FUSED, "context ranks beside attention that is not fused")
    require(not setup.local_share, "layers that learn locally")
    require(setup.stack is not Stack.MINDSPORE_TOOLKIT, "plans do not time what its kernels take on Ascend")


def _cluster(stated: Hardware) -> Iterator[tuple[str, float]]:
    """Yield the numbers in which a row's cluster differs from its profile (`planner.published.reading_hardware`)."""
    shipped = load_profile(stated.name)
    if stated.device_memory_bytes != shipped.device_memory_bytes:
        yield MEMORY, stated.device_memory_bytes
    if stated.memory_bandwidth != shipped.memory_bandwidth:
        yield "device.memory_bandwidth_bytes_per_s", stated.memory_bandwidth
    for place, (level, other) in enumerate(zip(stated.levels, shipped.levels, strict=True)):
        for name in ("bandwidth_bytes_per_s", "reduction_bandwidth_bytes_per_s"):
            if getattr(level, name) != getattr(other, name):
                yield f"topology.levels.{place}.{name}", getattr(level, name)
    if stated.node is None and shipped.node is not None:
        yield from (("topology.node", 0.0), ("topology.fabric", 0.0))
    if not stated.collective_tables and shipped.collective_tables:
        yield "collectives", 0.0


def _optimizer(setup: TrainingSetup, notes: list[str]) -> str:
    if setup.optimizer in OPTIMIZERS:
        return setup.optimizer
    notes.append(f"optimizer {setup.optimizer} planned as adam")
    return "adam"


def software_of(setup: TrainingSetup, samples: LayeredNetwork | None = None) -> str:
    """The software by its stack, with the settings of the run that are not its own; empty for a stack without a name.

    Of networks other than transformers, whose ``samples`` are given, plans are told what overlaps, what fuses and what
    the host does.
    """
    name, transformer = str(setup.stack), samples is None
    if name not in shipped_stacks().software:
        return ""
    gathers = setup.optimizer_sharding is OptimizerSharding.ZERO3 and setup.dp > 1
    overlaps = setup.overlap_parameters if gathers and transformer else setup.overlap_gradients
    wanted: dict[str, object] = {"overlaps": overlaps}
    if not transformer and (
        setup.plain_graph or (setup.stack in FUSED_IN_HALF and setup.precision not in ("fp16", "bf16"))
    ):
        wanted["fusion"] = SINGLE
    if samples and (kind := samples.sample.replace(" ", "_")) in get_args(Samples):
        wanted |= {"samples": kind, "sample_area": float(f"{samples.area:.4g}")}
    if transformer:
        usual = usual_gradient_bytes(setup.stack, setup.precision)
        wanted |= {setting: getattr(setup, setting) for setting in MemoryHabits.model_fields if hasattr(setup, setting)}
        wanted |= {
            "deterministic": setup.deterministic,
            "gradient_dtype": "float32" if setup.sent_gradient_bytes > setup.gradient_bytes else "",
            "gradient_bytes": -1 if setup.gradient_bytes == usual else setup.gradient_bytes,
            "whole_sums": not setup.scattered_gradients,
            "single_gathers": gathers and not overlaps,
            "optimizer_states": "" if setup.optimizer in OPTIMIZERS else setup.optimizer,
        }
    return with_settings(name, wanted)


def _norms(run: TrainingRun) -> str:
    """How root-mean-square norms run, as the row or its stack has it; empty where there are none."""
    network, setup = run.network, run.setup
    if not isinstance(network, TransformerShape) or not network.rms_norm:
        return ""
    fused = (setup.fused_norm or traits_of(setup.stack).fused_rms_norm) and not setup.single_norms
    return "fused" if fused else "unfused"


def _between_products(setup: TrainingSetup, network: TransformerShape) -> tuple[Hint, ...]:
    """What tensor ranks do between the products of layers: norms and sums on whole rows, all of these or their part.

    A search shares them out as suits it, numbers of rows as well, which none of these runs did. Beside a context or
    expert axis nothing may be said of single operators.
    """
    if setup.tp == 1 or setup.cp > 1 or setup.ep > 1 or not network.causal or network.hybrid:
        return ()
    plain = network.head_size * network.heads == network.hidden and network.key_value_heads == network.heads
    gated = network.gated or network.experts is not None or not plain or network.latent_attention is not None
    placed = "S(1)" if setup.sequence_parallel else "R"
    loss = () if setup.vocabulary_parallel_loss else (hint("*log_softmax", "tensor", outputs=["R"]),)
    norms = hint("*norm/*", "tensor", outputs=[placed]) if gated else hint("*.ln_*/*", "tensor", outputs=[placed] * 3)
    return norms, hint("*.layers.*[0-9]/add*" if gated else "*.h.*[0-9]/add*", "tensor", outputs=[placed]), *loss


def _stage_layers(run: TrainingRun) -> tuple[int, ...]:
    """Layers of each chunk, as the row or its software has them, else equally many; none without a pipeline."""
    setup, network = run.setup, run.network
    if setup.pp == 1 or not isinstance(network, TransformerShape) or setup.schedule in FOLDED:
        return ()
    chunks = setup.pp * setup.vpp
    if setup.layers_per_stage:
        return setup.layers_per_stage
    require(network.layers % chunks == 0, f"{network.layers} layers do not divide among {chunks} stages")
    return (network.layers // chunks,) * chunks


def _expert_axis(setup: TrainingSetup) -> int:
    """Ranks beside tensor ranks that whole experts are dealt out over: Megatron-LM counts tensor ranks in ``ep``."""
    return max(1, setup.ep * setup.expert_tp // setup.tp) if setup.ep > 1 else 1


def _expert_pins(setup: TrainingSetup) -> dict[str, object]:
    """How tokens travel to their experts, and what tensor ranks have of these."""
    pins: dict[str, object] = {
        "expert_messages": "once_a_node" if setup.tokens_sent_once else "tokens",
        "expert_overlap": setup.overlap_experts,
    }
    if setup.tp > 1:
        pins["expert_cut"] = "width" if setup.expert_tp > 1 else "whole"
    return pins


def _pins(run: TrainingRun, notes: list[str]) -> dict[str, object]:
    setup = run.setup
    # Context ranks have the same parameters, so that states are shared out over them as well.
    replicas = setup.dp * setup.cp
    sharding = setup.optimizer_sharding if replicas > 1 else OptimizerSharding.NONE
    pins: dict[str, object] = {
        "dp": setup.dp, "tp": setup.tp, "pp": setup.pp,
        "vpp": 2 if setup.pp > 1 and schedule_name(setup.schedule) in V_SHAPED else setup.vpp,
        "micro_batch": setup.micro_batch, "order": ORDER,
    }  # fmt: skip
    if setup.cp > 1:
        # Megatron-LM passes keys and values around unless told otherwise.
        pins |= {"cp": setup.cp, "context_algorithm": "ring"}
    if setup.ep > 1:
        experts = _expert_axis(setup)
        pins |= _expert_pins(setup) | {"order": EXPERTS_ORDER, "ep": experts}
        # Only states of what is no expert are shared out where every data-parallel rank has experts of its own.
        alone = sharding is not OptimizerSharding.NONE and setup.dp <= experts
        sharding = OptimizerSharding.ZERO1 if alone else sharding
    if replicas > 1:
        pins["optimizer_sharding"] = sharding
    group = setup.shard_group or setup.dp // _expert_axis(setup)
    # Some software counts context ranks among those that share: where all replicas do, nothing is to be said.
    if sharding is not OptimizerSharding.NONE and group > 1 and (setup.cp == 1 or group != replicas):
        pins["shard_size"] = group
    if stages := _stage_layers(run):
        pins["stage_layers"] = stages
    if replicas > 1:
        pins |= _messages(setup, sharding)
    pins |= _recompute(run, notes)
    pins["offload_optimizer"] = setup.offload_optimizer
    for kept in ("offload_parameters", "offload_activations"):
        if getattr(setup, kept):
            pins[kept] = True
    if setup.tp > 1:
        pins |= {"sequence_parallel": setup.sequence_parallel, "tensor_cut": "width"}
        if setup.overlap_tensor and setup.sequence_parallel:
            pins["tensor_overlap"] = True
    if setup.pp > 1:
        pins["schedule"] = _schedule(setup, notes)
    return pins


def _messages(setup: TrainingSetup, sharding: OptimizerSharding) -> dict[str, object]:
    """Size of gradient messages as the software has it, and no parameter that stays whole beside sharded ones.

    DeepSpeed reduces ``reduce_bucket_size`` elements at once. Megatron-Core makes buckets of 40 million elements, or
    of a million for each rank where that is more, and one bucket of all where messages do not overlap
    (``distributed/distributed_data_parallel.py``), and so does MindSpeed. `BUCKETS_MB` has the others.
    """
    elements = setup.reduce_bucket_elements
    if setup.stack is Stack.DEEPSPEED and not elements:
        elements = DEEPSPEED_BUCKET
    if setup.stack in (Stack.MEGATRON, Stack.TRANSFORMER_ENGINE, Stack.MINDSPEED) and not elements:
        elements = max(MEGATRON_BUCKET, MEGATRON_BUCKET_OF_RANK * setup.dp) if setup.overlap_gradients else inf
    pins: dict[str, object] = {} if sharding is OptimizerSharding.NONE else {"sharding_threshold_kb": 0}
    if elements:
        each = 4 if setup.precision in ("fp32", "tf32") else 2
        pins["bucket_mb"] = round(max(1.0, min(elements * each / 2**20, LARGEST_BUCKET_MB)))
    elif setup.stack in BUCKETS_MB:
        pins["bucket_mb"] = BUCKETS_MB[setup.stack]
    return pins


def _recompute(run: TrainingRun, notes: list[str]) -> dict[str, object]:
    """Pin recomputation to the layers: no software recomputes the embedding or the head."""
    setup, network = run.setup, run.network
    if setup.every_second_product:
        notes.append("checkpoints of every second product planned as selective recomputation")
        return {"recompute": Recompute.SELECTIVE}
    if setup.recompute_modules:
        return {"recompute": setup.recompute, "recompute_modules": setup.recompute_modules}
    if setup.recompute is Recompute.FULL and isinstance(network, TransformerShape) and setup.schedule not in FOLDED:
        chunks = _stage_layers(run) or (network.layers,)
        fullest = max(sum(chunks[rank :: setup.pp]) for rank in range(setup.pp))
        return {"recompute_layers": setup.recompute_layers or fullest}
    return {"recompute": setup.recompute}


def _schedule(setup: TrainingSetup, notes: list[str]) -> str:
    schedule = "interleaved_1f1b" if setup.vpp > 1 else setup.schedule.replace("-", "_")
    require(schedule in SCHEDULES, f"schedule {schedule}")
    return schedule


def _layered(network: LayeredNetwork, setup: TrainingSetup, family: str) -> str:
    if network.name == "quartznet":
        return f"py:planner.networks.quartznet:{OF_FRAMES}{padded_frames(setup.micro_batch, setup.devices)}"
    found = image_network(network.name, network.side)
    require(found, f"the planner has no network {network.name}")
    dense = sum(layer.weights * layer.count for layer in network.layers if layer.kernel is Kernel.MATMUL)
    turned = family == "ascend910" and dense > network.parameters / 2
    require(not turned, "dense layers, whose operands this device brings into another layout, have most of the weights")
    return found


def _config(run: TrainingRun, network: TransformerShape, notes: list[str]) -> dict[str, object]:
    """The ``config.json`` of a network of this shape; the vocabulary is padded as the software pads it."""
    require(not network.encoder_layers, "an encoder beside the decoder")
    rotary = network.gated and not network.latent_attention and not network.experts
    require(not network.attention_window or rotary, "attention within a window beside experts or learned positions")
    rows = local_vocabulary(network, run.setup.tp, traits_of(run.setup.stack).padded_vocabulary) * run.setup.tp
    vocabulary = round(rows)
    if network.multi_token_layers:
        notes.append("layers that predict further tokens left out")
    if not network.causal:
        return _masked(network, vocabulary, notes)
    if network.hybrid:
        return _hybrid(network, network.hybrid, vocabulary)
    if network.latent_attention:
        return _latent(network, vocabulary)
    plain = network.head_size * network.heads == network.hidden
    grouped = network.key_value_heads != network.heads
    if network.gated or network.experts or grouped or not plain:
        return _rotary(_of_whole_heads(network, notes), vocabulary, notes)
    return {
        "model_type": "gpt2", "n_layer": network.layers, "n_embd": network.hidden, "n_head": network.heads,
        "n_inner": network.feed_forward, "vocab_size": vocabulary, "n_positions": network.sequence_length,
        "tie_word_embeddings": network.tied_embeddings,
    } | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1 * network.dropout)  # fmt: skip


def _hybrid(network: TransformerShape, hybrid: Hybrid, vocabulary: int) -> dict[str, object]:
    """A config of Nemotron-H."""
    kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
    experts = network.experts
    dealt = {} if experts is None else {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "n_shared_experts": 1,
        "moe_intermediate_size": experts.feed_forward, "moe_latent_size": hybrid.latent or None,
        "moe_shared_expert_intermediate_size": experts.shared_feed_forward,
    }  # fmt: skip
    return {
        "model_type": "nemotron_h", "layers_block_type": [kinds[kind] for kind in hybrid.kinds],
        "hidden_size": network.hidden, "vocab_size": vocabulary, "intermediate_size": network.feed_forward,
        "num_attention_heads": network.heads, "num_key_value_heads": network.key_value_heads,
        "head_dim": network.head_size, "mamba_num_heads": hybrid.heads, "mamba_head_dim": hybrid.head_size,
        "ssm_state_size": hybrid.state, "n_groups": hybrid.groups, "max_position_embeddings": network.sequence_length,
    } | dealt  # fmt: skip


def _of_whole_heads(network: TransformerShape, notes: list[str]) -> TransformerShape:
    """The network with a width that its heads divide, as networks of transformers must have."""
    if network.hidden % network.heads == 0:
        return network
    hidden = network.heads * network.head_size
    near = abs(hidden / network.hidden - 1) < ROUNDED
    require(near, f"{network.heads} heads do not divide a width of {network.hidden}")
    notes.append(f"a width of {network.hidden} planned as {hidden}, which the heads divide")
    return replace(network, hidden=hidden)


def _rotary(network: TransformerShape, vocabulary: int, notes: list[str]) -> dict[str, object]:
    """A config of Llama, or with experts of Mixtral."""
    widths = {"feed_forward": network.feed_forward}
    if network.experts:
        widths["experts"] = network.experts.feed_forward
    if not network.gated:
        widths = {name: max(1, round(2 * width / 3)) for name, width in widths.items()}
        notes.append("layers without a gate planned as gated ones of two thirds of the width, with as many weights")
    if not network.rms_norm:
        notes.append("layer norms planned as root-mean-square norms")
    plain = network.head_size * network.heads == network.hidden
    return {
        "model_type": "llama", "num_hidden_layers": network.layers, "hidden_size": network.hidden,
        "num_attention_heads": network.heads, "num_key_value_heads": network.key_value_heads,
        "intermediate_size": widths["feed_forward"], "vocab_size": vocabulary,
        "max_position_embeddings": network.sequence_length, "tie_word_embeddings": network.tied_embeddings,
    } | ({} if plain else {"head_dim": network.head_size}) | (
        _window(network) | _experts(network, widths, notes)
    )  # fmt: skip


def _window(network: TransformerShape) -> dict[str, object]:
    """Return the keys that turn a config of Llama into one of Mistral."""
    window = network.attention_window
    return {"model_type": "mistral", "sliding_window": window} if 0 < window < network.sequence_length else {}


def _experts(network: TransformerShape, widths: dict[str, int], notes: list[str]) -> dict[str, object]:
    """What a config of Mixtral has beside one of Llama: equal experts in every layer, none of which takes all."""
    if network.experts is None:
        return {}
    experts = network.experts
    require(not experts.shared_feed_forward and not experts.dense_layers, "shared experts or dense layers")
    return {
        "model_type": "mixtral", "intermediate_size": widths["experts"],
        "num_local_experts": experts.count, "num_experts_per_tok": experts.per_token,
    }  # fmt: skip


def _masked(network: TransformerShape, vocabulary: int, notes: list[str]) -> dict[str, object]:
    """A config of BERT, whose head sees the predicted positions alone."""
    predicted = max(1, round(network.predicted_positions * network.sequence_length))
    return {
        "model_type": "bert", "num_hidden_layers": network.layers, "hidden_size": network.hidden,
        "num_attention_heads": network.heads, "intermediate_size": network.feed_forward, "vocab_size": vocabulary,
        "max_position_embeddings": max(512, network.sequence_length),
    } | ({} if predicted == network.sequence_length else {"max_predictions_per_seq": predicted})  # fmt: skip


def _latent(network: TransformerShape, vocabulary: int) -> dict[str, object]:
    """A config of DeepSeek-V3, or of V2 where queries are whole; experts in one group, as plans price no routing."""
    parts, experts = network.latent_attention, network.experts
    require(experts, "latent attention beside dense layers alone")
    assert parts is not None
    assert experts is not None
    return {
        "model_type": "deepseek_v3" if parts.query_rank else "deepseek_v2",
        "num_hidden_layers": network.layers, "hidden_size": network.hidden,
        "num_attention_heads": network.heads, "num_key_value_heads": network.heads,
        "q_lora_rank": parts.query_rank or None, "kv_lora_rank": parts.key_value_rank, "v_head_dim": parts.value_head,
        "qk_nope_head_dim": parts.plain_head, "qk_rope_head_dim": parts.rotary_head,
        "intermediate_size": network.feed_forward, "moe_intermediate_size": experts.feed_forward,
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "n_group": 1, "topk_group": 1,
        "n_shared_experts": experts.shared_feed_forward // experts.feed_forward,
        "first_k_dense_replace": experts.dense_layers, "vocab_size": vocabulary,
        "max_position_embeddings": network.sequence_length,
    }  # fmt: skip
